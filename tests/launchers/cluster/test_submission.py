"""What a job of Slurm is asked for, and what is refused before it is submitted."""

import json
import os
import shlex
import subprocess

import pytest

from gptscale.launchers.cli import main
from gptscale.launchers.cluster import after_ranks
from gptscale.launchers.commands import sweep

RUN = ["--data", "synthetic", "--run-name", "mine"]


def script(capsys, *words, command="submit"):
    assert main([command, *words, "--dry-run"]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


# All tests work in an empty folder.
pytestmark = pytest.mark.usefixtures("folder")


SAVE = "--save-every 5"
BATCH = "--global-batch-size 12 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("words", "sbatch", "has", "lacks"),
    [
        (
            "ddp --nodes 2 --time 1:00 '--comment=it is mine; rm' --signal=TERM@9 --exclusive --partition gpu --hold",
            "time=1:00 signal=TERM@9 exclusive partition=gpu hold nodes=2 ntasks-per-node=1 no-requeue",
            [],
            ["B:TERM", "scontrol requeue", "--resume"],
        ),
        # A run that saves goes back into the queue.
        (f"ddp --nodes 2 --nproc 2 {SAVE}", "requeue", ["--resume auto", "scontrol requeue"], []),
        # With fewer nodes the accumulation grows.
        ("ddp --nodes 4 --min-nodes 4 --global-batch-size 12 " + SAVE, "nodes=4", [], []),
        (f"ddp --nodes 4 --min-nodes 3 {BATCH} {SAVE}", "nodes=3-4 exclusive", [BATCH + " "], []),
        (f"ddp --nodes 2 --min-nodes 1 --exclusive=user {SAVE}", "exclusive=user", [], ["#SBATCH --exclusive\n"]),
        # A job of GPUs is planned where there is none.
        (
            "fsdp --nodes 2 --gpus-per-node 8 --precision fp8 --global-batch-size 64",
            "gpus-per-node=8 ntasks-per-node=8",
            ["--device cuda"],
            [],
        ),
    ],
)
def test_what_sbatch_is_asked_for_and_what_the_ranks_are(words, sbatch, has, lacks, capsys, tmp_path):
    text = script(capsys, *shlex.split(words), *RUN)
    assert {f"#SBATCH --{option}" for option in sbatch.split()} <= {*text.splitlines()}
    assert all(part in text for part in has)
    assert not any(part in text for part in lacks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ddp", "--time"], "--time has no value"),
        (["ddp", "--account", "--steps", "5"], "--account has no value"),
        (["ddp", "--comment=a\n#SBATCH --uid=0"], "--comment has a value of several lines"),
        (["ddp", "--nodes", "2", "--nproc", "0"], "nproc 0 is out of range, in --nproc"),
        (["ddp", "--nodes", "2", "--min-nodes", "3"], "min_nodes 3 is out of range"),
        (["ddp", "--nodes", "2", "--min-nodes", "1"], "the run saves nothing to go on from"),
        (["ddp", "--nodes", "2", "--resume", "somewhere/step-3"], "would resume somewhere/step-3 again"),
        (
            f"ddp --nodes 4 --min-nodes 3 {SAVE} --global-batch-size 12 --micro-batch-size 3".split(),
            "multiple of 9 (micro-batch 3 x accumulation free x data ranks 3), in --min-nodes, leave it out",
        ),
        (["single", "--nodes", "2"], "single is one process"),
        (["ddp", "--nodes", "3", "--global-batch-size", "8"], "in --global-batch-size"),
        (["ddp", "--nodse", "2"], "did you mean '--nodes'?"),
        (["ddp", "--partition-of", "3"], "unknown option '--partition-of'"),
        (["fsdp", "--gpus-per-node", "8", "--global-batch-size", "12"], "in --global-batch-size"),
        (["zero_infinity", "--save-every", "5", "--save-async"], "the state on disk would have to fit into memory"),
    ],
)
def test_refused_before_anything_is_submitted(words, expected, refused):
    recipe, *own = words
    assert expected in refused(["submit", recipe, *RUN, "--dry-run", *own])


def test_without_slurm_it_says_so(tmp_path, monkeypatch, refused):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch, on this machine" in refused(["submit", "ddp", "--nodes", "2", *RUN])


def test_what_sbatch_refuses_is_one_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: q' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["submit", "ddp", "--nodes", "2", "--partition", "q", *RUN]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sbatch refuses the job (invalid partition specified: q), in sbatch --parsable" in line


def test_techniques_are_runs_of_one_device_at_equal_data(monkeypatch, tmp_path, capsys):
    runs = []
    monkeypatch.setattr("gptscale.launchers.run.start.start", lambda *words: runs.append(words) or 0)
    monkeypatch.setattr("gptscale.results.comparison.write.write_comparison", lambda *folders: None)
    for name in ("begin_warm_parent", "make_warm_parents", "wait_for_warm_parents"):
        monkeypatch.setattr(sweep, name, lambda *words, **options: None)
    assert main(["sweep", "--techniques", "--data", "synthetic", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert [(recipe, nproc) for recipe, _, _, nproc in runs] == [(recipe, 1) for recipe, _ in sweep.TECHNIQUES.values()]
    assert {config.global_batch_size for _, config, _, _ in runs} == {8}
    assert [config.grad_accum_steps for _, config, _, _ in runs if config.grad_accum_steps] == [4]


def test_a_sweep_is_an_array_with_a_run_in_each_task(capsys):
    text = script(capsys, "--submit", "--recipes", "single,ddp", "--nodes", "2", "--time", "5", *RUN, command="sweep")
    assert "#SBATCH --array=0-1\n" in text
    assert "#SBATCH --time=5\n" in text
    assert "folder=results/runs/mine-single-0" in text
    assert "folder=results/runs/mine-ddp-0" in text
    assert main(["sweep", "--recipes", "single", "--nodes", "2"]) == 2
    assert "the runs stay on this machine, in --nodes" in capsys.readouterr().err


@pytest.mark.promise("P19")
def test_a_killed_rank_0_gets_its_row_once(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    monkeypatch.setenv("GPTSCALE_START", "7.1")
    (folder / "run.json").write_text(json.dumps({"start": "7.0", "identity": {"run_id": "r"}}))
    assert after_ranks.main(folder, 137) == 1
    assert not (tmp_path / "summary.csv").exists()
    (folder / "run.json").write_text(json.dumps({"start": "7.1", "identity": {"run_id": "r"}}))
    assert after_ranks.main(folder, 137) == 1
    assert (
        ",r,,failed,ended with status 137 before it could leave its own row," in (tmp_path / "summary.csv").read_text()
    )
    (folder / "status.json").write_text(json.dumps({"start": "7.1"}))
    assert after_ranks.main(folder, 137) == 1
    assert (tmp_path / "summary.csv").read_text().count("failed") == 1
    # All steps were done, and the job is not to go back into the queue.
    row = {"run_id": "r", "status": "ok", "error": ""}
    (folder / "status.json").write_text(json.dumps({"start": "7.1", "status": "ok", "step": 4, "row": row}))
    assert after_ranks.main(folder, 137) == 0
    assert (tmp_path / "summary.csv").read_text().count(",r,,ok,") == 1
