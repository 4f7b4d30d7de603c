"""The CSVs of a study are read as they were written, also several together."""

import pandas as pd
import pytest

from gptscale.common.errors import ConfigError
from gptscale.lenet.comparison.rows import beside, read_rows, rows_of_runs, write_rows
from gptscale.lenet.run.columns import EPOCH_COLUMNS, LENET, read_summary

NUMBERS = {"n_params": 1, "seed": 1, "test_accuracy": 0.5, "batch_size": 64}


def folder_of_runs(out, names, study="batch"):
    """Write a lenet.csv and the epochs of runs, whose variants are given by name."""
    rows = [
        dict.fromkeys(LENET.names, "") | NUMBERS | {"run_id": n, "variant": v, "study": study} for n, v in names.items()
    ]
    (out / "runs").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(out / "lenet.csv", index=False)
    for name in names:
        folder = out / "runs" / name
        folder.mkdir()
        epochs = [dict.fromkeys(EPOCH_COLUMNS, "") | {"epoch": e, "train_loss": 1 / e} for e in (1, 2)]
        pd.DataFrame(epochs).to_csv(folder / "epochs.csv", index=False)
        (folder / "steps.csv").write_text(
            "step,load_s,update_s\n" + "".join(f"{i},0.001,{i / 1e3}\n" for i in range(1, 14))
        )
    return read_summary(out / "lenet.csv")


def test_what_was_written_is_read(tmp_path):
    runs = folder_of_runs(tmp_path / "out", {"r1": "a", "r2": "b"})
    rows = rows_of_runs(tmp_path / "out", runs)
    written = write_rows(tmp_path / "x.csv", rows)
    assert [path.name for path in written] == ["x.csv", "x-epochs.csv", "x-times.csv"]
    # The first three steps of 13 do not count: 5 to 14 ms.
    assert rows.times[["p10_ms", "median_ms", "p90_ms"]].iloc[0].tolist() == pytest.approx([5.9, 9.5, 13.1])
    again = read_rows(str(tmp_path / "x.csv"), "batch")
    for ours, theirs in zip(rows, again, strict=True):
        pd.testing.assert_frame_equal(ours.reset_index(drop=True), theirs, check_dtype=False)


def test_several_files_are_read_together_and_no_run_twice(tmp_path):
    for i in (1, 2):
        out = tmp_path / f"out{i}"
        write_rows(tmp_path / f"{i}.csv", rows_of_runs(out, folder_of_runs(out, {f"r{i}": "a", "both": "b"})))
    # One that was measured before there were files of epochs.
    beside(tmp_path / "2.csv", "epochs").unlink()
    together = read_rows(f"{tmp_path / '1.csv'},{tmp_path / '2.csv'}", "batch")
    assert together.runs.run_id.tolist() == ["r1", "both", "r2"]
    assert set(together.epochs.run_id) == {"r1", "both"}


def test_rows_of_another_study_are_refused(tmp_path):
    runs = folder_of_runs(tmp_path / "out", {"r1": "a"}, study="workers")
    write_rows(tmp_path / "w.csv", rows_of_runs(tmp_path / "out", runs))
    with pytest.raises(ConfigError, match=r"has no rows of batch alone, in --rows"):
        read_rows(str(tmp_path / "w.csv"), "batch")
    text = (tmp_path / "w.csv").read_text()
    (tmp_path / "w.csv").write_text(text.replace("torch_version", "x", 1))
    with pytest.raises(ConfigError, match="no column torch_version"):
        read_rows(str(tmp_path / "w.csv"), "workers")
    (tmp_path / "w.csv").write_text(text)
    epochs = tmp_path / "w-epochs.csv"
    epochs.write_text(epochs.read_text().replace(",", ",x", 40))
    with pytest.raises(ConfigError, match=r"w-epochs\.csv has no rows of a study"):
        read_rows(str(tmp_path / "w.csv"), "workers")
    with pytest.raises(ConfigError, match="does not exist"):
        read_rows(str(tmp_path / "none.csv"), "batch")
