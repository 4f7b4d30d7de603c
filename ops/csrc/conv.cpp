// Convolution + bias + ReLU on a CPU.
//
// Two parts have kernels in this folder: the convolution of few input channels together with its weight gradient, and the
// ReLU mask together with the bias gradient, in one pass. Every other convolution and gradient is the library's (oneDNN,
// through at::convolution).
//
// oneDNN has a fused form of its own (mkldnn::_convolution_pointwise with "relu"). It is not used, because its ReLU turns NaN
// into 0, and because on contiguous tensors it is slower than a convolution and a ReLU in place. docs/ops/conv_bias_relu.md
// has the figures.
#include "bindings.h"

#include <torch/csrc/autograd/custom_function.h>

namespace gptscale {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Ints = std::vector<int64_t>;

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, int64_t groups) {
    return at::convolution(x, weight, bias, stride, padding, dilation, false, {0, 0}, groups);
}

// --- Few input channels, where the library spends its time on changing the layout and changing it back

// The most input channels, and the most elements of a window over all of them, that this kernel takes.
constexpr int64_t FEW = 4, TAPS = 100;

Convolution described(const Tensor& x, const Tensor& weight, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
    Convolution c{};
    c.channels = x.size(1), c.height = x.size(2), c.width = x.size(3);
    c.out_channels = weight.size(0), c.kernel_h = weight.size(2), c.kernel_w = weight.size(3);
    c.stride_h = stride[0], c.stride_w = stride[1], c.padding_h = padding[0], c.padding_w = padding[1];
    c.dilation_h = dilation[0], c.dilation_w = dilation[1];
    c.out_height = (c.height + 2 * c.padding_h - c.dilation_h * (c.kernel_h - 1) - 1) / c.stride_h + 1;
    c.out_width = (c.width + 2 * c.padding_w - c.dilation_w * (c.kernel_w - 1) - 1) / c.stride_w + 1;
    c.padded_height = c.height + 2 * c.padding_h;
    c.phase = (c.width + 2 * c.padding_w + c.stride_w - 1) / c.stride_w;
    c.pitch = c.phase * c.stride_w;
    for (int64_t j = 0; j < std::min(c.kernel_w, CONVOLUTION_WIDEST); ++j) {
        int64_t column = j * c.dilation_w;
        c.tap[j] = column % c.stride_w * c.phase + column / c.stride_w;
    }
    return c;
}

bool plain(const Tensor& x) { return x.is_contiguous() && x.suggest_memory_format() == at::MemoryFormat::Contiguous; }

bool few_channels(const Tensor& x, const Tensor& weight, int64_t groups) {
    return x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && groups == 1 && x.size(1) <= FEW &&
           x.size(1) == weight.size(1) && plain(x) && plain(weight) && x.numel() > 0 &&
           weight.numel() / weight.size(0) <= TAPS && weight.size(3) <= CONVOLUTION_WIDEST &&
           weight.size(0) >= CONVOLUTION_BLOCK / 2;
}

// Copies x with its padding, in the order of `pad_plane`.
Tensor padded_copy(const Convolution& c, const Tensor& x) {
    int64_t planes = x.size(0) * c.channels, plane = c.padded_height * c.pitch;
    Tensor padded = at::empty({planes * plane}, x.options());
    const float* from = x.const_data_ptr<float>();
    float* to = padded.mutable_data_ptr<float>();
    at::parallel_for(0, planes, std::max<int64_t>(1, GRAIN / plane), [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) pick(pad_plane)(c, from + p * c.height * c.width, to + p * plane);
    });
    return padded;
}

Tensor convolve_few(const Convolution& c, const Tensor& x, const Tensor& weight, const Tensor& bias) {
    int64_t images = x.size(0), blocks = (c.out_channels + CONVOLUTION_BLOCK - 1) / CONVOLUTION_BLOCK;
    int64_t taps = c.channels * c.kernel_h * c.kernel_w;
    Tensor padded = padded_copy(c, x);
    Tensor packed = at::zeros({blocks, taps, CONVOLUTION_BLOCK}, x.options());
    Tensor biases = at::zeros({blocks * CONVOLUTION_BLOCK}, x.options());
    Tensor y = at::empty({images, c.out_channels, c.out_height, c.out_width}, x.options());
    Tensor w = weight.contiguous(), b = bias.contiguous();
    const float *ws = w.const_data_ptr<float>(), *bs = b.const_data_ptr<float>(), *in = padded.const_data_ptr<float>();
    float* pack = packed.mutable_data_ptr<float>();
    float *bias_pack = biases.mutable_data_ptr<float>(), *out = y.mutable_data_ptr<float>();
    for (int64_t k = 0; k < c.out_channels; ++k) {
        bias_pack[k] = bs[k];
        for (int64_t t = 0; t < taps; ++t)
            pack[(k / CONVOLUTION_BLOCK * taps + t) * CONVOLUTION_BLOCK + k % CONVOLUTION_BLOCK] = ws[k * taps + t];
    }
    int64_t work = taps * c.out_channels * c.out_width / 16;
    at::parallel_for(0, images * c.out_height, std::max<int64_t>(1, GRAIN / (work + 1)), [&](int64_t begin, int64_t end) {
        pick(conv_bias_relu_rows)(c, in, pack, bias_pack, out, begin, end);
    });
    return y;
}

// Returns the gradient of weight from the masked gradient m. The shape alone decides which elements are summed together, so
// any number of threads gives the same bits.
Tensor weight_gradient_of_few(const Convolution& c, const Tensor& x, const Tensor& m, const Tensor& weight) {
    constexpr int64_t PARTS = 64;
    int64_t images = x.size(0), parts = std::min(images, PARTS), taps = c.channels * c.kernel_h * c.kernel_w;
    Tensor padded = padded_copy(c, x), gradient = m.contiguous();
    Tensor partial = at::zeros({parts, c.out_channels, taps}, x.options().dtype(at::kDouble));
    const float *in = padded.const_data_ptr<float>(), *g = gradient.const_data_ptr<float>();
    double* sums = partial.mutable_data_ptr<double>();
    int64_t work = images / parts * taps * c.out_channels * c.out_height * c.out_width / 16;
    at::parallel_for(0, parts, std::max<int64_t>(1, GRAIN / (work + 1)), [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p)
            pick(conv_weight_gradient)(c, in, g, sums + p * c.out_channels * taps, images * p / parts, images * (p + 1) / parts);
    });
    return partial.sum(0).to(at::kFloat).view(weight.sizes());
}

// --- CPU

// Whether the arguments fit together, by the rules that ops/conv.py has words for.
bool fit(const Tensor& x, const Tensor& weight, const Tensor& bias, IntArrayRef stride, IntArrayRef padding,
         IntArrayRef dilation, int64_t groups) {
    at::ScalarType dtype = x.scalar_type();
    if (!has_kernel(dtype) && dtype != at::kDouble) return false;
    if (weight.scalar_type() != dtype || bias.scalar_type() != dtype) return false;
    if (x.dim() != 4 || weight.dim() != 4 || bias.dim() != 1 || weight.numel() == 0) return false;
    if (groups < 1 || weight.size(0) % groups != 0 || x.size(1) != weight.size(1) * groups) return false;
    if (bias.size(0) != weight.size(0) || stride.size() != 2 || padding.size() != 2 || dilation.size() != 2) return false;
    for (int axis : {0, 1}) {
        if (stride[axis] < 1 || padding[axis] < 0 || dilation[axis] < 1) return false;
        if (std::max(padding[axis], dilation[axis]) > std::numeric_limits<int32_t>::max()) return false;  // their products fit
        if (x.size(2 + axis) + 2 * padding[axis] < dilation[axis] * (weight.size(2 + axis) - 1) + 1) return false;
    }
    return true;
}

Tensor conv_bias_relu_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias, IntArrayRef stride, IntArrayRef padding,
                          IntArrayRef dilation, int64_t groups) {
    TORCH_CHECK_VALUE(fit(x, weight, bias, stride, padding, dilation, groups),
                      "conv_bias_relu: the arguments do not fit together");
    if (few_channels(x, weight, groups)) {
        Convolution c = described(x, weight, stride, padding, dilation);
        if (c.out_width >= pick(lanes)() && c.out_height > 0) return convolve_few(c, x, weight, bias);
    }
    return convolution(x, weight, bias, stride, padding, dilation, groups).relu_();
}

constexpr int64_t PIXELS = 32;  // how many pixels' gradients are added up in float before the sum goes on in double

// Returns the gradient where ReLU let y through, and its sum over all dimensions but channels.
std::tuple<Tensor, Tensor> relu_backward(const Tensor& grad, const Tensor& y) {
    if (!has_kernel(y.scalar_type()) || y.numel() == 0) {
        Tensor masked = grad.masked_fill(y <= 0, 0);
        return {masked, masked.sum({0, 2, 3})};
    }
    bool last = y.is_contiguous(at::MemoryFormat::ChannelsLast) && !y.is_contiguous();
    at::MemoryFormat format = last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    Tensor g = grad.contiguous(format), from = y.contiguous(format), masked = at::empty_like(from);
    int64_t channels = y.size(1), pixels = y.numel() / channels, size = y.element_size();
    const char *gs = (const char*)g.const_data_ptr(), *ys = (const char*)from.const_data_ptr();
    char* out = (char*)masked.mutable_data_ptr();
    Dtype dtype = dtype_of(y.scalar_type());
    // The shape alone decides which elements are summed together, so any number of threads gives the same bits.
    int64_t per_part = last ? PIXELS : 1;
    int64_t parts = last ? (pixels + per_part - 1) / per_part : y.size(0), plane = pixels / y.size(0);
    Tensor sums = at::zeros({channels}, y.options().dtype(at::kDouble)), partial;
    double* sum = sums.mutable_data_ptr<double>();
    auto add = [&](const auto* part) {
        for (int64_t p = 0; p < parts; ++p)
            for (int64_t c = 0; c < channels; ++c) sum[c] += part[p * channels + c];
    };
    if (last) {
        partial = at::zeros({parts, channels}, y.options().dtype(at::kFloat));
        float* part = partial.mutable_data_ptr<float>();
        at::parallel_for(0, parts, std::max<int64_t>(1, GRAIN / (per_part * channels)), [&](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p) {
                int64_t first = p * per_part, count = std::min(per_part, pixels - first), at = first * channels * size;
                pick(relu_backward_pixels)(dtype, gs + at, ys + at, out + at, part + p * channels, count, channels);
            }
        });
        add(part);
    } else {
        partial = at::empty({parts, channels}, y.options().dtype(at::kDouble));
        double* part = partial.mutable_data_ptr<double>();
        at::parallel_for(0, parts * channels, std::max<int64_t>(1, GRAIN / plane), [&](int64_t begin, int64_t end) {
            int64_t at = begin * plane * size;
            pick(relu_backward_planes)(dtype, gs + at, ys + at, out + at, part + begin, end - begin, plane);
        });
        add(part);
    }
    return {masked, sums.to(y.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor> conv_bias_relu_backward_cpu(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                               const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                               IntArrayRef dilation, int64_t groups,
                                                               std::array<bool, 3> needs) {
    auto [masked, to_bias] = relu_backward(grad, y);
    Tensor none = at::empty({0}, grad.options()), to_x = none, to_weight = none;
    bool theirs = needs[1];
    if (needs[1] && few_channels(x, weight, groups)) {
        Convolution c = described(x, weight, stride, padding, dilation);
        theirs = c.out_width < pick(lanes)() || c.out_height < 1;
        if (!theirs) to_weight = weight_gradient_of_few(c, x, masked, weight);
    }
    if (needs[0] || theirs) {
        auto found = at::convolution_backward(masked, x, weight, c10::nullopt, stride, padding, dilation, false, {0, 0},
                                              groups, {needs[0], theirs, false});
        if (needs[0]) to_x = std::get<0>(found);
        if (theirs) to_weight = std::get<1>(found);
    }
    return {to_x, to_weight, needs[2] ? to_bias : none};
}

// --- Autograd

Tensor call_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, IntArrayRef stride, IntArrayRef padding,
                    IntArrayRef dilation, int64_t groups) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("gptscale::conv_bias_relu", "")
                         .typed<decltype(conv_bias_relu_cpu)>();
    return op.call(x, weight, bias, stride, padding, dilation, groups);
}

std::tuple<Tensor, Tensor, Tensor> call_backward(const Tensor& grad, const Tensor& y, const Tensor& x, const Tensor& weight,
                                                 IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                 int64_t groups, std::array<bool, 3> needs) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("gptscale::conv_bias_relu_backward", "")
                         .typed<decltype(conv_bias_relu_backward_cpu)>();
    return op.call(grad, y, x, weight, stride, padding, dilation, groups, needs);
}

bool recorded(std::initializer_list<const Tensor*> tensors) {
    for (const Tensor* x : tensors)
        if ((at::GradMode::is_enabled() && x->requires_grad()) || x->_fw_grad(0).defined()) return true;
    return false;
}

void save_geometry(AutogradContext* ctx, const Ints& stride, const Ints& padding, const Ints& dilation, int64_t groups) {
    ctx->saved_data["geometry"] = c10::List<Ints>({stride, padding, dilation, Ints{groups}});
}

struct ConvBiasReluFunction : torch::autograd::Function<ConvBiasReluFunction> {
    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& bias, Ints stride,
                          Ints padding, Ints dilation, int64_t groups) {
        at::AutoDispatchBelowADInplaceOrView below;
        Tensor y = call_forward(x, weight, bias, stride, padding, dilation, groups);
        ctx->save_for_backward({y, x, weight});
        save_geometry(ctx, stride, padding, dilation, groups);
        return y;
    }
    static variable_list backward(AutogradContext* ctx, variable_list grads) {
        auto g = ctx->saved_data["geometry"].to<std::vector<Ints>>();
        variable_list saved = ctx->get_saved_variables();
        std::array<bool, 3> needs = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)};
        auto [gx, gw, gb] = call_backward(grads[0], saved[0], saved[1], saved[2], g[0], g[1], g[2], g[3][0], needs);
        Tensor none;
        return {needs[0] ? gx : none, needs[1] ? gw : none, needs[2] ? gb : none, none, none, none, none};
    }
};

// The backward is linear in the masked gradient and in x or weight. docs/ops/conv_bias_relu.md derives its derivative.
struct ConvBiasReluBackwardFunction : torch::autograd::Function<ConvBiasReluBackwardFunction> {
    static variable_list forward(AutogradContext* ctx, const Tensor& grad, const Tensor& y, const Tensor& x,
                                 const Tensor& weight, Ints stride, Ints padding, Ints dilation, int64_t groups,
                                 std::array<bool, 3> needs) {
        at::AutoDispatchBelowADInplaceOrView below;
        ctx->save_for_backward({grad, y, x, weight});
        save_geometry(ctx, stride, padding, dilation, groups);
        ctx->saved_data["needs"] = c10::List<bool>({needs[0], needs[1], needs[2]});
        auto [gx, gw, gb] = call_backward(grad, y, x, weight, stride, padding, dilation, groups, needs);
        return {gx, gw, gb};
    }
    static variable_list backward(AutogradContext* ctx, variable_list up) {
        auto g = ctx->saved_data["geometry"].to<std::vector<Ints>>();
        auto needs = ctx->saved_data["needs"].toBoolList();
        variable_list saved = ctx->get_saved_variables();
        Tensor grad = saved[0], closed = saved[1] <= 0, x = saved[2], weight = saved[3];
        Tensor masked = grad.masked_fill(closed, 0), flow = at::zeros_like(grad), to_x, to_weight;
        if (needs.get(0) && up[0].defined()) {
            flow = flow + convolution(up[0], weight, c10::nullopt, g[0], g[1], g[2], g[3][0]);
            to_weight = std::get<1>(at::convolution_backward(masked, up[0], weight, c10::nullopt, g[0], g[1], g[2], false,
                                                             {0, 0}, g[3][0], {false, true, false}));
        }
        if (needs.get(1) && up[1].defined()) {
            flow = flow + convolution(x, up[1], c10::nullopt, g[0], g[1], g[2], g[3][0]);
            to_x = std::get<0>(at::convolution_backward(masked, x, up[1], c10::nullopt, g[0], g[1], g[2], false, {0, 0},
                                                        g[3][0], {true, false, false}));
        }
        if (needs.get(2) && up[2].defined()) flow = flow + up[2].unsqueeze(1).unsqueeze(2);
        Tensor none;
        return {flow.masked_fill(closed, 0), none, to_x, to_weight, none, none, none, none, none};
    }
};

Tensor forward_autograd(const Tensor& x, const Tensor& weight, const Tensor& bias, IntArrayRef stride, IntArrayRef padding,
                        IntArrayRef dilation, int64_t groups) {
    if (!recorded({&x, &weight, &bias})) {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_forward(x, weight, bias, stride, padding, dilation, groups);
    }
    return ConvBiasReluFunction::apply(x, weight, bias, stride.vec(), padding.vec(), dilation.vec(), groups);
}

std::tuple<Tensor, Tensor, Tensor> backward_autograd(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                     const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                     IntArrayRef dilation, int64_t groups, std::array<bool, 3> needs) {
    if (!recorded({&grad, &x, &weight})) {
        at::AutoDispatchBelowADInplaceOrView below;
        return call_backward(grad, y, x, weight, stride, padding, dilation, groups, needs);
    }
    variable_list found = ConvBiasReluBackwardFunction::apply(grad, y, x, weight, stride.vec(), padding.vec(),
                                                              dilation.vec(), groups, needs);
    return {found[0], found[1], found[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(gptscale, CPU, m) {
    m.impl("conv_bias_relu", conv_bias_relu_cpu);
    m.impl("conv_bias_relu_backward", conv_bias_relu_backward_cpu);
}

TORCH_LIBRARY_IMPL(gptscale, Autograd, m) {
    m.impl("conv_bias_relu", forward_autograd);
    m.impl("conv_bias_relu_backward", backward_autograd);
}

}  // namespace gptscale
