// The declarations of the vector kernels, once for each instruction set. They take plain pointers and sizes, and no tensors.
//
// kernels_baseline.cpp, kernels_avx2.cpp and kernels_avx512.cpp compile the same loops for three instruction sets: the one
// that every CPU of the family has, x86-64-v3, and x86-64-v4. `pick` chooses one per process, by what the CPU reports. So
// one build, made at install time or at first use, serves every machine that loads it.
//
// The loops are plain C++ without branches, so that the compiler can turn them into vectors. No header may be included here
// whose inline functions could be compiled for one instruction set and then be linked into the callers of another.
#pragma once
#include <stdint.h>

namespace gptscale {

enum class Dtype { f32, bf16, f16, f64 };  // only max pooling has kernels for f64
enum class Gelu { erf, tanh, sigmoid };

// The coefficients of 32 polynomials in s, one for each interval a = TABLE_WIDTH (k + s) with |s| <= 1/2 and k = 0 to 31.
// Their values are P(-a), or f'(-a) without the factor (root - a).
constexpr int TABLE_DEGREES[] = {4, 5, 6};
constexpr float TABLE_WIDTH = 0.18f, TABLE_LIMIT = 31.5f * 0.18f;
struct Table {
    float coefficient[7][32], root_high, root_low;
};
const Table& gelu_table(Gelu variant, bool slope, int degree);

// The geometry of pooling windows over planes of height x width. A plane holds one channel. With channels_last it holds all
// channels together.
struct Windows {
    int64_t height, width, out_height, out_width, channels;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
    bool channels_last;
};

// MAX_POOL_BAND is how many elements of an input's gradient are computed at once, but never less than a row of them. Where
// windows overlap and the precision is half, no row may have more elements than that. In channels_last and in fp64, no pixel
// may have more than MAX_POOL_CHANNELS.
constexpr int64_t MAX_POOL_BAND = 16384, MAX_POOL_CHANNELS = 4096;

// The geometry of a convolution whose input has been copied with its padding. Each row of the copy is stored as `stride_w`
// phases of `phase` columns: phase r holds the columns r, r + stride_w, ... So the element of a window that lies `tap[j]`
// further on is contiguous over the output columns. CONVOLUTION_BLOCK output channels are computed at once. Their weights lie
// side by side for each element of the window.
constexpr int CONVOLUTION_BLOCK = 8;
constexpr int64_t CONVOLUTION_WIDEST = 16;
struct Convolution {
    int64_t channels, height, width, out_channels, out_height, out_width, kernel_h, kernel_w, stride_h, stride_w, padding_h,
        padding_w, dilation_h, dilation_w, padded_height, phase, pitch, tap[CONVOLUTION_WIDEST];
};

#define GPTSCALE_DECLARE(ISA)                                                                                         \
    namespace ISA {                                                                                                   \
    /* y[i] = gelu(x[i]) */                                                                                           \
    void gelu(Gelu, Dtype, const void* x, void* y, int64_t n);                                                        \
    /* gx[i] = g[i] gelu'(x[i]) */                                                                                    \
    void gelu_backward(Gelu, Dtype, const void* g, const void* x, void* gx, int64_t n);                               \
    /* y[r][i] = gelu(x[r][i] + b[i]) for rows r of length n; the bias and its sum with x are floats */               \
    void bias_gelu(Gelu, Dtype, const void* x, const float* b, void* y, int64_t rows, int64_t n);                     \
    /* gx[r][i] = g[r][i] gelu'(x[r][i] + b[i]), and sums[i] += gx[r][i] before it is rounded to the dtype */         \
    void bias_gelu_backward(Gelu, Dtype, const void* g, const void* x, const float* b, void* gx, float* sums,         \
                            int64_t rows, int64_t n);                                                                 \
    /* rows [begin, end) of all planes of the output: the maxima, and the place of each in its window */              \
    void max_pool(Dtype, const Windows&, const void* x, void* y, int8_t* offsets, int64_t begin, int64_t end);        \
    /* rows [begin, end) of all planes of the input's gradient */                                                     \
    void max_pool_backward(Dtype, const Windows&, const void* g, const int8_t* offsets, void* gx, int64_t begin,      \
                           int64_t end);                                                                              \
    /* how many numbers a vector holds */                                                                             \
    int lanes();                                                                                                      \
    /* copies one plane of the input together with its padding */                                                     \
    void pad_plane(const Convolution&, const float* x, float* padded);                                                \
    /* rows [begin, end) of all images of the output, every channel of each */                                        \
    void conv_bias_relu_rows(const Convolution&, const float* padded, const float* weight, const float* bias,         \
                             float* y, int64_t begin, int64_t end);                                                   \
    /* adds the sum of x m over the images [begin, end) to sums[out][tap]; m is (images, out, height, width) of       \
       the output */                                                                                                  \
    void conv_weight_gradient(const Convolution&, const float* padded, const float* m, double* sums, int64_t begin,   \
                              int64_t end);                                                                           \
    /* masked is g where not y <= 0, else 0; sums[plane] is its sum */                                                \
    void relu_backward_planes(Dtype, const void* g, const void* y, void* masked, double* sums, int64_t planes,        \
                              int64_t size);                                                                          \
    /* the same for pixels of n channels, whose sums are added to sums[channel] */                                    \
    void relu_backward_pixels(Dtype, const void* g, const void* y, void* masked, float* sums, int64_t pixels,         \
                              int64_t n);                                                                             \
    }

GPTSCALE_DECLARE(baseline)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GPTSCALE_X86 1
GPTSCALE_DECLARE(avx2)
GPTSCALE_DECLARE(avx512)
#endif

// The best instruction set that both this CPU and this build have: 0 is baseline, 1 is x86-64-v3, 2 is x86-64-v4.
int isa_level();

// pick(name)(arguments...) calls the kernel `name` for the best instruction set.
#ifdef GPTSCALE_X86
#define pick(name)                                                                                                     \
    (::gptscale::isa_level() == 2   ? ::gptscale::avx512::name                                                         \
     : ::gptscale::isa_level() == 1 ? ::gptscale::avx2::name                                                           \
                                    : ::gptscale::baseline::name)
#else
#define pick(name) (::gptscale::baseline::name)
#endif

}  // namespace gptscale
