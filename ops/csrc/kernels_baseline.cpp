// The kernels for the instruction set that the compiler targets by default.
#define ISA baseline
#include "kernels.inc"
