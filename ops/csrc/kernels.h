// What the vector kernels offer, once for each instruction set. They know nothing of torch: plain pointers and sizes.
//
// kernels_baseline.cpp, kernels_avx2.cpp and kernels_avx512.cpp compile the same loops for what every CPU of the family
// has, for x86-64-v3 and for x86-64-v4; `pick` chooses once per process, by what the CPU says of itself. So one build,
// made at install time or at first use, serves whatever machine loads it. The loops are plain C++ without branches, which
// the compiler turns into vectors; nothing here may include a header whose inline functions could be emitted for one
// instruction set and linked into another's callers.
#pragma once
#include <stdint.h>

namespace gptscale {

enum class Dtype { f32, bf16, f16, f64 };  // f64: max pooling only
enum class Gelu { erf, tanh, sigmoid };

// P(-a), or f'(-a) without the factor (root - a), as a polynomial in s for a = TABLE_WIDTH (k + s), |s| <= 1/2, k = 0 to 31.
constexpr int TABLE_DEGREES[] = {4, 5, 6};
constexpr float TABLE_WIDTH = 0.18f, TABLE_LIMIT = 31.5f * 0.18f;
struct Table {
    float coefficient[7][32], root_high, root_low;
};
const Table& gelu_table(Gelu variant, bool slope, int degree);

// Windows over planes of height x width: one plane for each channel or, channels_last, one for all channels together.
struct Windows {
    int64_t height, width, out_height, out_width, channels;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
    bool channels_last;
};

// Elements of an input's gradient that are worked on at once, a row at least; of overlapping windows in half precision no row
// may have more. channels_last and fp64, no pixel may have more than MAX_POOL_CHANNELS.
constexpr int64_t MAX_POOL_BAND = 16384, MAX_POOL_CHANNELS = 4096;

// A convolution whose input has been copied with its padding, each row as `stride_w` phases of `phase` columns (phase r has
// columns r, r + stride_w, ...), so that a window's element `tap[j]` further is contiguous over output columns.
constexpr int CONVOLUTION_BLOCK = 8;  // output channels at once; their weights lie together, for each element of the window
constexpr int64_t CONVOLUTION_WIDEST = 16;
struct Convolution {
    int64_t channels, height, width, out_channels, out_height, out_width, kernel_h, kernel_w, stride_h, stride_w, padding_h,
        padding_w, dilation_h, dilation_w, padded_height, phase, pitch, tap[CONVOLUTION_WIDEST];
};

#define GPTSCALE_DECLARE(ISA)                                                                                         \
    namespace ISA {                                                                                                   \
    /* y[i] = gelu(x[i]) */                              \
    void gelu(Gelu, Dtype, const void* x, void* y, int64_t n);                                           \
    /* gx[i] = g[i] gelu'(x[i]) */                                                                                    \
    void gelu_backward(Gelu, Dtype, const void* g, const void* x, void* gx, int64_t n);                  \
    /* y[r][i] = gelu(x[r][i] + b[i]) for rows r of length n; sum and bias in float */                                                       \
    void bias_gelu(Gelu, Dtype, const void* x, const float* b, void* y, int64_t rows, int64_t n);         \
    /* gx[r][i] = g[r][i] gelu'(x[r][i] + b[i]); sums[i] += gx[r][i], before it is rounded to the dtype */            \
    void bias_gelu_backward(Gelu, Dtype, const void* g, const void* x, const float* b, void* gx, float* sums,          \
                            int64_t rows, int64_t n);                                                    \
    /* rows [begin, end) of all planes of the output: maxima, and where in its window each is */                       \
    void max_pool(Dtype, const Windows&, const void* x, void* y, int8_t* offsets, int64_t begin, int64_t end);         \
    /* rows [begin, end) of all planes of the input's gradient */                                                      \
    void max_pool_backward(Dtype, const Windows&, const void* g, const int8_t* offsets, void* gx, int64_t begin,       \
                           int64_t end);                                                                               \
    /* numbers in a vector */                                                                                          \
    int lanes();                                                                                                       \
    /* one plane of the input, copied with its padding */                                                              \
    void pad_plane(const Convolution&, const float* x, float* padded);                                                 \
    /* rows [begin, end) of all images of the output, every channel of each */                                         \
    void conv_bias_relu_rows(const Convolution&, const float* padded, const float* weight, const float* bias,          \
                             float* y, int64_t begin, int64_t end);                                                    \
    /* images [begin, end): sums[out][tap] += the sum of x m over them, m (images, out, height, width) of the output */ \
    void conv_weight_gradient(const Convolution&, const float* padded, const float* m, double* sums, int64_t begin,    \
                              int64_t end);                                                                            \
    /* masked = g where not y <= 0; sums[plane] of it */                                                               \
    void relu_backward_planes(Dtype, const void* g, const void* y, void* masked, double* sums, int64_t planes,         \
                              int64_t size);                                                                           \
    /* the same for pixels of n channels: sums[channel] += */                                                          \
    void relu_backward_pixels(Dtype, const void* g, const void* y, void* masked, float* sums, int64_t pixels,          \
                              int64_t n);                                                                              \
    }

GPTSCALE_DECLARE(baseline)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GPTSCALE_X86 1
GPTSCALE_DECLARE(avx2)
GPTSCALE_DECLARE(avx512)
#endif

// The best instruction set that this CPU has and this build holds: 0 baseline, 1 x86-64-v3, 2 x86-64-v4.
int isa_level();

// pick(name)(arguments...) calls the kernel `name` of the best instruction set.
#ifdef GPTSCALE_X86
#define pick(name)                                                                                                     \
    (::gptscale::isa_level() == 2   ? ::gptscale::avx512::name                                                         \
     : ::gptscale::isa_level() == 1 ? ::gptscale::avx2::name                                                           \
                                    : ::gptscale::baseline::name)
#else
#define pick(name) (::gptscale::baseline::name)
#endif

}  // namespace gptscale
