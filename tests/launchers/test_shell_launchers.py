"""The shell launchers as far as their dry runs, and the command of one of them for real."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).parents[2] / "launchers"
OPTIONS = ["--model", "1.6b", "--run-name", "a run;rm"]


def shell(*words, **environment):
    command = ["bash", *map(str, words)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=400, check=False
    )


def dry(*words, **environment):
    ended = shell(*words, **environment)
    assert ended.returncode == 0, ended.stderr
    return shlex.split(ended.stdout)


def test_one_node():
    assert dry(LAUNCHERS / "multinode.sh", "--dry-run", "--nproc", "4", "fsdp", *OPTIONS) == [
        *"torchrun --standalone --nproc-per-node 4 -m gptscale.recipes fsdp".split(),
        *OPTIONS,
    ]
    assert "gpu" in dry(LAUNCHERS / "multinode.sh", "--dry-run", "ddp")


def test_several_nodes():
    own = "--dry-run --nodes 2 --endpoint node7 --nproc 8 fsdp".split()
    words = dry(LAUNCHERS / "multinode.sh", *own, *OPTIONS)
    assert words == [
        *"torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node7:29400 --rdzv-id gptscale --nproc-per-node 8".split(),
        *"-m gptscale.recipes fsdp".split(),
        *OPTIONS,
    ]


@pytest.mark.parametrize("words", ["", "--speed", "--nodes 2 fsdp", "--endpoint node7 fsdp", "--nodes"])
def test_misuse_is_told(words):
    ended = shell(LAUNCHERS / "multinode.sh", *words.split())
    assert ended.returncode in (1, 2)
    assert ended.stderr
    assert not ended.stdout


@pytest.mark.slow
def test_two_nodes_on_one_machine(tmp_path, free_port):
    """Two torchruns of one process each meet at an endpoint and train together."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", LAUNCHERS / "multinode.sh", "--nodes", "2", "--endpoint", f"localhost:{free_port}", "--nproc", "1", "ddp",
               "--steps", "2", "--data", "synthetic", "--out", tmp_path, "--device", "cpu"]  # fmt: skip
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [node.communicate(timeout=400) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("step 2/2  loss" in out for out, _ in said) == 1
