// The kernels for whatever the compiler targets by itself.
#define ISA baseline
#include "kernels.inc"
