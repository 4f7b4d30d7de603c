"""Steps of data ranks: what can hide behind products, and what cannot."""

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
