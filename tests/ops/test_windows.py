"""How many windows fit, compared with torch, and which arguments are refused."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from gptscale.ops.windows import memory_format, pair, windows_along


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


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, ValueError) for value in (0, (1, 0), (1,), (1, 2, 3))),
        *((value, TypeError) for value in (True, 1.0, (1, "2"), None)),
    ],
)
def test_one_number_or_two_and_anything_else_is_refused_by_its_name(value, error):
    assert [pair("stride", two, 1) for two in (2, (2, 2), [2, 2])] == [(2, 2)] * 3
    with pytest.raises(error, match="stride: "):
        pair("stride", value, 1)


def test_the_layout():
    x = torch.zeros(2, 3, 4, 5)
    assert memory_format(x) == torch.contiguous_format
    assert memory_format(x.to(memory_format=torch.channels_last)) == torch.channels_last
    assert memory_format(x[:, :1].contiguous(memory_format=torch.channels_last)) == torch.contiguous_format
