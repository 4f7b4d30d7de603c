"""The arithmetic of Colossal-AI's pipeline schedules."""

from gptscale.common.engines.colossal.checks import bubble_fraction, default_micro_batches


def test_arithmetic_of_a_pipeline():
    assert bubble_fraction(4, 1, 8) == 3 / 11
    assert bubble_fraction(2, 2, 4) == 1 / 9
    assert default_micro_batches("1f1b", 2, 8) == 4
    assert default_micro_batches("interleaved", 2, 6) == 2
    assert default_micro_batches("1f1b", 1, 8) is None
