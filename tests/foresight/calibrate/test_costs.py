"""The file of a calibration, and the costs that are made of it."""

import json
import math

import pytest

from gptscale.common.errors import DataError
from gptscale.foresight.calibrate.costs import cost_table
from gptscale.foresight.calibrate.file import CalibratedMachine, MachineFact, MeasuredMachine, TimedOperation, add, read
from gptscale.foresight.time.calibration import CALIBRATED, DATA_SHEET, OTHER_SIZE
from gptscale.foresight.time.data_sheets import GLOO, HERE
from gptscale.foresight.time.operations import BlockShape, MessageShape, ProductShape, StateShape
from gptscale.foresight.time.work import COMPUTE, REDUCE, Operation, StepWork

MACHINE = CalibratedMachine("cpu: a test", "2.11.0", 1, 2)
PRODUCT = Operation("product", ProductShape(512, 128, 512), HERE)
REDUCED = Operation("all-reduce", MessageShape(2**20, 2, 2, 1), GLOO)


def block(tokens=512, hidden=128):
    shape = BlockShape(tokens, hidden, 4 * hidden, 0, 4, 4, 128, 1, 0, 0)
    return Operation("block forward", shape, HERE)


def timed(operation, seconds, spread=0.02, precision="fp32"):
    return TimedOperation(operation, precision, seconds, spread, 7, "2026-11-23")


def measured(*operations, machine=MACHINE, facts=()):
    return MeasuredMachine(machine, list(operations), list(facts))


def step(*operations):
    work = StepWork()
    for operation in operations:
        work.add(operation.kind, 0, COMPUTE, {operation: 1.0})
    return work


@pytest.fixture
def file(tmp_path):
    return tmp_path / "calibration.json"


def test_what_was_written_is_read(file):
    fact = MachineFact("context", 0.5, "GiB", 0.0, "2026-11-23")
    written = measured(timed(PRODUCT, 1e-3), timed(REDUCED, 2e-3), facts=[fact])
    assert add(file, written) == [written]
    assert read(file) == [written]
    # A line for each measurement, so that people can read and compare files.
    assert sum('"kind"' in line for line in file.read_text().splitlines()) == 2


def test_measurements_are_added_to_older_ones_and_disagreement_is_spread(file):
    add(file, measured(timed(PRODUCT, 1.0e-3)))
    add(file, measured(timed(PRODUCT, 1.2e-3)))
    (machine,) = read(file)
    assert [t.seconds for t in machine.operations] == [1.0e-3, 1.2e-3]
    both = machine.combined("fp32")[PRODUCT]
    assert both.seconds == pytest.approx(math.sqrt(1.2) * 1e-3)
    assert both.spread > 0.08
    assert both.repeats == 14


def test_a_noisy_measurement_counts_less(file):
    (machine,) = add(file, measured(timed(PRODUCT, 1e-3, 0.01), timed(PRODUCT, 2e-3, 0.3)))
    assert machine.combined("fp32")[PRODUCT].seconds == pytest.approx(1e-3, rel=0.01)


def test_measured_operations_are_taken_as_measured(file):
    add(file, measured(timed(block(), 7.7e-3), timed(PRODUCT, 1e-4), timed(REDUCED, 2e-3)))
    costs = cost_table([block(), REDUCED], HERE, GLOO, file)
    prediction = costs.predict(step(block(), block(), REDUCED))
    assert prediction.seconds == pytest.approx(2 * 7.7e-3 + 2e-3)
    assert prediction.grade == CALIBRATED
    assert prediction.spread < 0.03


def test_other_shapes_follow_from_the_measured_ones_and_far_ones_say_so(file):
    near, far = block(tokens=1024), block(tokens=8192, hidden=4096)
    add(file, measured(*(timed(block(tokens=n), n * 1e-5) for n in (256, 512, 2048))))
    costs = cost_table([near, far], HERE, GLOO, file)
    close, distant = costs.predict(step(near)), costs.predict(step(far))
    assert close.seconds == pytest.approx(1024e-5, rel=0.1)
    assert close.grade == distant.grade == OTHER_SIZE
    assert distant.spread > 4 * close.spread


def test_without_measurements_a_device_is_its_data_sheet(file):
    assert cost_table([block()], HERE, GLOO, file).predict(step(block())).grade == DATA_SHEET


def test_a_calibration_of_other_versions_is_used_and_said(file):
    add(file, measured(timed(block(), 7e-3), machine=MACHINE._replace(torch="2.5.1", world=1)))
    prediction = cost_table([block()], HERE, GLOO, file, machine=MACHINE).predict(step(block()))
    assert prediction.seconds == pytest.approx(7e-3)
    assert prediction.grade == f"{CALIBRATED} (torch 2.5.1, 1 ranks at once)"
    add(file, measured(timed(block(), 9e-3)))
    prediction = cost_table([block()], HERE, GLOO, file, machine=MACHINE).predict(step(block()))
    assert (prediction.seconds, prediction.grade) == (pytest.approx(9e-3), CALIBRATED)
    other = MACHINE._replace(device="cpu: another")
    assert cost_table([block()], HERE, GLOO, file, machine=other).predict(step(block())).grade == DATA_SHEET


def test_precisions_are_apart(file):
    add(file, measured(timed(block(), 7e-3, precision="bf16")))
    assert cost_table([block()], HERE, GLOO, file).predict(step(block())).grade == DATA_SHEET
    assert cost_table([block()], HERE, GLOO, file, precision="bf16").predict(step(block())).grade == CALIBRATED


def test_measured_contention_makes_overlap_dearer(file):
    work = StepWork()
    work.add("compute", 0, COMPUTE, {block(): 1.0})
    work.add("reduce", 0, REDUCE, {REDUCED: 1.0})
    facts = [
        MachineFact("contention of computing", 1.5, "times"),
        MachineFact("contention of communicating", 2.0, "times"),
    ]
    add(file, measured(timed(block(), 1e-2), timed(REDUCED, 1e-3), facts=facts))
    # The reduction takes 2 ms beside the block, which does 2/1.5 ms of its work meanwhile.
    prediction = cost_table([block(), REDUCED], HERE, GLOO, file).predict(work)
    assert prediction.seconds == pytest.approx(2e-3 + 1e-2 - 2e-3 / 1.5)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("[]", "no calibration"),
        ("{", "no calibration"),
        ('{"format": 1, "machines": [{}]}', "no calibration"),
        ('{"format": 99, "machines": []}', "format 99"),
    ],
)
def test_other_files_are_refused_in_one_line(file, content, what):
    file.write_text(content)
    with pytest.raises(DataError, match=what):
        cost_table([block()], HERE, GLOO, file)


def test_seconds_must_be_seconds(file):
    add(file, measured(timed(PRODUCT, 1e-3)))
    file.write_text(json.dumps(json.loads(file.read_text())).replace("0.001", "-1"))
    with pytest.raises(DataError, match="-1 seconds"):
        read(file)


def test_optimizer_and_host_have_costs(file):
    operations = [Operation("optimizer", StateShape(10**6), HERE), Operation("host", (), HERE)]
    assert all(cost_table(operations, HERE, GLOO, file).seconds(operation) > 0 for operation in operations)
