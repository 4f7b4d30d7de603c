// The kernels for x86-64-v3: AVX2, FMA, F16C.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v3")
#define ISA avx2
#include "kernels.inc"
#endif
