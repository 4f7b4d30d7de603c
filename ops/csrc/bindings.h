// What the operators' bindings to torch share: element types, memory layouts, and errors that name the argument.
//
// The schemas are defined in Python, beside what needs no speed: shape functions, autocast, the implementation in Python
// (ops/registry.py, ops/gelu.py ...). Here are the CPU kernels and the autograd formulas.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <string>

#include "kernels.h"

namespace gptscale {

constexpr int64_t GRAIN = 16384;  // elements a thread must have for itself: below, waking another costs more than it saves

inline bool has_kernel(at::ScalarType t) { return t == at::kFloat || t == at::kBFloat16 || t == at::kHalf; }

inline Dtype dtype_of(at::ScalarType t) {
    return t == at::kFloat ? Dtype::f32 : t == at::kBFloat16 ? Dtype::bf16 : Dtype::f16;
}

// The tensor in memory without gaps, in whatever order of dimensions it has, as elementwise work wants it.
inline at::Tensor dense(const at::Tensor& x) {
    return x.is_non_overlapping_and_dense() ? x : x.clone(at::MemoryFormat::Preserve);
}

// `x` in exactly the memory layout of `like`.
inline at::Tensor laid_out_as(const at::Tensor& x, const at::Tensor& like) {
    return x.strides() == like.strides() ? x : at::empty_like(like, x.options()).copy_(x);
}

}  // namespace gptscale
