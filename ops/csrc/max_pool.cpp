// Max pooling bound to torch: the CPU kernels, with rows shared among threads, and autograd formulas of any order.
#include "bindings.h"

#include <torch/csrc/autograd/custom_function.h>

namespace gptscale {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Dtype pooled_dtype(const Tensor& x) {
    TORCH_CHECK_TYPE(has_kernel(x.scalar_type()) || x.scalar_type() == at::kDouble, "x: fp32, fp64, bf16 or fp16 expected, not ",
                     x.scalar_type());
    return x.scalar_type() == at::kDouble ? Dtype::f64 : dtype_of(x.scalar_type());
}

// Returns channels_last if x has that layout and is not contiguous at the same time, else contiguous, as ops/windows.py does.
at::MemoryFormat format_of(const Tensor& x) {
    bool last = x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast) && !x.is_contiguous();
    return last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

Windows windows_of(IntArrayRef size, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                   bool channels_last) {
    int64_t d = int64_t(size.size());
    for (IntArrayRef two : {kernel, stride, padding, dilation}) TORCH_CHECK_VALUE(two.size() == 2, "two ints expected");
    TORCH_CHECK_VALUE(d == 3 || d == 4, "x: 3 or 4 dimensions expected");
    bool positive = kernel[0] > 0 && kernel[1] > 0 && stride[0] > 0 && stride[1] > 0 && dilation[0] > 0 && dilation[1] > 0;
    TORCH_CHECK_VALUE(positive && padding[0] >= 0 && padding[1] >= 0, "kernel_size, stride, padding, dilation: out of range");
    TORCH_CHECK_VALUE(kernel[0] * kernel[1] <= 127, "kernel_size: at most 127 elements expected");
    return Windows{size[d - 2], size[d - 1], 0,         0,          size[d - 3], kernel[0],   kernel[1],
                   stride[0],   stride[1],   padding[0], padding[1], dilation[0], dilation[1], channels_last};
}

int64_t windows_along(int64_t length, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, bool ceil_mode) {
    int64_t room = length + 2 * padding - dilation * (kernel - 1) - 1;
    TORCH_CHECK_VALUE(length > 0 && room + (ceil_mode ? stride - 1 : 0) >= 0, "x: too small for these windows");
    if (!ceil_mode) return room / stride + 1;
    int64_t count = (room + stride - 1) / stride + 1;
    return (count - 1) * stride >= length + padding ? count - 1 : count;
}

// Runs call(begin, end) over the rows of all planes, in parallel.
template <typename Call>
void over_rows(const Tensor& rows_of, int64_t height, const Windows& w, Call call) {
    if (rows_of.numel() == 0) return;
    int64_t planes = w.channels_last ? rows_of.size(0) : rows_of.numel() / (height * rows_of.size(-1));
    if (planes > 64)  // a thread gets whole planes
        at::parallel_for(0, planes, std::max<int64_t>(1, GRAIN / (rows_of.numel() / planes)),
                         [&](int64_t begin, int64_t end) { call(begin * height, end * height); });
    else
        at::parallel_for(0, planes * height, std::max<int64_t>(1, GRAIN / (rows_of.numel() / (planes * height))), call);
}

// --- CPU

std::tuple<Tensor, Tensor> max_pool_cpu(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                        IntArrayRef dilation, bool ceil_mode) {
    Dtype dtype = pooled_dtype(x);
    at::MemoryFormat format = format_of(x);
    Windows w = windows_of(x.sizes(), kernel, stride, padding, dilation, format == at::MemoryFormat::ChannelsLast);
    std::vector<int64_t> size = x.sizes().vec();
    size[size.size() - 2] = w.out_height = windows_along(w.height, kernel[0], stride[0], padding[0], dilation[0], ceil_mode);
    size[size.size() - 1] = w.out_width = windows_along(w.width, kernel[1], stride[1], padding[1], dilation[1], ceil_mode);
    Tensor from = x.contiguous(format), y = at::empty(size, x.options(), format);
    Tensor offsets = at::empty(size, x.options().dtype(at::kChar), format);
    const void* in = from.const_data_ptr();
    void* out = y.mutable_data_ptr();
    int8_t* at = offsets.mutable_data_ptr<int8_t>();
    over_rows(y, w.out_height, w,
              [&](int64_t begin, int64_t end) { pick(max_pool)(dtype, w, in, out, at, begin, end); });
    return {y, offsets};
}

Tensor max_pool_backward_cpu(const Tensor& grad, const Tensor& offsets, IntArrayRef input_size, IntArrayRef kernel,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
    Dtype dtype = pooled_dtype(grad);
    at::MemoryFormat format = format_of(offsets);
    Windows w = windows_of(input_size, kernel, stride, padding, dilation, format == at::MemoryFormat::ChannelsLast);
    bool fits = grad.dim() == int64_t(input_size.size()) && grad.sizes() == offsets.sizes() &&
                grad.sizes().slice(0, grad.dim() - 2) == input_size.slice(0, grad.dim() - 2);
    TORCH_CHECK_VALUE(fits, "grad: offsets' shape ", offsets.sizes(), " expected, for an input of ", input_size, ", not ",
                      grad.sizes());
    TORCH_CHECK_TYPE(offsets.scalar_type() == at::kChar, "offsets: an int8 Tensor expected, not ", offsets.scalar_type());
    w.out_height = grad.size(-2);
    w.out_width = grad.size(-1);
    if (grad.element_size() == 2 && w.width * (w.channels_last ? w.channels : 1) > MAX_POOL_BAND)
        return max_pool_backward_cpu(grad.to(at::kFloat), offsets, input_size, kernel, stride, padding, dilation)
            .to(grad.scalar_type());
    if (w.channels_last && dtype == Dtype::f64 && w.channels > MAX_POOL_CHANNELS)
        return max_pool_backward_cpu(grad, offsets.contiguous(), input_size, kernel, stride, padding, dilation)
            .contiguous(format);
    Tensor g = grad.contiguous(format), where = offsets.contiguous(format), gx = at::empty(input_size, grad.options(), format);
    const void* gs = g.const_data_ptr();
    const int8_t* at = where.const_data_ptr<int8_t>();
    void* out = gx.mutable_data_ptr();
    over_rows(gx, w.height, w,
              [&](int64_t begin, int64_t end) { pick(max_pool_backward)(dtype, w, gs, at, out, begin, end); });
    return gx;
}

// --- Autograd

using Ints = std::vector<int64_t>;

std::tuple<Tensor, Tensor> call_max_pool(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                         IntArrayRef dilation, bool ceil_mode) {
    static auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("gptscale::max_pool2d", "").typed<decltype(max_pool_cpu)>();
    return op.call(x, kernel, stride, padding, dilation, ceil_mode);
}

Tensor call_max_pool_backward(const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size, IntArrayRef kernel,
                              IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("gptscale::max_pool2d_backward", "")
                         .typed<Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef, IntArrayRef, IntArrayRef,
                                       IntArrayRef, IntArrayRef)>();
    return op.call(grad, offsets, input_size, kernel, stride, padding, dilation);
}

// Returns the elements of x that the offsets point to, and 0 where the offset is -1.
Tensor select(const Tensor& x, const Tensor& offsets, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
              IntArrayRef dilation) {
    Tensor number = offsets.to(at::kLong);
    auto count = number.options();
    Tensor rows = at::arange(offsets.sym_size(-2), count).unsqueeze(1) * stride[0] - padding[0];
    Tensor columns = at::arange(offsets.sym_size(-1), count) * stride[1] - padding[1];
    Tensor h = rows + number.div(kernel[1], "floor") * dilation[0], v = columns + number.remainder(kernel[1]) * dilation[1];
    Tensor none = offsets < 0, at = (h * x.sym_size(-1) + v).masked_fill(none, 0);
    Tensor values = x.flatten(-2).gather(-1, at.flatten(-2)).reshape_symint(offsets.sym_sizes());
    return values.masked_fill(none, 0);
}

bool recorded(const Tensor& x) { return (at::GradMode::is_enabled() && x.requires_grad()) || x._fw_grad(0).defined(); }

struct MaxPoolFunction : torch::autograd::Function<MaxPoolFunction> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x, Ints kernel, Ints stride, Ints padding, Ints dilation,
                                 bool ceil_mode) {
        at::AutoDispatchBelowADInplaceOrView below;
        auto [y, offsets] = call_max_pool(x, kernel, stride, padding, dilation, ceil_mode);
        ctx->save_for_backward({offsets});
        ctx->mark_non_differentiable({offsets});
        ctx->saved_data["geometry"] = c10::List<Ints>({kernel, stride, padding, dilation});
        ctx->saved_data["dim"] = x.dim();
        for (int64_t d = 0; d < x.dim(); ++d) ctx->saved_data["size" + std::to_string(d)] = x.sym_size(d);
        return {y, offsets};
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        std::vector<c10::SymInt> size;
        for (int64_t d = 0; d < ctx->saved_data["dim"].toInt(); ++d)
            size.push_back(ctx->saved_data["size" + std::to_string(d)].toSymInt());
        auto g = ctx->saved_data["geometry"].to<std::vector<Ints>>();
        Tensor offsets = ctx->get_saved_variables()[0];
        Tensor gx = call_max_pool_backward(grads[0], offsets, size, g[0], g[1], g[2], g[3]);
        return {gx, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    }
};

// The backward is linear in the gradient. Its derivative reads from the places that it wrote to.
struct MaxPoolBackwardFunction : torch::autograd::Function<MaxPoolBackwardFunction> {
    static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size,
                          Ints kernel, Ints stride, Ints padding, Ints dilation) {
        at::AutoDispatchBelowADInplaceOrView below;
        ctx->save_for_backward({offsets});
        ctx->saved_data["geometry"] = c10::List<Ints>({kernel, stride, padding, dilation});
        return call_max_pool_backward(grad, offsets, input_size, kernel, stride, padding, dilation);
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        auto g = ctx->saved_data["geometry"].to<std::vector<Ints>>();
        Tensor to_grad = select(grads[0], ctx->get_saved_variables()[0], g[0], g[1], g[2], g[3]);
        return {to_grad, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
    }
};

std::tuple<Tensor, Tensor> max_pool_autograd(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                             IntArrayRef dilation, bool ceil_mode) {
    if (!recorded(x)) {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_max_pool(x, kernel, stride, padding, dilation, ceil_mode);
    }
    variable_list found =
        MaxPoolFunction::apply(x, kernel.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode);
    return {found[0], found[1]};
}

Tensor max_pool_backward_autograd(const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size,
                                  IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
    if (!recorded(grad)) {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_max_pool_backward(grad, offsets, input_size, kernel, stride, padding, dilation);
    }
    return MaxPoolBackwardFunction::apply(grad, offsets, input_size, kernel.vec(), stride.vec(), padding.vec(),
                                          dilation.vec());
}

}  // namespace

TORCH_LIBRARY_IMPL(gptscale, CPU, m) {
    m.impl("max_pool2d", max_pool_cpu);
    m.impl("max_pool2d_backward", max_pool_backward_cpu);
}

TORCH_LIBRARY_IMPL(gptscale, Autograd, m) {
    m.impl("max_pool2d", max_pool_autograd);
    m.impl("max_pool2d_backward", max_pool_backward_autograd);
}

}  // namespace gptscale
