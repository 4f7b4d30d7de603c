"""Steps of data ranks, held to what recipes ask for under the mock of CUDA, and to what can hide and what cannot."""

from collections import Counter

import pytest

from gptscale.foresight.time.data_steps import DataStep, Exchange
from gptscale.foresight.time.schedules import BACKWARD, FORWARD, order_of_schedule
from gptscale.foresight.time.simulator import play
from gptscale.foresight.time.split import Machines, ModelShape, Split, StepWriter
from gptscale.foresight.time.steps import pipeline_step

LINK = "nvlink4 ib-3200"
MACHINES = Machines("h100-80", 8, LINK)
MODEL = ModelShape(4, 768, 12, 256, 50304, 12, 3072, fused_attention=True)


def step(how, m=2, **more):
    split = Split(4, 1, 1, 2, m, (4,), gradient_bytes=4, **more)
    return DataStep(StepWriter(MODEL, split, MACHINES), how).written()


def bytes_of(step, *kinds):
    works = [step.works[item.work] for item in step.items]
    return sum(n * op.shape[0] for work in works for op, n in work.items() if op.kind in kinds)


def seconds(operation):
    return 0.4 if operation.on == LINK else 1.0


def length(step):
    return play(step, seconds).seconds


def test_an_offloaded_shard_is_copied_as_often_as_under_the_mock():
    """Figures of `gptscale simulate fsdp_offload` for this model, on rank 0 of 4 with two micro-batches.

    Biases, norms and positions, which the step leaves out, are less than 2 % of them.
    """
    written = step(Exchange(4, 2, "reduce-scatter", True, cut_state=True, offload="cpu"))
    assert bytes_of(written, "copy from host") == pytest.approx(193_080_308, rel=0.02)
    assert bytes_of(written, "copy to host") == pytest.approx(135_545_860, rel=0.02)
    assert bytes_of(written, "all-gather") == pytest.approx(16 * 14_175_744 + 2 * 78_842_880, rel=0.02)
    assert bytes_of(written, "reduce-scatter") == pytest.approx(8 * 28_351_488 + 2 * 157_685_760, rel=0.02)


def test_stages_of_zero_reduce_as_often_as_under_the_mock():
    """Figures of `gptscale simulate zero1` for this model: one all-reduce of all gradients in fp32, then the weights in bf16."""
    first = step(Exchange(4, reduces="all-reduce", overlaps=False, cut_state=True, weights_after=2))
    assert bytes_of(first, "all-reduce") == pytest.approx(271_091_712, rel=0.02)
    assert bytes_of(first, "weight all-gather") == pytest.approx(135_545_856, rel=0.02)
    second = step(Exchange(4, reduces="all-reduce", every=True, overlaps=False, cut_state=True, weights_after=2))
    assert bytes_of(second, "all-reduce") == 2 * bytes_of(first, "all-reduce")


def test_tensor_ranks_gather_and_scatter_as_under_the_mock():
    """Figures of `gptscale simulate tensor_parallel` for this model on 4 ranks with two micro-batches, without table and head."""
    split = Split(1, 4, 1, 2, 2, (4,), sequence_parallel=True, gathered_sequence=True)
    written = DataStep(StepWriter(MODEL, split, MACHINES), Exchange()).written()
    counts = Counter()
    for item in written.items:
        for operation, n in written.works[item.work].items():
            counts[(operation.kind, *operation.shape[:1])] += n
    for kind in ("all-gather", "reduce-scatter"):
        assert counts[kind, 1_572_864] == 16
        assert counts[kind, 786_432] == 16


def test_stages_gather_their_shards_once_more_than_micro_batches():
    """As `gptscale simulate hybrid_3d` counted: 20 gathers of 4 blocks with 4 micro-batches under 1F1B."""
    split = Split(2, 2, 2, 2, 4, (4, 0), zero=3, gathers=True)
    written = pipeline_step(MODEL, split, MACHINES)
    gathered = [written.works[item.work] for item in written.items if item.stream == "gather" and item.rank == 0]
    assert sum(n for work in gathered for n in work.values()) == 20


def test_buckets_hide_behind_backward_and_stopping_for_them_does_not():
    beside = length(step(Exchange(4, reduces="all-reduce", bucket=25 * 2**20)))
    after = length(step(Exchange(4, reduces="all-reduce", overlaps=False, bucket=25 * 2**20)))
    alone = length(step(Exchange(1)))
    assert alone < beside < after


def test_kept_weights_are_gathered_half_as_often():
    twice, once = (step(Exchange(4, gathers, "reduce-scatter", True, cut_state=True)) for gathers in (2, 1))
    of_tables = 2 * 2 * 50304 * 768
    assert bytes_of(twice, "all-gather") - of_tables * 1 == 2 * (bytes_of(once, "all-gather") - of_tables * 1)


def test_replicas_of_shard_groups_reduce_the_shards():
    written = step(Exchange(2, 2, "reduce-scatter", True, cut_state=True))
    assert bytes_of(written, "all-reduce") == bytes_of(written, "reduce-scatter") / 2


@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_schedules_of_several_stages_compute_everything_once(schedule):
    order = order_of_schedule(schedule, 4, 2, 8)
    computed = [c for of_rank in order.values() for c in of_rank]
    assert len(set(computed)) == len(computed)
    assert sum(kind == FORWARD for kind, _, _ in computed) == 8 * 8
    assert sum(kind in (BACKWARD, "I") for kind, _, _ in computed) == 8 * 8


def test_halves_of_backward_shorten_a_pipeline():
    def length_of(schedule, each=2):
        split = Split(1, 1, 4, 2, 8, (2 // each,) * 4 * each, schedule=schedule, stages_per_rank=each, p2p_waits=False)
        return play(pipeline_step(MODEL, split, MACHINES), seconds).seconds

    assert length_of("InterleavedZeroBubble") < length_of("Interleaved1F1B") < length_of("GPipe", 1)
