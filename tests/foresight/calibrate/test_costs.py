"""The file of a calibration, and the costs that are made of it."""

import math

import pytest

from gptscale.common.errors import DataError
from gptscale.common.measure.gpus import SIMULATED
from gptscale.foresight.calibrate.costs import costs_for, nearest
from gptscale.foresight.calibrate.file import CalibratedMachine, MeasuredMachine, Operation, TimedOperation, add, read
from gptscale.foresight.price.cost import KERNEL_S, costs_of
from gptscale.foresight.price.record import Work

MACHINE = CalibratedMachine("cpu: a test", "2.11.0", 1, 2)
GPU = CalibratedMachine(SIMULATED["h100-80"].properties.name, "2.11.0", 1, 8)
PRODUCT = Operation("product", (512, 128, 512))


def reduced(nbytes):
    return Operation("all-reduce", (nbytes, 2, 2))


def timed(operation, seconds, spread=0.02, precision="bf16"):
    return TimedOperation(operation, precision, seconds, spread, 7, "2026-11-23")


def measured(*operations, machine=MACHINE):
    return MeasuredMachine(machine, list(operations))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "calibration.json"


def test_what_was_written_is_read(file):
    written = measured(timed(PRODUCT, 1e-3), timed(reduced(2**20), 2e-3))
    assert add(file, written) == [written]
    assert read(file) == [written]
    # A line for each measurement, so that people can read and compare files.
    assert sum('"kind"' in line for line in file.read_text().splitlines()) == 2


def test_measurements_are_added_to_older_ones_and_disagreement_is_spread(file):
    add(file, measured(timed(PRODUCT, 1.0e-3)))
    add(file, measured(timed(PRODUCT, 1.2e-3)))
    (machine,) = read(file)
    assert [t.seconds for t in machine.operations] == [1.0e-3, 1.2e-3]
    both = machine.combined("bf16")[PRODUCT]
    assert both.seconds == pytest.approx(math.sqrt(1.2) * 1e-3)
    assert both.spread > 0.08
    assert both.repeats == 14


def test_a_noisy_measurement_counts_less(file):
    (machine,) = add(file, measured(timed(PRODUCT, 1e-3, 0.01), timed(PRODUCT, 2e-3, 0.3)))
    assert machine.combined("bf16")[PRODUCT].seconds == pytest.approx(1e-3, rel=0.01)


def work(kind, name, precision="", **more):
    return Work(0.0, kind, 0, name, precision=precision, **more)


def test_what_was_measured_costs_that_and_between_sizes_lies_a_line(file):
    small, large = 2.0 * 512 * 128 * 512, 2.0 * 2048 * 512 * 2048
    times = {PRODUCT: 1e-5, Operation("product", (2048, 512, 2048)): 64e-5, reduced(2**20): 1e-3, reduced(2**24): 16e-3}
    times |= {Operation("attention forward", (2048, 64, 1, 1024)): 1e-3, Operation("pass", (2**20,)): 1e-4}
    add(file, measured(*(timed(operation, seconds) for operation, seconds in times.items()), machine=GPU))
    costs, sheet = costs_for("h100-80", file=file), costs_of("h100-80")
    product = work("product", "mm", "bf16", flops=small)
    assert costs.seconds(product) == pytest.approx(1e-5 + KERNEL_S)
    assert costs.seconds(work("product", "mm", "bf16", flops=math.sqrt(small * large))) == pytest.approx(8e-5, rel=0.05)
    assert costs.seconds(work("collective", "all-reduce", nbytes=2**22, ranks=2)) == pytest.approx(4e-3)
    assert costs.seconds(work("collective", "all-reduce", nbytes=2**26, ranks=2)) == pytest.approx(64e-3)
    assert costs.seconds(work("kernel", "flash_fwd", "bf16", flops=2.0**28)) == pytest.approx(1e-3, rel=0.01)
    assert costs.seconds(work("kernel", "add", nbytes=2**20)) == pytest.approx(1e-4 + KERNEL_S)
    # The smallest that was measured takes longer than a launch, so that what is smaller still takes its share of it.
    assert costs.seconds(work("kernel", "add", nbytes=2**18)) == pytest.approx(0.25e-4 + KERNEL_S)
    assert costs.seconds(work("product", "mm", "bf16", flops=small / 2)) == pytest.approx(0.5e-5 + KERNEL_S)
    assert costs.seconds(work("collective", "all-reduce", nbytes=2**12, ranks=2)) == pytest.approx(1e-3)
    # Work that was not measured is priced by the data sheet.
    for other in (work("product", "mm", "fp16", flops=small), work("collective", "all-gather", nbytes=1e6, ranks=8)):
        assert costs.seconds(other) == sheet.seconds(other)


def test_another_device_is_its_data_sheet(file):
    add(file, measured(timed(PRODUCT, 1.0), machine=GPU))
    assert costs_for("a100-80", file=file) == costs_of("a100-80")


def test_the_measurements_that_resemble_a_machine_most_are_taken():
    older, own, other = MACHINE._replace(torch="2.5.1"), MACHINE, MACHINE._replace(device="cpu: another")
    machines = [measured(machine=machine) for machine in (own, older, other)]
    assert nearest(machines, own).machine == own
    assert nearest(machines[1:], own).machine == older
    assert nearest(machines[2:], own) is None


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("[]", "no calibration"),
        ('{"format": 2, "machines": [{}]}', "no calibration"),
        ('{"format": 99, "machines": []}', "format 99"),
    ],
)
def test_other_files_are_refused_in_one_line(file, content, what):
    file.write_text(content)
    with pytest.raises(DataError, match=what):
        costs_for("h100-80", file=file)


def test_seconds_must_be_seconds(file):
    add(file, measured(timed(PRODUCT, 1e-3)))
    file.write_text(file.read_text().replace("0.001", "-1"))
    with pytest.raises(DataError, match="-1 seconds"):
        read(file)
