"""Tables of runs that others measured, written here by a machine that is known."""

import csv
import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.foresight.tables.check import check, choices
from benchmarks.foresight.tables.memory import fit_memory
from benchmarks.foresight.tables.nanotron import NANOTRON, stage_blocks
from benchmarks.foresight.tables.report import ADDED, summary, write_rows
from benchmarks.foresight.tables.rows import CellsOfRow
from benchmarks.foresight.tables.table import PROFILES, read_table
from benchmarks.foresight.tables.vtrain import VTRAIN, read
from gptscale.common.errors import DataError
from gptscale.foresight.time.calibration import _losses
from gptscale.foresight.time.simulator import play
from gptscale.foresight.time.split import ModelShape
from gptscale.foresight.time.work import LAUNCHES


def true_seconds(operation):
    if operation.kind == LAUNCHES:
        return 1e-6
    return 5e-4 * (1 + sum(operation.shape) % 5)


def vtrain_rows():
    """Return rows of vTrain's columns, with the times of a machine whose costs are `true_seconds`."""
    rows = []
    for layers, (dp, tp, pp), m in itertools.product(
        (12, 16, 24), ((1, 1, 2), (2, 1, 1), (1, 1, 4), (4, 1, 1), (2, 1, 2)), (2, 4, 8)
    ):
        figures = (dp * tp * pp, dp * m, 1, 1024, 16, layers, 1024, tp, dp, pp, 1)
        cells = dict(zip(VTRAIN.columns, map(str, figures), strict=True))
        step = read(CellsOfRow(cells, "")).step
        rows.append(cells | {"iteration time (ms)": f"{1e3 * play(step, true_seconds).seconds:.6f}"})
    return rows


def write(path, rows, columns=None):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def rows():
    return vtrain_rows()


def test_each_half_is_predicted_from_the_other(tmp_path, rows):
    table = read_table(write(tmp_path / "runs.csv", rows))
    checked = check(table, [])
    errors = sorted(abs(row.error) for row in checked if row.error is not None)
    assert len(checked) == len(rows)
    assert len(errors) > 0.5 * len(rows)
    assert errors[len(errors) // 2] < 0.03
    out = tmp_path / "out.csv"
    write_rows(out, table, checked)
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["# layers"] for row in written] == [row["# layers"] for row in rows]
    assert set(ADDED) <= set(written[0])
    text = "\n".join(summary(table, [], checked))
    for word in ("answered", "median", "95th", "worst", "choice"):
        assert word in text


def test_with_a_second_table_all_of_the_first_is_predicted_from_it(tmp_path, rows):
    small = [row for row in rows if int(row["# GPUs"]) <= 2]
    large = [row for row in rows if int(row["# GPUs"]) > 2]
    table, other = (read_table(write(tmp_path / f"{name}.csv", part)) for name, part in (("a", large), ("b", small)))
    assert len(check(table, [other])) == len(large)


def test_a_shape_without_calibration_is_refused(tmp_path, rows):
    unknown = rows[0] | {"hidden size": "8192", "attention heads": "64", "sequence length": "4096"}
    table = read_table(write(tmp_path / "a.csv", [unknown]))
    (row,) = check(table, [read_table(write(tmp_path / "b.csv", rows))])
    assert row.predicted_s is None
    assert row.refused.startswith("not calibrated")


def test_a_row_whose_splits_do_not_multiply_is_refused_and_no_error(tmp_path, rows):
    table = read_table(write(tmp_path / "a.csv", [*rows, rows[0] | {"# GPUs": "7"}]))
    assert "do not multiply" in check(table, [])[-1].refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "no known table"),
        (lambda text: "a,b\n1,2\n", "no known table"),
        (lambda text: text.splitlines()[0] + "\n", "has no rows"),
        (lambda text: text.replace("# layers", "layers"), "has no column '# layers'"),
        (lambda text: text.replace(",1024,16,12,", ",1024,16,twelve,", 1), "'# layers' is 'twelve'.*line 2"),
        (lambda text: text.replace(",1024,16,12,", ",1024,16,-1,", 1), "positive number"),
        (lambda text: text.replace(",1024,16,12,", ",1024,16,1.5,", 1), "whole number"),
        (lambda text: text + "1,2\n", "line"),
    ],
)
def test_a_bad_table_is_one_line(tmp_path, rows, change, message):
    path = write(tmp_path / "a.csv", rows)
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=message) as caught:
        read_table(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_or_not_there_is_one_line(tmp_path):
    (tmp_path / "a.csv").write_bytes(bytes(range(256)))
    for name in ("a.csv", "b.csv"):
        with pytest.raises(DataError, match="cannot be read"):
            read_table(tmp_path / name)


def test_all_rows_of_an_empty_calibration_are_said(tmp_path, rows):
    with pytest.raises(DataError, match="no row is left to calibrate on"):
        check(read_table(write(tmp_path / "a.csv", rows[:1])), [])


def nanotron_cells(**changes):
    cells = dict.fromkeys(NANOTRON.columns, "1") | {"model": "1B", "zero": "0", "gbs": "256", "seq_len": "4096"}
    cells |= {"dp": "8", "mbs": "2", "grad_acc": "16", "tok_s_gpu": "40000", "gpu_memory_gb": "50", "status": "ok"}
    return cells | {name: str(value) for name, value in changes.items()}


def test_nanotron_starts_no_pipeline_with_too_few_blocks_or_micro_batches():
    def reason(**changes):
        return NANOTRON.read(CellsOfRow(nanotron_cells(**changes), "")).cannot_start

    assert not reason()
    assert "only 16 blocks" in reason(pp=32, dp=1, mbs=1, grad_acc=256)
    assert "needs 7 micro-batches" in reason(pp=8, dp=16, mbs=8, grad_acc=2)


def test_a_crashed_row_has_no_seconds_and_no_speed():
    run = NANOTRON.read(CellsOfRow(nanotron_cells(status="crashed_or_oom", tok_s_gpu="", gpu_memory_gb=""), ""))
    assert run.seconds is None
    assert run.step is not None


def test_the_head_takes_blocks_from_the_last_stages():
    model = ModelShape(16, 2048, 32, 4096, 131072, 32, 8192, gated=True)
    blocks = stage_blocks(model, 4)
    assert sum(blocks) == 16
    assert blocks[-1] < blocks[0]


def test_the_recommended_row_is_the_fastest_that_fits(tmp_path):
    speeds = {1: 20000, 2: 30000, 4: 36000, 8: 39000, 16: 40000}
    rows = [
        nanotron_cells(dp=8, mbs=mbs, grad_acc=32 // mbs, tok_s_gpu=speed * factor, gpu_memory_gb=10 + 2.5 * mbs)
        for mbs, speed in speeds.items()
        for factor in (0.99, 1.0, 1.01)
    ]
    checked = check(read_table(write(tmp_path / "a.csv", rows)), [read_table(write(tmp_path / "b.csv", rows))])
    (choice,) = choices(checked)
    assert choice.row.fits
    assert choice.gap < 0.05


def test_every_profile_names_places_that_have_rates():
    from gptscale.foresight.time.presets import expected_rates

    for profile in PROFILES:
        for device, link in profile.places:
            assert expected_rates(device, link)


def test_bytes_are_those_expected_until_runs_say_otherwise():
    """One kind of element that takes twice its expected bytes is found from runs, and no byte becomes negative."""
    runs = [
        NANOTRON.read(CellsOfRow(nanotron_cells(dp=dp, tp=tp, mbs=mbs, grad_acc=256 // dp // mbs), ""))
        for dp, tp, mbs in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8))
    ]
    expected = np.array(runs[0].memory.expected)
    untold = fit_memory([replace(run, measured_gb=None) for run in runs])
    assert untold.bytes_each == pytest.approx(expected)
    true = expected * [1, 2, 1, 1, 1, 1]
    told = [replace(run, measured_gb=float((np.array(run.memory.of_ranks) @ true).max() / 1e9)) for run in runs]
    found = fit_memory(told)
    assert (found.bytes_each >= 0).all()
    assert found.gigabytes(runs[5].memory) == pytest.approx(told[5].measured_gb, rel=0.02)


def test_a_slow_row_pulls_less_than_a_fast_one():
    losses, weights = _losses(np.array([5.0, -5.0]))
    assert losses[0] < losses[1]
    assert weights[0] < weights[1] < 1
