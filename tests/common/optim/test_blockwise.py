import pytest
import torch

from gptscale.common.optim.blockwise import BLOCK, SMALLEST, dequantise, dynamic_code, quantise

CPU = torch.device("cpu")


def numbers(signed, scale=1.0, seed=0):
    """400 blocks over twelve decades, a zero in each, and the largest magnitude of every other block negative."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, BLOCK, generator=generator) * torch.exp(4 * torch.randn(400, BLOCK, generator=generator))
    x[:, 7] = 0.0
    x[::2, 3] = -1.5 * x[::2].abs().amax(1)
    return (x if signed else x.abs()).div(x.abs().max()).mul(scale)


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_those_of_the_paper(signed):
    values = dynamic_code(signed, CPU).values
    assert len(values.unique()) == 256
    assert torch.equal(values, values.sort().values)
    assert values[-1] == 1
    assert values[0] == (-1 if signed else 0)
    # top decade: 64 (128) means of neighbouring edges between 0.1 and 1; lowest: one (two) of 1e-7 to 1e-6, and zero
    top = values[(values > 0.1) & (values < 1)]
    n = 64 if signed else 128
    torch.testing.assert_close(top, 0.1 + 0.9 * (torch.arange(n) + 0.5) / n)
    positive = values[values > 0]
    torch.testing.assert_close(positive[:2], torch.tensor([5.5e-7, 3.25e-6] if signed else [3.25e-7, 7.75e-7]))


@pytest.mark.parametrize("signed", [True, False])
def test_takes_the_nearest_value_but_never_zero_for_a_second_moment(signed):
    code, x = dynamic_code(signed, CPU), numbers(signed)
    codes, absmax = quantise(x, code)
    unit, codes = (x / absmax).flatten(), codes.flatten()
    chosen = (code.values[codes.int()] - unit).abs()
    least = torch.stack([(part[:, None] - code.values).abs().amin(1) for part in unit.split(4096)[:25]]).flatten()
    far = chosen[: len(least)] > least + 1e-8
    if not signed:
        assert torch.equal(codes == 0, unit == 0)
        # Code 1 also takes what is rounded up from below half of the smallest value.
        far &= codes[: len(least)] != 1
    assert not far.any()
    # The limit is half of the widest gap, the one next to -1 or 1.
    assert chosen.max() <= (0.01056 if signed else 0.00353)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("exponent", [-42, -30, -20, -8, 0, 20, 38])
def test_what_was_dequantised_gives_the_same_bytes_and_scales(signed, exponent):
    code, x = dynamic_code(signed, CPU), numbers(signed, 10.0**exponent)
    codes, absmax = quantise(x, code)
    values = dequantise(codes, absmax, code)
    again, absmax_again = quantise(values, code)
    assert torch.equal(codes, again)
    assert torch.equal(absmax, absmax_again)
    assert torch.equal(values, dequantise(again, absmax_again, code))
    largest = x.abs().amax(1, keepdim=True)
    assert torch.equal(absmax, largest.where(largest >= SMALLEST, 0.0))
    # The number that gave the scale is exact.
    assert torch.equal(values.abs().amax(1, keepdim=True), absmax)


def test_every_value_comes_back_at_every_scale():
    generator = torch.Generator().manual_seed(0)
    scales = (10 ** (60 * torch.rand(2000, 1, generator=generator, dtype=torch.float64) - 29)).float()
    for signed in (True, False):
        code = dynamic_code(signed, CPU)
        codes = torch.arange(256).to(torch.uint8).expand(len(scales), 256)
        values = dequantise(codes.contiguous(), scales, code)
        again, absmax = quantise(values, code)
        assert torch.equal(codes, again)
        assert torch.equal(absmax, scales)
