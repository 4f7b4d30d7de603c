// Calls the kernels of conv.inc with random shapes. The address sanitizer sees what they touch, and sums are checked.
#include "kernels.h"
#include <cstdlib>
#include <vector>
using namespace gptscale;
int main() {
    unsigned seed = 1;
    auto draw = [&](int n) { seed = seed * 1664525u + 1013904223u; return int((seed >> 8) % unsigned(n)); };
    for (int trial = 0; trial < 120; ++trial) {
        Convolution c{};
        c.channels = 1 + draw(4), c.kernel_h = 1 + draw(5), c.kernel_w = 1 + draw(5), c.stride_h = 1 + draw(3);
        c.stride_w = 1 + draw(3), c.dilation_h = 1 + draw(2), c.dilation_w = 1 + draw(2), c.padding_h = draw(4);
        c.padding_w = draw(4), c.out_channels = 1 + draw(20), c.height = (c.kernel_h - 1) * c.dilation_h + 1 + draw(6);
        c.width = (c.kernel_w - 1) * c.dilation_w + c.stride_w * (15 + draw(50)) + 1;
        c.padded_height = c.height + 2 * c.padding_h;
        c.out_height = (c.padded_height - c.dilation_h * (c.kernel_h - 1) - 1) / c.stride_h + 1;
        c.out_width = (c.width + 2 * c.padding_w - c.dilation_w * (c.kernel_w - 1) - 1) / c.stride_w + 1;
        c.phase = (c.width + 2 * c.padding_w + c.stride_w - 1) / c.stride_w, c.pitch = c.phase * c.stride_w;
        for (int j = 0; j < c.kernel_w; ++j)
            c.tap[j] = j * c.dilation_w % c.stride_w * c.phase + j * c.dilation_w / c.stride_w;
        if (c.out_width < pick(lanes)()) return 3;
        int images = 2, blocks = int(c.out_channels + CONVOLUTION_BLOCK - 1) / CONVOLUTION_BLOCK;
        std::vector<float> x(images * c.channels * c.height * c.width, 1.0f);
        std::vector<float> padded(images * c.channels * c.padded_height * c.pitch);
        std::vector<float> weight(blocks * CONVOLUTION_BLOCK * c.channels * c.kernel_h * c.kernel_w, 0.5f);
        std::vector<float> bias(blocks * CONVOLUTION_BLOCK, 1.0f), y(images * c.out_channels * c.out_height * c.out_width, -1.0f);
        for (int p = 0; p < images * c.channels; ++p)
            pick(pad_plane)(c, &x[p * c.height * c.width], &padded[p * c.padded_height * c.pitch]);
        pick(conv_bias_relu_rows)(c, padded.data(), weight.data(), bias.data(), y.data(), 0, images * c.out_height);
        for (float v : y)
            if (!(v >= 1.0f)) return 1;
        int taps = int(c.channels * c.kernel_h * c.kernel_w);
        std::vector<double> gradient(c.out_channels * taps);
        pick(conv_weight_gradient)(c, padded.data(), y.data(), gradient.data(), 0, images);
        int out = draw(int(c.out_channels)), tap = draw(taps), j = tap % int(c.kernel_w), i = tap / int(c.kernel_w);
        double expected = 0;
        for (int n = 0; n < images; ++n)
            for (int oh = 0; oh < c.out_height; ++oh)
                for (int ow = 0; ow < c.out_width; ++ow)
                    expected += double(y[((n * c.out_channels + out) * c.out_height + oh) * c.out_width + ow]) *
                                padded[((n * c.channels + i / c.kernel_h) * c.padded_height + oh * c.stride_h +
                                        i % c.kernel_h * c.dilation_h) * c.pitch + c.tap[j] + ow];
        double found = gradient[out * taps + tap];
        if (!(found <= expected * 1.00001 && found >= expected * 0.99999)) return 2;
        for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
            int size = dtype == Dtype::f32 ? 4 : 2, planes = 1 + draw(5), length = 1 + draw(3000);
            std::vector<char> g(planes * length * size, 1), from(g.size(), 1), masked(g.size());
            std::vector<double> sums(planes);
            pick(relu_backward_planes)(dtype, g.data(), from.data(), masked.data(), sums.data(), planes, length);
            std::vector<float> channel_sums(length);
            pick(relu_backward_pixels)(dtype, g.data(), from.data(), masked.data(), channel_sums.data(), planes, length);
        }
    }
    return 0;
}
