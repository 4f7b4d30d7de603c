"""Bad arguments of every operator, in every implementation: the error names the argument."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from operators import implementations

from gptscale.ops.conv import conv_bias_relu as conv
from gptscale.ops.conv import conv_bias_relu_backward as conv_back
from gptscale.ops.gelu import bias_gelu, gelu
from gptscale.ops.max_pool import max_pool2d as pool
from gptscale.ops.max_pool import max_pool2d_backward as pool_back
from gptscale.ops.windows import memory_format, windows_along

X, W, B, Y = torch.ones(2, 4, 8, 8), torch.ones(6, 2, 3, 3), torch.ones(6), torch.ones(2, 6, 6, 6)
P, AT = torch.ones(2, 3, 8, 8), torch.zeros(2, 3, 4, 4, dtype=torch.int8)

# fmt: off
CONV = [
    (lambda i: conv([1.0], W, B, implementation=i), TypeError, "x: a Tensor expected, not list"),
    (lambda i: conv(X.int(), W, B, groups=2, implementation=i), TypeError, "x: fp32, .*not torch.int32"),
    (lambda i: conv(X, W.double(), B, groups=2, implementation=i), TypeError, "weight: torch.float32"),
    (lambda i: conv(X, W, B.to("meta"), groups=2, implementation=i), ValueError, "bias: on meta"),
    (lambda i: conv(X, W, None, groups=2, implementation=i), TypeError, "bias: a Tensor expected"),
    (lambda i: conv(X[0], W, B, groups=2, implementation=i), ValueError, r"x: shape \(batch, channels"),
    (lambda i: conv(X, W[0], B, groups=2, implementation=i), ValueError, r"weight: shape \(out channels"),
    (lambda i: conv(X, W, B, implementation=i), ValueError, r"weight: shape \(6, 2, 3, 3\) with groups=1"),
    (lambda i: conv(X, W, B, groups=4, implementation=i), ValueError, "groups: a divisor of weight's 6"),
    (lambda i: conv(X, W, B, groups=True, implementation=i), TypeError, "groups: an int expected"),
    (lambda i: conv(X, W, B[:5], groups=2, implementation=i), ValueError, r"bias: shape \(6,\) expected"),
    (lambda i: conv(X, W, B[:, None], groups=2, implementation=i), ValueError, r"bias: shape \(6,\)"),
    (lambda i: conv(X, W, B, 0, groups=2, implementation=i), ValueError, "stride: at least 1 expected"),
    (lambda i: conv(X, W, B, 1, -1, groups=2, implementation=i), ValueError, "padding: at least 0"),
    (lambda i: conv(X, W, B, 1, "same", groups=2, implementation=i), TypeError, "padding: one int or two"),
    (lambda i: conv(X, W, B, 1, 0, 4, 2, i), ValueError, r"x: \(2, 4, 8, 8\) is too small for weight"),
    (lambda i: conv(X, W, B, True, groups=2, implementation=i), TypeError, "stride: one int or two"),
    (lambda i: conv(X, W, B, (1, True), groups=2, implementation=i), TypeError, "stride: one int or two"),
    (lambda i: conv(X, W, B, (1,), groups=2, implementation=i), ValueError, "stride: one int or two"),
    (lambda i: conv(X, W, B, (1, "2"), groups=2, implementation=i), TypeError, "stride: one int or two"),
    (lambda i: conv(X, W, B, None, groups=2, implementation=i), TypeError, "stride: one int or two"),
    (lambda i: conv(X, W, B, 1, 1.0, groups=2, implementation=i), TypeError, "padding: one int or two"),
    (lambda i: conv(X, W.to_sparse(), B, groups=2, implementation=i), TypeError, "weight: a dense tensor"),
    (lambda i: conv(X, W.cfloat(), B, groups=2, implementation=i), TypeError, "weight: fp32, fp64, bf16"),
    (lambda i: conv(X, W[:0], B[:0], implementation=i), ValueError, "none of them 0, expected"),
    (lambda i: conv_back(Y[:1], Y, X, W, groups=2, implementation=i), ValueError, r"grad: shape \(2, 6, 6, 6\) expected"),
    (lambda i: conv_back(Y, Y[..., :5], X, W, groups=2, implementation=i), ValueError, r"y: shape \(2, 6, 6, 6\) expected"),
    (lambda i: conv_back(Y, Y, X, W, groups=2, needs=(1, 1), implementation=i), TypeError, "needs: three bools expected"),
]
GELU = [
    (lambda i: gelu([1.0], "erf", i), TypeError, "x: a Tensor expected, not list"),
    (lambda i: gelu(torch.arange(3), "erf", i), TypeError, r"x: fp32, .* expected, not torch.int64 \(shape \(3,\)\)"),
    (lambda i: gelu(torch.ones(2), "none", i), ValueError, "approximate: erf, tanh or sigmoid expected, not 'none'"),
    (lambda i: bias_gelu(torch.ones(2, 3), torch.ones(2), "erf", i), ValueError, r"bias: shape \(3,\) expected"),
    (lambda i: bias_gelu(torch.ones(2, 3), torch.ones(1, 3), "erf", i), ValueError, r"bias: shape \(3,\) expected"),
    (lambda i: bias_gelu(torch.ones(()), torch.ones(1), "erf", i), ValueError, r"x: shape \(..., n\) expected"),
    (lambda i: bias_gelu(torch.ones(2, 3), torch.ones(3).bfloat16(), "erf", i), TypeError, "bias: torch.float32"),
    (lambda i: bias_gelu(torch.ones(2, 3), torch.ones(3, device="meta"), "erf", i), ValueError, "bias: on meta"),
    (lambda i: gelu(torch.ones(2).to_sparse(), "erf", i), TypeError, "x: a dense tensor expected"),
]
POOL = [
    (lambda i: pool([1.0], 2, implementation=i), TypeError, "x: a Tensor expected, not list"),
    (lambda i: pool(torch.ones(1, 4, 4).int(), 2, implementation=i), TypeError, "x: fp32, .*not torch.int32"),
    (lambda i: pool(torch.ones(4, 4), 2, implementation=i), ValueError, r"x: shape \(batch.* not \(4, 4\)"),
    (lambda i: pool(torch.ones(1, 1, 1, 4, 4), 2, implementation=i), ValueError, "x: shape"),
    (lambda i: pool(torch.ones(1, 0, 4), 2, implementation=i), ValueError, "x: .* is too small"),
    (lambda i: pool(P, 9, implementation=i), ValueError, r"x: \(2, 3, 8, 8\) is too small for windows of"),
    (lambda i: pool(P, (8, 16), implementation=i), ValueError, "kernel_size: at most 127 elements"),
    (lambda i: pool(P, 0, implementation=i), ValueError, "kernel_size: at least 1 expected, not 0"),
    (lambda i: pool(P, 2.0, implementation=i), TypeError, "kernel_size: one int or two expected, not 2.0"),
    (lambda i: pool(P, (2, 2, 2), implementation=i), ValueError, "kernel_size: one int or two expected"),
    (lambda i: pool(P, 2, 0, implementation=i), ValueError, "stride: at least 1 expected"),
    (lambda i: pool(P, 3, 1, 2, implementation=i), ValueError, r"padding: at most half of kernel_size \(3, 3\)"),
    (lambda i: pool(P, 2, 2, 0, 0, implementation=i), ValueError, "dilation: at least 1 expected"),
    (lambda i: pool_back(P[..., :4, :4], AT.int(), P.shape, 2, implementation=i), TypeError, "offsets: an int8 Tensor"),
    (lambda i: pool_back(P, AT, P.shape, 2, implementation=i), ValueError, r"offsets: grad's shape \(2, 3, 8, 8\)"),
    (lambda i: pool_back(P[..., :4, :4], AT, (2, 3, 9), 2, implementation=i), ValueError, "input_size: 3 or 4 sizes"),
    (lambda i: pool_back(P[..., :4, :4], AT, (2, 3, 6, 8), 2, implementation=i), ValueError, r"grad: shape \(2, 3, 3, 4\)"),
    (lambda i: pool_back(P[..., :4, :4], AT.to("meta"), P.shape, 2, implementation=i), ValueError, "offsets: on meta"),
]
# fmt: on


@pytest.mark.parametrize(
    ("implementation", "call", "error", "message"),
    [
        *((name, *case) for name in implementations("python", "cpp", "auto") for case in (*CONV, *GELU, *POOL)),
        *((name, *case) for name in ("loop", "windows") for case in POOL),
    ],
)
def test_bad_input_is_named(call, error, message, implementation):
    with pytest.raises(error, match=message):
        call(implementation)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda i: conv(X, W, B, groups=2, implementation=i), "auto, python, cpp, triton"),
        (lambda i: gelu(B, "erf", i), "auto, python, cpp, triton"),
        (lambda i: pool(P, 2, implementation=i), "auto, loop, windows, python, cpp, triton"),
    ],
)
def test_an_implementation_that_is_not_there_is_refused(call, names):
    with pytest.raises(ValueError, match=f"implementation: one of {names} expected, not 'cuda'"):
        call("cuda")
    with pytest.raises(ValueError, match="implementation: triton needs tensors on a CUDA device, not on cpu"):
        call("triton")


def test_as_many_windows_as_torchs_pooling_has():
    for length, kernel, stride, dilation, ceil_mode in itertools.product(
        range(1, 9), (1, 2, 3), (1, 2, 3), (1, 2), (False, True)
    ):
        for padding in range(kernel // 2 + 1):
            if length + 2 * padding < dilation * (kernel - 1) + 1:
                continue
            pooled = F.max_pool1d(torch.zeros(1, 1, length), kernel, stride, padding, dilation, ceil_mode)
            found = windows_along(length, kernel, stride, padding, dilation, ceil_mode)
            assert found == pooled.shape[-1], (length, kernel, stride, padding, dilation, ceil_mode)


def test_the_layout():
    x = torch.zeros(2, 3, 4, 5)
    assert memory_format(x) == torch.contiguous_format
    assert memory_format(x.to(memory_format=torch.channels_last)) == torch.channels_last
    assert memory_format(x[:, :1].contiguous(memory_format=torch.channels_last)) == torch.contiguous_format
