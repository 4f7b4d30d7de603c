"""launchers/multinode.sh as far as its dry run. cluster/test_multinode.py runs it on two machines."""

import shlex
import subprocess
from pathlib import Path

import pytest

MULTINODE = Path(__file__).parents[2] / "launchers" / "multinode.sh"
OPTIONS = ["--model", "1.6b", "--run-name", "a run;rm"]
TWO_NODES = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node7:29400 --rdzv-id gptscale --nproc-per-node 8"


def multinode(*words):
    return subprocess.run(["bash", MULTINODE, *words], capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize(
    ("own", "torchruns"),
    [
        ("", "--standalone --nproc-per-node gpu"),
        ("--nproc 4", "--standalone --nproc-per-node 4"),
        ("--nodes 2 --endpoint node7 --nproc 8", TWO_NODES),
    ],
)
def test_it_starts_torchrun_on_one_node_or_several(own, torchruns):
    ended = multinode("--dry-run", *own.split(), "fsdp", *OPTIONS)
    command = ["torchrun", *torchruns.split(), "-m", "gptscale.recipes", "fsdp", *OPTIONS]
    assert shlex.split(ended.stdout) == command, ended.stderr


@pytest.mark.parametrize("words", ["", "--speed", "--nodes 2 fsdp", "--endpoint node7 fsdp", "--nodes"])
def test_misuse_is_told(words):
    ended = multinode(*words.split())
    assert ended.returncode in (1, 2)
    assert ended.stderr
    assert not ended.stdout
