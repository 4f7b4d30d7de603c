// The kernels for x86-64-v4: AVX-512 F, BW, CD, DQ, VL.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define ISA avx512
#define ISA_IS_AVX512
#include <immintrin.h>
#include "kernels.inc"
#endif
