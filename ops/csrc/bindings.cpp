// The bindings of all operators to torch: what they share, then each of them.
//
// Python defines the schemas and all that needs no speed: the shape functions, autocast and the implementation in Python
// (ops/registry.py, ops/gelu.py ...). The C++ files register the CPU kernels and the autograd formulas.
//
// They are one translation unit, because torch's headers take longer to compile than the code of any one operator. So only
// the headers of the operations in use are included, too.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/erfc.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace gptscale {
namespace {

using at::IntArrayRef;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Ints = std::vector<int64_t>;

// The least number of elements for a thread. With fewer, waking another thread costs more than it saves.
constexpr int64_t GRAIN = 16384;

bool has_kernel(at::ScalarType t) { return t == at::kFloat || t == at::kBFloat16 || t == at::kHalf; }

Dtype dtype_of(at::ScalarType t) {
    return t == at::kFloat ? Dtype::f32 : t == at::kBFloat16 ? Dtype::bf16 : Dtype::f16;
}

// Returns x without gaps in memory, in the order of dimensions that it has. Elementwise kernels need no more than that.
Tensor dense(const Tensor& x) { return x.is_non_overlapping_and_dense() ? x : x.clone(at::MemoryFormat::Preserve); }

// Returns x in exactly the memory layout of `like`.
Tensor laid_out_as(const Tensor& x, const Tensor& like) {
    return x.strides() == like.strides() ? x : at::empty_like(like, x.options()).copy_(x);
}

// Whether autograd must see an operation with these tensors: one of them needs a gradient, or carries a forward one.
bool recorded(std::initializer_list<const Tensor*> tensors) {
    for (const Tensor* x : tensors)
        if ((at::GradMode::is_enabled() && x->requires_grad()) || x->_fw_grad(0).defined()) return true;
    return false;
}

}  // namespace
}  // namespace gptscale

#include "bind_gelu.inc"

#include "bind_max_pool.inc"

#include "bind_conv.inc"
