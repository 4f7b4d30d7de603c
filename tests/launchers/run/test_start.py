"""A run never ends without a row of its own, however its processes ended."""

import csv
import json

from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run import start as start_module
from gptscale.launchers.run.start import start
from gptscale.recipes.ddp import DDPConfig
from gptscale.results.record import launch_with_row


def statuses(out):
    with (out / "summary.csv").open() as file:
        return [(row["run_id"], row["status"]) for row in csv.DictReader(file)]


def test_every_end_that_left_no_row_gets_one(tmp_path, monkeypatch):
    """Also the second end of a run that was resumed: its earlier row does not count for it."""
    folder = tmp_path / "runs" / "r"

    def killed(program, nproc, *, fork):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps({"identity": {"run_id": "r", "recipe": "ddp"}}))
        return 7

    monkeypatch.setattr(launch_with_row, "launch", killed)
    monkeypatch.setattr(start_module, "plan_run", lambda *args: None)
    config = RunConfig(data="synthetic", out=tmp_path, run_name="r")
    assert start("ddp", config, DDPConfig(), 2) == 7
    assert statuses(tmp_path) == [("r", "failed")]
    assert start("ddp", config, DDPConfig(), 2) == 7
    assert statuses(tmp_path) == [("r", "failed")] * 2


def test_a_run_refused_before_it_began_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_with_row, "launch", lambda program, nproc, *, fork: 2)
    config = RunConfig(data="synthetic", out=tmp_path / "out", run_name="r")
    assert start("ddp", config, DDPConfig(), 2) == 2
    assert not list(tmp_path.iterdir())
