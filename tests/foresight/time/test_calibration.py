"""Costs found from measured steps, and what they are used for."""

import math

import pytest

from benchmarks.foresight.tables.composer import sharded_step
from gptscale.foresight.time.calibration import CALIBRATED, OTHER_SIZE, MeasuredStep, calibrate
from gptscale.foresight.time.data_sheets import DEVICES, LINKS, sheet_of, sources_of
from gptscale.foresight.time.operations import LAUNCH
from gptscale.foresight.time.presets import PRIORS, expected_rates
from gptscale.foresight.time.simulator import play
from gptscale.foresight.time.split import Machines, ModelShape, Split
from gptscale.foresight.time.steps import pipeline_step
from gptscale.foresight.time.work import LAUNCHES

DEVICE, LINK = "a100-80", "nvlink3 ib-800"
MACHINES = Machines(DEVICE, 8, LINK)
FAST_HOST = 1e-6
RATES = expected_rates(DEVICE, LINK) | {(LAUNCH, DEVICE): (FAST_HOST, 0.7)}


def model(hidden=1024, layers=8):
    return ModelShape(layers, hidden, 16, 1024, 51200, 16, 4 * hidden)


def split(dp=1, tp=1, pp=1, micro_batch=1, micro_batches=4, layers=8, **more):
    return Split(dp, tp, pp, micro_batch, micro_batches, (layers // pp,) * pp, recompute=True, **more)


def world(hidden=1024, layers=8, **more):
    return pipeline_step(model(hidden, layers), split(layers=layers, **more), MACHINES)


def true_seconds(operation):
    """Be a machine with a fast host whose device is slower than its data sheet, by an amount for each kind and shape."""
    if operation.kind == LAUNCHES:
        return FAST_HOST
    return 1e-3 * (1 + sum(operation.shape) % 7) * (0.1 if operation.on == LINK else 1.0)


def measured(step):
    return MeasuredStep(step, play(step, true_seconds).seconds, 0.01)


def costs(rows, others=()):
    asked = {operation for step in others for operation in step.operations()}
    return calibrate([measured(step) for step in rows], asked, RATES, PRIORS)


def test_unmeasured_steps_of_known_operations_are_predicted():
    rows = [
        world(layers=layers, pp=pp, dp=dp, micro_batches=m)
        for layers in (8, 16, 24)
        for pp in (1, 2, 4)
        for dp in (1, 2)
        for m in (4, 8)
    ]
    new = world(layers=12, pp=4, dp=1, micro_batches=16)
    prediction = costs(rows, [new]).predict(new)
    assert prediction.seconds == pytest.approx(play(new, true_seconds).seconds, rel=0.03)
    assert prediction.spread < 0.03


def test_an_unknown_shape_says_so_in_its_spread_and_grade():
    rows = [world(layers=layers, micro_batches=m) for layers in (8, 16, 24) for m in (2, 4, 8)]
    known, unknown = world(layers=20), world(hidden=4096, tp=8, layers=20)
    table = costs(rows, [known, unknown])
    assert table.predict(known).grade == CALIBRATED
    assert table.predict(unknown).grade == f"{OTHER_SIZE}, {LINK} by data sheet"
    assert table.predict(unknown).far.startswith("block")
    assert not table.predict(known).far
    assert table.predict(unknown).spread > 5 * table.predict(known).spread


def test_a_row_that_is_far_off_pulls_little():
    rows = [measured(world(layers=layers, micro_batches=m)) for layers in (8, 16, 24) for m in (2, 4, 8)]
    new = world(layers=20)
    rows.append(rows[4]._replace(seconds=5 * rows[4].seconds))
    table = calibrate(rows, new.operations(), RATES, PRIORS)
    assert table.predict(new).seconds == pytest.approx(play(new, true_seconds).seconds, rel=0.03)


def test_every_device_and_link_has_rates():
    for device in DEVICES:
        for link in LINKS:
            assert all(seconds > 0 and spread > 0 for seconds, spread in expected_rates(device, link).values())


def test_a_step_has_the_multiplications_of_its_model_however_it_is_split():
    from gptscale.foresight.time.operations import FLOP, amounts

    def flops(step, ranks):
        items = [step.works[item.work] for item in step.items]
        return ranks * sum(n * amounts(op).get(FLOP, 0) for work in items for op, n in work.items())

    whole = flops(world(micro_batches=8), 1)
    assert flops(world(pp=4, micro_batches=8), 1) == pytest.approx(whole)
    assert flops(world(tp=4, micro_batches=8), 4) == pytest.approx(whole)
    assert flops(world(dp=4, micro_batches=2), 4) == pytest.approx(whole)
    tokens, h = 8 * 1024, 1024
    # Forward, forward again, and a backward of two forwards; the head is not computed again.
    assert whole == pytest.approx(4 * 2 * tokens * 12 * h * h * 8 + 3 * 2 * tokens * h * 51200)


def test_ranks_of_a_group_are_counted_by_node():
    """Two tensor ranks leave 4 data ranks a node, so two groups share its links. A group inside a node shares with nobody."""
    from gptscale.foresight.time.operations import MessageShape
    from gptscale.foresight.time.split import StepWriter

    writer = StepWriter(model(), split(dp=16, tp=2), MACHINES)
    assert writer.on_link("all-reduce", 100, 16, 2).shape == MessageShape(100, 16, 4, 2)
    assert writer.on_link("all-reduce", 100, 2, 1).shape == MessageShape(100, 2, 2, 1)


@pytest.mark.parametrize("faster", ["compute", "link"])
def test_fsdp_hides_its_gathers_behind_computation_if_it_can(faster):
    step = sharded_step(model(layers=6), split(dp=8, zero=3, layers=6, micro_batches=1), MACHINES)

    def seconds(operation):
        on_link = operation.on == LINK
        return (1e-4 if on_link else 1.0) if faster == "link" else (1.0 if on_link else 1e-4)

    timeline = play(step, seconds)
    compute, gather = timeline.busy_s(0, "compute"), timeline.busy_s(0, "gather")
    longest = compute if faster == "link" else gather
    assert longest < timeline.seconds < 1.2 * longest


def test_waiting_sends_cost_both_stages_and_others_only_the_way():
    waits, runs = (world(pp=2, p2p_waits=waits) for waits in (True, False))

    def seconds(operation):
        return 0.5 if operation.kind == "send" else 1.0

    assert play(waits, seconds).seconds > play(runs, seconds).seconds
    assert math.isclose(sum(item.name.startswith("send") for item in waits.items), 2 * 4)


def test_gradients_reduced_beside_backward_are_as_many_and_cost_less():
    def sent(step):
        works = [step.works[item.work] for item in step.items]
        return sum(op.shape[0] * n for work in works for op, n in work.items() if op.kind == "gradient all-reduce")

    def seconds(operation):
        return 1e-9 * operation.shape[0] if operation.kind == "gradient all-reduce" else 1e-2

    behind, beside = (world(dp=4, overlaps_gradients=overlaps) for overlaps in (False, True))
    assert sent(behind) == sent(beside)
    alone = play(behind, lambda operation: 1e-2 if operation.kind != "gradient all-reduce" else 0.0).seconds
    lengths = [play(step, seconds).seconds for step in (behind, beside)]
    assert lengths[1] < lengths[0]
    # The tables' come last, and nothing is left to compute beside them.
    assert lengths[1] >= alone + 1e-9 * 2 * 51200 * 1024


def test_every_sheet_has_its_source():
    for device in DEVICES:
        assert all(line.split(": ", 1)[1] for line in sources_of(device, "nvlink4 ib-400"))
    assert len(sources_of("h100-80", "nvlink4 ib-400")) == 3
    assert sheet_of("h100-80", "fp32") == "h100-80 fp32"
    assert sheet_of("a100-80", "fp8") == sheet_of("a100-80", "bf16") == "a100-80"
    elsewhere = expected_rates("a100-80@another cluster", "nvlink3 ib-800@another cluster")
    assert sorted(elsewhere.values()) == sorted(expected_rates("a100-80", "nvlink3 ib-800").values())
