import re

from hypothesis import given
from hypothesis import strategies as st

from gptscale.common.errors import ConfigError
from gptscale.common.settings.batch_plan import plan_batch

SIZE = st.integers(1, 64)
MAYBE = st.none() | SIZE


@given(dp=SIZE, micro=MAYBE, accumulation=MAYBE)
def test_without_a_global_batch_the_rest_makes_it(dp, micro, accumulation):
    plan = plan_batch(dp, micro_batch_size=micro, grad_accum_steps=accumulation)
    assert plan.global_batch_size == plan.micro_batch_size * plan.grad_accum_steps * dp
    assert micro in (None, plan.micro_batch_size)
    assert accumulation in (None, plan.grad_accum_steps)


@given(dp=SIZE, total=st.integers(1, 4096), micro=MAYBE, accumulation=MAYBE)
def test_whatever_is_given_holds_or_is_refused_with_numbers_that_work(dp, total, micro, accumulation):
    try:
        plan = plan_batch(dp, total, micro, accumulation)
    except ConfigError as error:
        assert total % (dp * (micro or 1) * (accumulation or 1)) or (micro and accumulation)
        suggested = [int(n) for n in re.findall(r"\d+", error.fix)]
        assert suggested
        for number in suggested:
            assert plan_batch(dp, number, micro, accumulation).global_batch_size == number
    else:
        assert plan.global_batch_size == total == plan.micro_batch_size * plan.grad_accum_steps * dp
        assert plan.sequences_per_rank * dp == total
        assert micro in (None, plan.micro_batch_size)
        assert accumulation in (None, plan.grad_accum_steps)


def test_the_same_global_batch_for_every_world_that_divides_it():
    assert [plan_batch(dp).global_batch_size for dp in (1, 2, 4, 8)] == [8] * 4


def test_says_the_arithmetic():
    assert plan_batch(2, 16, micro_batch_size=2).describe() == (
        "global batch 16 = micro-batch 2 x accumulation 4 x data ranks 2"
    )
