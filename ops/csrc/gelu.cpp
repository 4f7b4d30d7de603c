// GELU and bias+GELU bound to torch: the CPU kernels on several threads, and the autograd formulas, differentiable twice.
#include "bindings.h"

#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gptscale {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Gelu variant_of(c10::string_view approximate) {
    if (approximate == "erf") return Gelu::erf;
    if (approximate == "tanh") return Gelu::tanh;
    TORCH_CHECK_VALUE(approximate == "sigmoid", "approximate: erf, tanh or sigmoid expected, not ", approximate);
    return Gelu::sigmoid;
}

// --- The formulas in tensor operations, for fp64 and for the second derivative: P and its first two derivatives by x. See
// gelu.inc.

constexpr double K0 = 1.5957691216057308, K1 = 0.044715 * K0, K_SIGMOID = 1.702, SQRT_HALF = 0.70710678118654752;
constexpr double INV_SQRT_2PI = 0.39894228040143268;

Tensor p(const Tensor& x, Gelu variant) {
    if (variant == Gelu::erf) return 0.5 * at::erfc(x * -SQRT_HALF);
    return at::sigmoid(variant == Gelu::tanh ? x * (K0 + K1 * x * x) : K_SIGMOID * x);
}

Tensor p_prime(const Tensor& x, Gelu variant) {
    if (variant == Gelu::erf) return INV_SQRT_2PI * at::exp(-0.5 * x * x);
    Tensor s = p(x, variant);
    return variant == Gelu::tanh ? s * (1 - s) * (K0 + 3 * K1 * x * x) : K_SIGMOID * s * (1 - s);
}

Tensor p_second(const Tensor& x, Gelu variant) {
    if (variant == Gelu::erf) return -x * p_prime(x, variant);
    Tensor s = p(x, variant), ds = s * (1 - s);
    if (variant == Gelu::sigmoid) return K_SIGMOID * K_SIGMOID * ds * (1 - 2 * s);
    Tensor dz = K0 + 3 * K1 * x * x;
    return ds * (1 - 2 * s) * dz * dz + ds * 6 * K1 * x;
}

// --- CPU

Tensor gelu_cpu(const Tensor& x, c10::string_view approximate) {
    Gelu variant = variant_of(approximate);
    if (!has_kernel(x.scalar_type())) return x * p(x, variant);
    Tensor from = dense(x), y = at::empty_like(from);
    const char* in = (const char*)from.const_data_ptr();
    char* out = (char*)y.mutable_data_ptr();
    Dtype dtype = dtype_of(x.scalar_type());
    int64_t size = x.element_size();
    at::parallel_for(0, x.numel(), GRAIN, [&](int64_t begin, int64_t end) {
        pick(gelu)(variant, dtype, in + begin * size, out + begin * size, end - begin);
    });
    return y;
}

Tensor gelu_backward_cpu(const Tensor& grad, const Tensor& x, c10::string_view approximate) {
    Gelu variant = variant_of(approximate);
    if (!has_kernel(x.scalar_type())) return grad * (p(x, variant) + x * p_prime(x, variant));
    Tensor from = dense(x), g = laid_out_as(grad, from), gx = at::empty_like(from);
    const char *in = (const char*)from.const_data_ptr(), *gs = (const char*)g.const_data_ptr();
    char* out = (char*)gx.mutable_data_ptr();
    Dtype dtype = dtype_of(x.scalar_type());
    int64_t size = x.element_size();
    at::parallel_for(0, x.numel(), GRAIN, [&](int64_t begin, int64_t end) {
        int64_t at = begin * size;
        pick(gelu_backward)(variant, dtype, gs + at, in + at, out + at, end - begin);
    });
    return gx;
}

// Returns how many rows go into one partial sum of the bias gradient. It depends on the shape alone, so that the sum does not
// depend on the number of threads.
int64_t rows_per_block(int64_t rows, int64_t n) {
    int64_t enough = (GRAIN + n - 1) / n, sixty_four_blocks = (rows + 63) / 64;
    return enough > sixty_four_blocks ? enough : sixty_four_blocks;
}

Tensor bias_gelu_cpu(const Tensor& x, const Tensor& bias, c10::string_view approximate) {
    Gelu variant = variant_of(approximate);
    if (!has_kernel(x.scalar_type())) return gelu_cpu(x + bias, approximate);
    Tensor from = x.contiguous(), b = bias.contiguous().to(at::kFloat), y = at::empty_like(from);
    int64_t n = b.numel(), rows = n ? x.numel() / n : 0, size = x.element_size();
    const char* in = (const char*)from.const_data_ptr();
    const float* bs = b.const_data_ptr<float>();
    char* out = (char*)y.mutable_data_ptr();
    Dtype dtype = dtype_of(x.scalar_type());
    at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(n, 1)), [&](int64_t begin, int64_t end) {
        int64_t at = begin * n * size;
        pick(bias_gelu)(variant, dtype, in + at, bs, out + at, end - begin, n);
    });
    return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                                  c10::string_view approximate) {
    Gelu variant = variant_of(approximate);
    if (!has_kernel(x.scalar_type())) {
        Tensor gx = gelu_backward_cpu(grad, x + bias, approximate);
        return {gx, gx.reshape({-1, bias.numel()}).sum(0)};
    }
    Tensor from = x.contiguous(), g = grad.contiguous(), b = bias.contiguous().to(at::kFloat), gx = at::empty_like(from);
    int64_t n = b.numel(), rows = n ? x.numel() / n : 0, size = x.element_size();
    if (rows == 0) return {gx, at::zeros_like(bias)};
    int64_t per_block = rows_per_block(rows, n), blocks = (rows + per_block - 1) / per_block;
    Tensor sums = at::zeros({blocks, n}, b.options());
    const char* in = (const char*)from.const_data_ptr();
    const float* bs = b.const_data_ptr<float>();
    const char* gs = (const char*)g.const_data_ptr();
    char* out = (char*)gx.mutable_data_ptr();
    float* partial = sums.mutable_data_ptr<float>();
    Dtype dtype = dtype_of(x.scalar_type());
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
            int64_t first = block * per_block, count = std::min(per_block, rows - first), at = first * n * size;
            pick(bias_gelu_backward)(variant, dtype, gs + at, in + at, bs, out + at, partial + block * n, count, n);
        }
    });
    return {gx, sums.sum(0).to(bias.scalar_type())};
}

// --- Autograd

Tensor call_gelu(const Tensor& x, c10::string_view approximate) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gptscale::gelu", "").typed<decltype(gelu_cpu)>();
    return op.call(x, approximate);
}

Tensor call_gelu_backward(const Tensor& grad, const Tensor& x, c10::string_view approximate) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("gptscale::gelu_backward", "")
                         .typed<decltype(gelu_backward_cpu)>();
    return op.call(grad, x, approximate);
}

Tensor call_bias_gelu(const Tensor& x, const Tensor& bias, c10::string_view approximate) {
    static auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("gptscale::bias_gelu", "").typed<decltype(bias_gelu_cpu)>();
    return op.call(x, bias, approximate);
}

std::tuple<Tensor, Tensor> call_bias_gelu_backward(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                                   c10::string_view approximate) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("gptscale::bias_gelu_backward", "")
                         .typed<decltype(bias_gelu_backward_cpu)>();
    return op.call(grad, x, bias, approximate);
}

struct GeluFunction : torch::autograd::Function<GeluFunction> {
    static Tensor forward(AutogradContext* ctx, const Tensor& x, std::string approximate) {
        at::AutoDispatchBelowADInplaceOrView below;
        ctx->save_for_backward({x});
        ctx->saved_data["approximate"] = approximate;
        return call_gelu(x, approximate);
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        std::string approximate = ctx->saved_data["approximate"].toStringRef();
        return {call_gelu_backward(grads[0], ctx->get_saved_variables()[0], approximate), Tensor()};
    }
};

// Its derivative needs f'' = 2 P' + x P''.
struct GeluBackwardFunction : torch::autograd::Function<GeluBackwardFunction> {
    static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& x, std::string approximate) {
        at::AutoDispatchBelowADInplaceOrView below;
        ctx->save_for_backward({grad, x});
        ctx->saved_data["approximate"] = approximate;
        return call_gelu_backward(grad, x, approximate);
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        std::string approximate = ctx->saved_data["approximate"].toStringRef();
        variable_list saved = ctx->get_saved_variables();
        Tensor grad = saved[0], x = saved[1], to_grad, to_x;
        Gelu variant = variant_of(approximate);
        if (ctx->needs_input_grad(0)) to_grad = call_gelu_backward(grads[0], x, approximate);
        if (ctx->needs_input_grad(1)) to_x = grads[0] * grad * (2 * p_prime(x, variant) + x * p_second(x, variant));
        return {to_grad, to_x, Tensor()};
    }
};

struct BiasGeluFunction : torch::autograd::Function<BiasGeluFunction> {
    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& bias, std::string approximate) {
        at::AutoDispatchBelowADInplaceOrView below;
        ctx->save_for_backward({x, bias});
        ctx->saved_data["approximate"] = approximate;
        return call_bias_gelu(x, bias, approximate);
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        std::string approximate = ctx->saved_data["approximate"].toStringRef();
        variable_list saved = ctx->get_saved_variables();
        auto [gx, gb] = call_bias_gelu_backward(grads[0], saved[0], saved[1], approximate);
        return {gx, gb, Tensor()};
    }
};

// Its derivative is taken in two steps, the bias and then GELU, because the derivatives of both are there already.
struct BiasGeluBackwardFunction : torch::autograd::Function<BiasGeluBackwardFunction> {
    static variable_list forward(AutogradContext* ctx, const Tensor& grad, const Tensor& x, const Tensor& bias,
                                 std::string approximate) {
        at::AutoDispatchBelowADInplaceOrView below;
        ctx->save_for_backward({grad, x, bias});
        ctx->saved_data["approximate"] = approximate;
        auto [gx, gb] = call_bias_gelu_backward(grad, x, bias, approximate);
        return {gx, gb};
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        std::string approximate = ctx->saved_data["approximate"].toStringRef();
        variable_list saved = ctx->get_saved_variables();
        Tensor grad = saved[0], bias = saved[2], at = saved[1] + bias;
        Gelu variant = variant_of(approximate);
        Tensor upstream = (grads[0].defined() ? grads[0] : at::zeros_like(at));
        if (grads[1].defined()) upstream = upstream + grads[1];  // gb is the sum of all rows of gx
        Tensor to_x = upstream * grad * (2 * p_prime(at, variant) + at * p_second(at, variant));
        return {call_gelu_backward(upstream, at, approximate), to_x, at::sum_to(to_x, bias.sym_sizes()), Tensor()};
    }
};

Tensor gelu_autograd(const Tensor& x, c10::string_view approximate) {
    return GeluFunction::apply(x, std::string(approximate));
}

Tensor gelu_backward_autograd(const Tensor& grad, const Tensor& x, c10::string_view approximate) {
    return GeluBackwardFunction::apply(grad, x, std::string(approximate));
}

Tensor bias_gelu_autograd(const Tensor& x, const Tensor& bias, c10::string_view approximate) {
    return BiasGeluFunction::apply(x, bias, std::string(approximate));
}

std::tuple<Tensor, Tensor> bias_gelu_backward_autograd(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                                       c10::string_view approximate) {
    variable_list found = BiasGeluBackwardFunction::apply(grad, x, bias, std::string(approximate));
    return {found[0], found[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gptscale, CPU, m) {
    m.impl("gelu", gelu_cpu);
    m.impl("gelu_backward", gelu_backward_cpu);
    m.impl("bias_gelu", bias_gelu_cpu);
    m.impl("bias_gelu_backward", bias_gelu_backward_cpu);
}

TORCH_LIBRARY_IMPL(gptscale, Autograd, m) {
    m.impl("gelu", gelu_autograd);
    m.impl("gelu_backward", gelu_backward_autograd);
    m.impl("bias_gelu", bias_gelu_autograd);
    m.impl("bias_gelu_backward", bias_gelu_backward_autograd);
}

}  // namespace gptscale
