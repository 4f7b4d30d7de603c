"""A run never ends without a row of its own, however its processes ended."""

import json

import pytest
from worlds import WORLDS, imports_of, rows

from gptscale.common.errors import StorageError
from gptscale.common.process.program import Program
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run import start as start_module
from gptscale.launchers.run.start import plan_run, start
from gptscale.lenet.run.columns import LENET
from gptscale.recipes.ddp import DDPConfig
from gptscale.results.columns import SUMMARY
from gptscale.results.record import launch_with_row
from gptscale.results.record.files import append_row, write_json
from gptscale.results.record.run_folder import START


def statuses(out):
    return [(row["run_id"], row["status"]) for row in rows(out / "summary.csv")]


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Start the run `r` with ranks that do what is given, which gets the name of the start, and return its status."""
    words = "ddp", RunConfig(data="synthetic", out=tmp_path, run_name="r", steps=4), DDPConfig(), 2
    run = plan_run(*words)
    monkeypatch.setattr(start_module, "plan_run", lambda *args: run)

    def begin(ranks):
        monkeypatch.setattr(launch_with_row, "launch", lambda *args, environment, fork: ranks(environment[START]))
        return start(*words)

    return begin


def began(folder, name):
    """Leave what rank 0 leaves when it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", {"identity": {"run_id": "r", "recipe": "ddp"}, "start": name})


def ended(folder, name):
    """Leave what rank 0 leaves when it ends well."""
    began(folder, name)
    append_row(SUMMARY, folder.parents[1], {"run_id": "r", "status": "ok"})
    write_json(folder / "status.json", {"status": "ok", "error": "", "step": 4, "start": name})


@pytest.mark.promise("P4")
@pytest.mark.parametrize("wrote_its_row", [False, True])
def test_every_end_that_left_no_row_gets_one(tmp_path, begin, wrote_its_row):
    """Also the second end of a run that was resumed: its earlier row does not count for it.

    A row counts also when its rank was ended before the status: the launcher ends the peers of a killed rank while they write.
    """

    def killed(name):
        began(tmp_path / "runs" / "r", name)
        if wrote_its_row:
            append_row(SUMMARY, tmp_path, {"run_id": "r", "status": "failed"})
        return 7

    for n_starts in (1, 2):
        assert begin(killed) == 7
        assert statuses(tmp_path) == [("r", "failed")] * n_starts


@pytest.mark.promise("P15 | ranks that end with 0 too early | a failure, 7")
def test_ranks_that_all_end_with_0_before_the_last_step_have_failed(tmp_path, begin, capsys):
    """Also on resume, when status.json is that of the first start."""
    folder = tmp_path / "runs" / "r"
    assert begin(lambda name: ended(folder, name) or 0) == 0
    assert capsys.readouterr().err == ""
    assert begin(lambda name: began(folder, name) or 0) == 7
    assert "error: all ranks ended with status 0 before the run was done" in capsys.readouterr().err
    assert statuses(tmp_path) == [("r", "ok"), ("r", "failed")]


def test_a_run_whose_steps_were_done_is_ok_and_its_row_is_written_once(tmp_path, begin):
    """Whichever rank was killed, unless the disk did not take rows (5), or the user wants no more runs (130)."""
    folder = tmp_path / "runs" / "r"
    for status, expected in ((7, 0), (5, 5), (130, 130)):
        assert begin(lambda name, status=status: ended(folder, name) or status) == expected
    assert statuses(tmp_path) == [("r", "ok")] * 3


# The options of a run, its record, and the table of its row.
ENDED = {
    "ddp": ("--data synthetic --steps 3 --n-layer 1 --seq-len 32", "launchers.run.record,RunRecord", SUMMARY),
    "lenet": ("--epochs 1 --batch-size 256", "lenet.run.record,VisionRecord", LENET),
}


@pytest.mark.promise(
    "P19 | SIGKILL of a rank when all steps are done | the run is ok, 0, and one line names the rank; the row lacks "
    "what only that rank knew"
)
@pytest.mark.parametrize(
    ("what", "rank", "function"),
    [("ddp", 1, "torch.distributed,barrier"), *((what, rank, "") for what in ENDED for rank in (0, 1))],
)
def test_a_rank_that_dies_after_the_last_step_changes_nothing(what, rank, function, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options, record, table = ENDED[what]
    words = (f"killed_in,{function or f'gptscale.{record}.finish'},{rank}", what, *options.split(), "--no-tensorboard")
    words += ("--device", "cpu", "--out", str(tmp_path), "--run-name", "r")
    program = Program(str(WORLDS / "world_faulty.py"), words, imports=imports_of((what,), ""))
    folder = tmp_path / "runs" / "r"
    assert launch_with_row.launch_with_row(program, 2, folder, table, fork=True) == 0
    (row,) = rows(tmp_path / table.file)
    assert (row["status"], row["error"]) == ("ok", "")
    assert float(row["test_accuracy"]) > 0 if what == "lenet" else 5 < float(row["loss_last"]) < 6
    assert float(row["peak_rss_gib"]) > 0
    assert json.loads((folder / "status.json").read_text())["status"] == "ok"
    errors = capfd.readouterr().err
    assert f"rank {rank} was killed by SIGKILL" in errors
    assert f"all {row['steps']} steps of r were done by then, so that the run is ok" in errors
    assert "Traceback" not in errors


@pytest.mark.promise("S13")
def test_a_refused_start_leaves_nothing_and_no_row_of_a_run_that_goes_on(tmp_path, begin):
    assert begin(lambda name: 2) == 2
    assert not list(tmp_path.iterdir())
    began(tmp_path / "runs" / "r", "the first")
    assert begin(lambda name: 2) == 2
    assert not (tmp_path / "summary.csv").exists()


def test_a_row_that_the_disk_does_not_take_changes_no_status(tmp_path, begin, monkeypatch, capsys):
    def full(*args):
        raise StorageError("no space", "in summary.csv", "free space")

    monkeypatch.setattr(launch_with_row, "append_row", full)
    assert begin(lambda name: began(tmp_path / "runs" / "r", name) or 5) == 5
    assert capsys.readouterr().err == "gptscale: error: no space, in summary.csv, free space\n"
