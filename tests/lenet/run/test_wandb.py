"""Tests of Weights & Biases: offline, TensorBoard's scalars are in a file under the run's folder and nowhere else."""

import contextlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import IMPORTS

from gptscale.common.errors import ConfigError
from gptscale.common.process.program import Program
from gptscale.common.process.task import run_captured
from gptscale.launchers.cli import main
from gptscale.lenet.run.config import RUN_IMPORTS
from gptscale.results.record import foreign
from gptscale.results.record.wandb_board import WandbBoard

WORDS = ["--log-every", "2", "--device", "cpu", "--out", "out", "--run-name", "r", "--wandb"]


needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")


@pytest.fixture
def offline(tmp_path):
    """Return an environment in which wandb can write only under `tmp_path`/home and finds no server."""
    home = tmp_path / "home"
    settings = {"HOME": str(home), "WANDB_MODE": "offline", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    settings["OMP_NUM_THREADS"] = "1"
    return {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "XDG"))} | settings


def run(folder, environment, *words, imports=RUN_IMPORTS):
    """Run the command in a process and a working folder of its own."""
    with contextlib.chdir(folder):
        program = Program("gptscale.launchers.cli", words, imports=imports)
        return run_captured(program, timeout=400, environ=environment)


def train(folder, environment, *words, epochs=2, status=0):
    ended = run(folder, environment, "lenet", "train", "--epochs", str(epochs), *WORDS, *words)
    assert ended.returncode == status, ended.stdout[-2000:] + ended.stderr[-2000:]


def records(file):
    """Yield the records that wandb wrote."""
    from wandb.proto.wandb_internal_pb2 import Record

    for record in map(Record.FromString, foreign._records(file.read_bytes())):
        kind = record.WhichOneof("record_type")
        yield kind, getattr(record, kind)


def history(file):
    """Return each tag's steps and values."""
    found = {}
    for kind, record in records(file):
        if kind == "history":
            for item in record.item:
                name = "/".join(item.nested_key) or item.key
                if not name.startswith("_"):
                    found.setdefault(name, []).append((record.step.num, json.loads(item.value_json)))
    return found


@pytest.mark.slow
@needs_wandb
def test_offline_it_has_what_tensorboard_has(tmp_path, idx_folder, offline):
    train(tmp_path, offline, "--data", str(idx_folder), "--save-every", "1")
    # There is no ./wandb.
    assert {p.name for p in tmp_path.iterdir()} <= {"out", "home"}
    folder = tmp_path / "out" / "runs" / "r"
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    ours, events = history(file), EventAccumulator(str(folder)).Reload()
    assert sorted(ours) == sorted(events.Tags()["scalars"])
    for tag in ("train/loss", "train/lr", "epoch/test_accuracy", "epoch/test_loss", "epoch/train_loss"):
        theirs = events.Scalars(tag)
        assert [step for step, _ in ours[tag]] == [event.step for event in theirs]
        assert [value for _, value in ours[tag]] == pytest.approx([event.value for event in theirs], rel=1e-6)
    found = dict(records(file))
    assert found["exit"].exit_code == 0
    config = {item.key: json.loads(item.value_json) for item in found["run"].config.update}
    assert (config["model"], config["data"], config["seed"]) == ("lenet", str(idx_folder), 1234)
    assert found["run"].project == "gptscale"
    assert found["run"].display_name == "r"
    train(tmp_path, offline, "--data", str(idx_folder), "--resume", "--save-every", "1", epochs=3)
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    # The two files are one run there, as here.
    assert len({dict(records(f))["run"].run_id for f in files}) == 1
    steps = sorted(step for f in files for step, _ in history(f)["epoch/test_accuracy"])
    assert steps == [3, 6, 9]


@pytest.mark.slow
@needs_wandb
def test_a_run_that_failed_is_failed_there_too(tmp_path, idx_folder, offline):
    harm = "--lr 100 --weight-decay 100 --optimizer sgd --no-tensorboard".split()
    train(tmp_path, offline, "--data", str(idx_folder), *harm, epochs=9, status=6)
    (file,) = tmp_path.glob("out/runs/r/wandb/offline-run-*/*.wandb")
    assert dict(records(file))["exit"].exit_code == 1
    assert not list(tmp_path.glob("out/runs/r/events*"))


def test_without_the_package_or_an_account_nothing_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = "gptscale: error: Weights & Biases is not installed, in --wandb, pip install 'gptscale[wandb]'\n"
    assert main(["lenet", "train", "--wandb"]) == 2
    assert capsys.readouterr().err == line
    # This folder is imported as a namespace, and is not the library.
    (tmp_path / "empty" / "wandb").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty")])
    assert main(["lenet", "train", "--wandb"]) == 2
    assert capsys.readouterr().err == line
    sys.modules.pop("wandb")
    assert not (tmp_path / "results").exists()


@needs_wandb
def test_with_no_account_it_says_how_to_go_on(tmp_path, offline):
    del offline["WANDB_MODE"]
    ended = run(tmp_path, offline, "lenet", "train", "--wandb")
    assert ended.returncode == 2
    fix = "in --wandb, run `wandb login`, or set WANDB_MODE=offline"
    assert ended.stderr.splitlines()[-1] == f"gptscale: error: Weights & Biases knows no account here, {fix}"
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "wandb").exists()


@needs_wandb
def test_what_breaks_on_the_way_is_a_warning_and_at_the_start_an_error(tmp_path, capsys, monkeypatch):
    import wandb

    class Broken:
        offline, dir = True, str(tmp_path / "wandb" / "offline-run" / "files")

        def log(self, values, step):
            raise wandb.Error("the service has gone")

    given = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or Broken())
    board = WandbBoard(tmp_path, 0, {"out": Path("results"), "lr": 0.1})
    assert given["config"] == {"out": "results", "lr": 0.1}
    assert given["dir"] == str(tmp_path)
    for step in (1, 2):
        board.scalars(step, {"train/loss": 2.0})
    board.close()
    assert capsys.readouterr().err.count("Weights & Biases ends here (the service has gone), steps.csv goes on") == 1
    continued = given["id"]
    WandbBoard(tmp_path, 7, {})
    assert given["id"] == continued
    WandbBoard(tmp_path, 0, {})
    # A run that is begun anew is another run.
    assert given["id"] != continued

    def unreachable(**options):
        raise wandb.Error("no route to host")

    monkeypatch.setattr(wandb, "init", unreachable)
    with pytest.raises(ConfigError, match=r"did not start .no route to host., in --wandb"):
        WandbBoard(tmp_path, 0, {})


@pytest.mark.slow
@needs_wandb
def test_the_gpt_has_it_too(tmp_path, offline):
    words = ["run", "single", "--data", "synthetic", "--steps", "2", "--seq-len", "16", "--micro-batch-size", "2"]
    where = ["--global-batch-size", "2", "--device", "cpu", "--out", "out", "--run-name", "r", "--wandb"]
    ended = run(tmp_path, offline, *words, *where, imports=IMPORTS)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    folder = tmp_path / "out" / "runs" / "r"
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    ours, events = history(file), EventAccumulator(str(folder)).Reload()
    assert sorted(ours) == sorted(events.Tags()["scalars"])
    theirs = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("train/loss")]
    assert ours["train/loss"] == theirs
