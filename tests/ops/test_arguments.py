"""Checks of every operator's arguments, which name the argument."""

import pytest
import torch

from gptscale.ops.arguments import check_like, check_shape, check_tensor

X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "x: a Tensor expected, not list"),
        (X.int(), r"x: fp32, fp64, bf16 or fp16 expected, not torch.int32 \(shape \(2, 3\)\)"),
        (X.to_sparse(), "x: a dense tensor expected, not torch.sparse_coo"),
    ],
)
def test_what_is_no_dense_tensor_of_numbers(value, message):
    with pytest.raises(TypeError, match=message):
        check_tensor("x", value)


def test_a_tensor_beside_another():
    check_like("w", X, "x", X)
    with pytest.raises(ValueError, match="w: on meta, but x is on cpu"):
        check_like("w", X.to("meta"), "x", X)
    with pytest.raises(TypeError, match=r"w: torch.float32 expected, as x has, not torch.float64"):
        check_like("w", X.double(), "x", X)
    with torch.autocast("cpu", torch.bfloat16):
        check_like("w", X.bfloat16(), "x", X)


def test_a_shape():
    check_shape("x", X, (2, 3), "as w has")
    with pytest.raises(ValueError, match=r"x: shape \(3, 2\) expected, as w has, not \(2, 3\)"):
        check_shape("x", X, (3, 2), "as w has")
