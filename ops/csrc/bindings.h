// What the bindings of all operators to torch share: element types and memory layouts.
//
// Python defines the schemas and all that needs no speed: the shape functions, autocast and the implementation in Python
// (ops/registry.py, ops/gelu.py ...). The C++ files register the CPU kernels and the autograd formulas.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <string>

#include "kernels.h"

namespace gptscale {

// The least number of elements for a thread. With fewer, waking another thread costs more than it saves.
constexpr int64_t GRAIN = 16384;

inline bool has_kernel(at::ScalarType t) { return t == at::kFloat || t == at::kBFloat16 || t == at::kHalf; }

inline Dtype dtype_of(at::ScalarType t) {
    return t == at::kFloat ? Dtype::f32 : t == at::kBFloat16 ? Dtype::bf16 : Dtype::f16;
}

// Returns x without gaps in memory, in the order of dimensions that it has. Elementwise kernels need no more than that.
inline at::Tensor dense(const at::Tensor& x) {
    return x.is_non_overlapping_and_dense() ? x : x.clone(at::MemoryFormat::Preserve);
}

// Returns x in exactly the memory layout of `like`.
inline at::Tensor laid_out_as(const at::Tensor& x, const at::Tensor& like) {
    return x.strides() == like.strides() ? x : at::empty_like(like, x.options()).copy_(x);
}

}  // namespace gptscale
