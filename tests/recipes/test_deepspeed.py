"""DeepSpeed's own launcher and its own checkpoints."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worlds import deviation, gptscale, imports_of, ok, ranks, rows, steps

from gptscale.common.process.program import Program
from gptscale.common.process.task import run_captured
from gptscale.launchers.run.preflight import why_not_here

pytest.importorskip("deepspeed")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
WORK = ["--data", "synthetic", "--no-tensorboard"]
SMALL = ["--n-layer", 2, "--seq-len", 32]


def deepspeed(*words):
    """Run DeepSpeed's launcher, which is forked and starts all that it starts afresh."""
    program = Program("deepspeed.launcher.runner", tuple(map(str, words)), imports=imports_of(("zero3",), ""))
    return run_captured(program, timeout=400, environ=ENVIRONMENT)


def test_one_node(tmp_path, free_port):
    launcher = ["--num_gpus", 2, "--master_port", free_port, "--no_local_rank", "--module"]
    ended = deepspeed(*launcher, "gptscale.recipes.zero", "--stage", 3, "--steps", 3, "--out", tmp_path, *WORK, *SMALL)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "step 3/3  loss" in ended.stdout
    (row,) = rows(tmp_path / "summary.csv")
    assert (row["recipe"], row["world_size"], row["status"]) == ("zero3", "2", "ok")


def test_two_nodes_by_hostfile(tmp_path, free_port):
    """Start each of two nodes by itself (--no_ssh), both on this machine."""
    if reason := why_not_here("zero_infinity"):
        pytest.skip(reason)
    (tmp_path / "hostfile").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    common = ["--hostfile", tmp_path / "hostfile", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", free_port]
    run = ["--no_local_rank", "--module", "gptscale.recipes", "zero_infinity", "--steps", 3, *WORK, *SMALL]
    with ThreadPoolExecutor() as pool:
        nodes = list(pool.map(lambda node: deepspeed(*common, "--node_rank", node, *run, "--out", tmp_path), (0, 1)))
    assert [node.returncode for node in nodes] == [0, 0], nodes[0].stdout[-3000:] + nodes[0].stderr[-3000:]
    assert [(row["world_size"], row["status"]) for row in rows(tmp_path / "summary.csv")] == [("2", "ok")]
    assert not list(tmp_path.glob("gptscale-swap-*"))


@pytest.mark.parametrize("recipe", ["zero1", "zero3"])
def test_its_own_checkpoint_is_read_when_trusted_and_the_run_goes_on(recipe, tmp_path):
    """Go on for 3 steps from what save_checkpoint left after 3 steps, and compare with a run that never stopped."""
    ranks("world_deepspeeds_own.py", 2, recipe, tmp_path, *SMALL)
    step = tmp_path / "own" / (tmp_path / "own" / "latest").read_text()
    subprocess.run(["bash", "-c", "sha256sum * > SHA256SUMS && chmod 600 SHA256SUMS"], cwd=step, check=True)
    words = ["--nproc", 2, "--steps", 6, "--out", tmp_path, *WORK, *SMALL]
    resume = ["--resume", tmp_path / "own", "--trust-checkpoint"]
    for name, options in (("whole", []), ("rest", resume)):
        ok("run", recipe, *words, "--run-name", name, *options)
    whole, rest = (steps(tmp_path / "runs" / n) for n in ("whole", "rest"))
    assert list(rest.index) == [4, 5, 6]
    assert deviation(whole.loc[4:], rest, "loss", "grad_norm") <= 1e-6
    ended = gptscale("run", "ddp", *words, *resume)
    assert ended.returncode == 2
    assert "this recipe reads no checkpoint of DeepSpeed's" in ended.stderr


@pytest.mark.parametrize(("n_embd", "n_layer"), [(1024, 1), (512, 2)])
def test_zero_infinity_with_few_ids_and_few_layers(n_embd, n_layer, tmp_path):
    """The largest weight is one of the MLP and fits the buffers, or weights are read ahead that could still lie in one."""
    if reason := why_not_here("zero_infinity"):
        pytest.skip(reason)
    words = ["--n-embd", n_embd, "--n-layer", n_layer, "--seq-len", 16, "--global-batch-size", 2, "--steps", 2, *WORK]
    losses = []
    for recipe, nproc in (("single", 1), ("zero_infinity", 2)):
        ok("run", recipe, "--nproc", nproc, *words, "--no-verdict", "--out", tmp_path, "--run-name", recipe)
        losses.append(steps(tmp_path / "runs" / recipe).loss)
    assert losses[1].tolist() == pytest.approx(losses[0].tolist(), rel=1e-5)
