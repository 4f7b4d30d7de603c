"""The script for sbatch: what its words are once bash has read them, for one run and for each task of an array."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from machines import wait_for

from gptscale.launchers.cli import main
from gptscale.launchers.cluster.batch_script import JobTask, batch_script
from gptscale.launchers.cluster.node_check import problems, slow_ones

NASTY = 'it\'s $HOME; `true` "x" *'


def assigned(script, **environment):
    """Return the variables after the assignments of a script, which end where the ranks begin."""
    head = script.partition("# The ranks meet")[0]
    show = 'printf "%s\\0" "$folder" "$nodes" "$per_node" "${command[@]}"'
    ended = subprocess.run(
        ["bash", "-euc", head + show], env=environment, capture_output=True, text=True, timeout=20, check=True
    )
    folder, nodes, per_node, *command = ended.stdout.split("\0")[:-1]
    return Path(folder), nodes, per_node, command


def test_words_arrive_as_they_were_given():
    command = ["python", "-m", "gptscale.recipes", "ddp", "--run-name", NASTY]
    script = batch_script(["--job-name=a b"], [JobTask(Path(NASTY), command, 4)], NASTY, "/a b/python", requeue=False)
    assert assigned(script, SLURM_JOB_NUM_NODES="3") == (Path(NASTY), "3", "4", command)
    assert "#SBATCH '--job-name=a b'" in script.splitlines()
    assert "'/a b/python' -m gptscale.launchers.cluster.after_ranks" in script
    # Python's format leaves these behind where a brace was not doubled.
    assert "{{" not in script
    assert "}}" not in script


def test_each_task_of_an_array_has_a_run_of_its_own():
    tasks = [JobTask(Path("runs/a"), ["one", "rank"], 1, nodes=1), JobTask(Path("runs/b"), ["many"], 8)]
    script = batch_script([], tasks, "a sweep", "python", requeue=False)
    found = [assigned(script, SLURM_ARRAY_TASK_ID=number, SLURM_JOB_NUM_NODES="2") for number in "01"]
    assert found == [(Path("runs/a"), "1", "1", ["one", "rank"]), (Path("runs/b"), "2", "8", ["many"])]


PROGRAMS = {
    "squeue": "echo RUNNING",
    # The ranks end before it does: their status must not be lost.
    "scancel": 'kill -TERM "$(cat ranks)"; sleep 0.5',
    "scontrol": '[[ $1 == show ]] && echo node || echo "$@" >> requeued',
    "srun": 'trap "exit 75" TERM; echo $$ > new; mv new ranks; while :; do sleep 0.1; done',
}


@pytest.mark.parametrize(
    ("refused", "answer"),
    [
        ("squeue", "exit 1"),
        ("scontrol", "exit 1"),
        ("squeue", "exec sleep 600"),
        # Slurm has not yet heard that the job has its SIGCONT, which comes before a warning.
        ("squeue", "echo SIGNALING && exit"),
    ],
)
def test_a_warning_is_handed_on_whatever_the_controller_answers_first(refused, answer, tmp_path):
    """Otherwise the ranks would never hear of a warning, or the job would not go back into the queue."""
    for name, does in PROGRAMS.items():
        once = f"[[ -e ranks ]] && ! [[ -e {name}.asked ]] && touch {name}.asked && {answer}" if name == refused else ""
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{once}\n{does}\n")
        (tmp_path / name).chmod(0o755)
    script = batch_script([], [JobTask(Path("f"), ["c"], 1)], "about", "false", requeue=True)
    job = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"},
        start_new_session=True,
    )
    try:
        wait_for((tmp_path / "ranks").exists, "the ranks")
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 75
    finally:
        # With the ranks, which would stand in for ever where the warning does not reach them.
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert (tmp_path / f"{refused}.asked").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


NODE = {"torch": "2.11.0", "python": "3.11.7", "folder": "", "clock_ahead_s": 0.0, "product_tflops": 1.0}


def test_each_fault_names_its_node():
    nodes = [NODE | {"host": f"n{i}", "link_gib_per_s": 4.0 if i else 0.0} for i in range(4)]
    assert problems(nodes) + slow_ones(nodes) == []
    nodes[1] |= {"torch": "2.10.0", "clock_ahead_s": -3.0}
    nodes[2] |= {"folder": "sees 3 of 4 files in results, which is not shared", "product_tflops": 0.5}
    nodes[3] |= {"link_gib_per_s": 1.0}
    assert problems(nodes) + slow_ones(nodes) == [
        "torch differs: 2.11.0 on n0, n2, n3; 2.10.0 on n1",
        "n2 sees 3 of 4 files in results, which is not shared",
        "the clock of n1 is -3.0 s from that of n0",
        "n2 is slow: 0.50 of the usual 1.00 TFLOP/s",
        "n3 is slow: 1.00 of the usual 4.00 GiB/s",
    ]


def test_outside_an_allocation_it_says_what_to_type(capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["doctor", "--nodes"]) == 2
    assert "salloc --nodes 2 gptscale doctor --nodes" in capsys.readouterr().err
