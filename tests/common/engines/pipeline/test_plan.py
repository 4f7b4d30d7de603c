"""How stages share the blocks, and which numbers of micro-batches the schedules of torch take."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptscale.common.engines.pipeline import plan
from gptscale.common.engines.pipeline.plan import balanced, fits, head_cost, stage_indices
from gptscale.common.settings.gpt_config import PRESETS


# No subnormals: what torch 2.5.1 compiles for a CPU is linked with -ffast-math, and loading it flushes them to zero.
@given(st.integers(1, 96), st.integers(1, 16), st.floats(0, 8, allow_subnormal=False))
def test_the_heaviest_stage_is_as_light_as_can_be(n_layer, n_stages, head):
    if n_layer < max(1, n_stages - 1):
        return
    sizes = balanced(n_layer, n_stages, head)
    assert len(sizes) == n_stages
    assert sum(sizes) == n_layer
    assert all(size >= 1 for size in sizes[:-1])
    heaviest = max([*sizes[:-1], sizes[-1] + head])
    for in_last in range(n_layer - (n_stages - 1) + 1 if n_stages > 1 else 0):
        others = -(-(n_layer - in_last) // (n_stages - 1))
        assert heaviest <= max(others, in_last + head) + 1e-9


def test_the_head_of_the_large_model_weighs_two_and_a_half_blocks():
    gpt = PRESETS["1.6b"]
    assert head_cost(gpt, 1024) == pytest.approx(50304 * 1600 / (12 * 1600**2 + 1024 * 1600))
    assert balanced(48, 4, head_cost(gpt, 1024)) == [13, 13, 12, 10]


def test_stages_are_described_with_the_head_on_the_last(monkeypatch):
    monkeypatch.setattr(plan, "stage_sizes", lambda run, options: [13, 13, 12, 10])
    batch = SimpleNamespace(grad_accum_steps=4, micro_batch_size=2)
    run = SimpleNamespace(gpt=PRESETS["1.6b"], seq_len=1024, batch=batch)
    assert plan.describe_stages(run, SimpleNamespace(schedule="1F1B")) == [
        "stages   13 | 13 | 12 | 10 + head blocks (head = 2.49 blocks; the heaviest stage has 1.03 x the mean)",
        "schedule 1F1B, 4 micro-batches of 2",
    ]


@pytest.mark.parametrize(
    ("schedule", "p", "n_stages", "expected"),
    [
        ("1F1B", 4, 4, [[0], [1], [2], [3]]),
        ("Interleaved1F1B", 2, 4, [[0, 2], [1, 3]]),
        ("ZBVZeroBubble", 2, 4, [[0, 3], [1, 2]]),
    ],
)
def test_which_stages_a_process_computes(schedule, p, n_stages, expected):
    assert [stage_indices(schedule, rank, p, n_stages) for rank in range(p)] == expected


def test_what_schedules_take():
    assert [m for m in range(1, 9) if fits("1F1B", m, 4, 4)] == [4, 5, 6, 7, 8]
    assert [m for m in range(1, 11) if fits("Interleaved1F1B", m, 4, 8)] == [4, 5, 6, 7, 8, 10]
    assert [m for m in range(1, 5) if fits("GPipe", m, 4, 4)] == [1, 2, 3, 4]
    assert [m for m in range(1, 10) if fits("DualPipeV", m, 2, 4)] == [4, 5, 6, 7, 8, 9]
