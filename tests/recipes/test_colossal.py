"""Colossal-AI's recipes in their own environment, compared with one process in this one, and what passes between the two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from worlds import Started, assert_same_state, command, deviation, ok, ranks, rows, steps

from gptscale.common.errors import ConfigError
from gptscale.common.process import environments
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.launchers import cli
from gptscale.launchers.commands.doctor import environment
from gptscale.launchers.commands.parity import weight_deviation
from gptscale.launchers.run.preflight import why_not_here
from gptscale.recipes import get

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TOLERANCE = 1e-5
LACK = None if environments.is_inside("colossalai") else why_not_here("colossal_tensor")
needs_colossalai = pytest.mark.skipif(LACK is not None, reason=str(LACK))


def there(*words):
    """Run a command in Colossal-AI's environment, whose warm parent serves all such commands."""
    ok(*words, environment="colossalai")


WORK = "--steps 20 --global-batch-size 16 --grad-accum-steps 4 --seq-len 32".split()
WORK += "--optimizer sgd --lr 0.1 --warmup-steps 2 --save-last".split()
# The further steps of a verdict would be a third of the work. One split has them.
PLAIN = "--no-verdict"
# Tensor ranks wait for each other in every micro-batch, so they have half as many.
TWO = ["--grad-accum-steps", "2"]
SPLITS = {
    "tp 4": ("colossal_tensor", 4, [*TWO, PLAIN]),
    "dp 2 x tp 2": ("colossal_tensor", 4, ["--tp-size", "2", *TWO, PLAIN]),
    "pp 2, interleaved": ("colossal_pipeline", 2, ["--schedule", "interleaved", PLAIN]),
    "tp 2 x pp 2": ("colossal_pipeline", 4, ["--tp-size", "2", PLAIN]),
    "dp 2 x pp 2": ("colossal_pipeline", 4, ["--pp-size", "2"]),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    ok("run", "single", *WORK, PLAIN, "--out", out, "--run-name", "one")
    return out / "runs" / "one"


@needs_colossalai
@pytest.mark.parametrize("split", SPLITS)
def test_computes_what_one_process_computes(split, one_process, tmp_path):
    """Compare losses, gradient norms and final weights of 20 steps of SGD with accumulation and clipping, and the row."""
    recipe, nproc, options = SPLITS[split]
    there("run", recipe, "--nproc", nproc, *WORK, *options, "--out", tmp_path, "--run-name", "r")
    found, one = steps(tmp_path / "runs" / "r"), steps(one_process)
    assert (one.grad_norm > 1).any()
    assert deviation(found, one, "loss", "grad_norm") <= TOLERANCE
    assert 0 < weight_deviation(one_process, tmp_path / "runs" / "r") <= TOLERANCE
    (row,), (its,) = rows(tmp_path / "summary.csv"), rows(one_process.parents[1] / "summary.csv")
    assert list(row) == list(its)
    assert (row["engine"], row["engine_version"], row["status"]) == ("colossalai", "0.5.0", "ok")
    assert row["torch_version"].startswith("2.5.1")
    assert row["workload_hash"] == its["workload_hash"]
    sizes = {axis: int(row[f"{axis}_size"]) for axis in ("dp", "tp", "pp")}
    said = dict(pair.split() for pair in split.split(",")[0].split(" x "))
    assert sizes == {"dp": 1, "tp": 1, "pp": 1} | {axis: int(size) for axis, size in said.items()}
    assert bool(row["bubble_fraction"]) == (sizes["pp"] > 1)


LONG = "--steps 8 --seq-len 32 --save-every 4 --dropout 0.1 --data synthetic --grad-accum-steps 2 --global-batch-size 8".split()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run 8 steps with dropout and checkpoints at 4 and 8, in one process and in tp 2 x pp 2."""
    out = tmp_path_factory.mktemp("saved")
    ok("run", "single", *LONG, "--out", out, "--run-name", "single")
    there("run", "colossal_pipeline", "--nproc", 4, "--tp-size", 2, *LONG, "--out", out, "--run-name", "colossal")
    return out / "runs"


@needs_colossalai
@pytest.mark.timeout(900)
def test_resume_is_bit_identical(saved, tmp_path):
    options = ["--nproc", 4, "--tp-size", 2, *LONG, "--out", tmp_path, "--run-name", "again"]
    there("run", "colossal_pipeline", *options, "--resume", saved / "colossal" / "checkpoints" / "step-4")
    whole, again = steps(saved / "colossal"), steps(tmp_path / "runs" / "again")
    assert whole.loc[5:, ["loss", "grad_norm", "lr"]].equals(again[["loss", "grad_norm", "lr"]])
    assert_same_state(*(run / "checkpoints" / "step-8" for run in (saved / "colossal", tmp_path / "runs" / "again")))


MOVES = {
    "tp 2 x pp 2": ("colossal_pipeline", 4, ["--tp-size", "2", "--grad-accum-steps", "2"]),
    "pp 2, interleaved": ("colossal_pipeline", 2, ["--schedule", "interleaved", "--grad-accum-steps", "2"]),
    "dp 2 x tp 2": ("colossal_tensor", 4, ["--tp-size", "2"]),
}


@needs_colossalai
@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", MOVES)
def test_state_comes_in_and_goes_out_without_a_changed_bit(split, saved, tmp_path):
    """Load one process's state into each split and save it again.

    Streams of dropout and bytes of state are checked too, and that a step that is not finite changes nothing.
    """
    recipe, nproc, options = MOVES[split]
    source = saved / "single" / "checkpoints" / "step-4"
    ranks("world_colossal.py", nproc, recipe, tmp_path, source, *options, environment="colossalai")
    assert_same_state(tmp_path / "again" / "step-4", source)
    found = [json.loads((tmp_path / f"rank{r}" / "found.json").read_text()) for r in range(nproc)]
    assert all(f["moved by building"] and not f["moved by sick steps"] for f in found)
    assert len({f["eval"] for f in found}) == 1
    gpt = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=257)
    tp, pp = found[0]["tp"], found[0]["pp"]
    for rank, f in enumerate(found):
        assert f["parameters"] == parameters_of(gpt, tp, pp, rank // tp % pp)
        assert f["bytes"] == 12 * f["parameters"]
    for rank, f in enumerate(found):
        for other, g in enumerate(found):
            same_stage_and_data = rank // tp == other // tp
            # Tensor ranks hold the same residual stream.
            assert (f["rest"] == g["rest"]) == same_stage_and_data
            if rank != other and tp > 1:
                # They have heads of their own.
                assert f["attention"] != g["attention"]


def parameters_of(gpt, tp, pp, stage):
    """Count a rank's parameters.

    Matrices of its blocks and biases of column-cut ones are cut over t, the rest is whole, and the table is on both ends.
    """
    h = gpt.n_embd
    block = (12 * h * h + 7 * h) // tp + 6 * h
    ends = gpt.padded_vocab_size * h // tp
    first, last = ends + gpt.block_size * h, (ends if pp > 1 else 0) + 2 * h
    return gpt.n_layer // pp * block + (first if stage == 0 else 0) + (last if stage == pp - 1 else 0)


@needs_colossalai
@pytest.mark.timeout(900)
def test_state_goes_on_in_one_process(saved, tmp_path):
    source = saved / "colossal" / "checkpoints" / "step-4"
    ranks("world_reload.py", 1, "single", tmp_path, source)
    assert_same_state(tmp_path / "colossal" / "step-4", source)


@needs_colossalai
def test_both_environments_start_from_the_same_weights(tmp_path):
    """Compare them bit for bit after a step at rate 0, which leaves weights as they were made."""
    work = [*"--steps 1 --lr 0 --optimizer sgd --save-last --seq-len 32 --n-layer 2 --out".split(), tmp_path]
    ok("run", "single", *work, "--run-name", "one")
    there("run", "colossal_tensor", "--nproc", 2, *work, "--run-name", "two")
    assert_same_state(*(tmp_path / "runs" / name / "checkpoints" / "step-1" for name in ("one", "two")))


CASES = {
    "heads": (["colossal_tensor", "--nproc", "3"], "cannot be cut over 3 tensor ranks, in --tp-size, use 1 or 2 or 4"),
    "blocks": (["colossal_pipeline", "--nproc", "5"], "4 blocks are too few for 5 stages, in --pp-size, use at most 4"),
    "chunks": (
        "colossal_pipeline --nproc 2 --schedule interleaved --num-model-chunks 3".split(),
        "4 blocks are too few for 2 stages of 3 chunks, in --pp-size, use --n-layer 6 or more",
    ),
    "too few micro-batches": (
        "colossal_pipeline --nproc 4 --grad-accum-steps 2 --global-batch-size 8".split(),
        "1f1b on 4 stages takes 4 or more micro-batches, not 2, in --grad-accum-steps, use 4 or 8",
    ),
    "uneven rounds": (
        "colossal_pipeline --nproc 2 --schedule interleaved --grad-accum-steps 3 --global-batch-size 12".split(),
        "interleaved on 2 stages takes a multiple of 2 micro-batches, not 3, in --grad-accum-steps, use 2 or 4 or 6 or 12",
    ),
    "unknown schedule": ("colossal_pipeline --nproc 2 --schedule gpipe".split(), "gpipe"),
    "dropout recomputed": (
        "colossal_tensor --nproc 2 --dropout 0.1 --activation-checkpointing full".split(),
        "drops other elements when a block is recomputed",
    ),
    "no GPU": (["colossal_zero", "--nproc", "2", "--device", "cpu"], "colossal_zero needs a CUDA device"),
    "no GPU for Gemini": (["colossal_gemini", "--device", "cpu"], "colossal_gemini needs a CUDA device"),
    "compile": (["colossal_tensor", "--compile"], "colossal_tensor does not work with compile True"),
    "fractions": (["colossal_gemini", "--offload-optim-frac", "2"], "offload_optim_frac 2.0 is out of range"),
}


@needs_colossalai
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line(case, refused):
    words, expected = CASES[case]
    assert expected in refused(["run", *words])


def test_without_its_environment_the_line_says_what_makes_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    assert cli.main(["run", "colossal_tensor"]) == 2
    said = capsys.readouterr().err
    where = tmp_path / "venv-colossalai"
    assert said == f"gptscale: error: the environment of colossalai is missing, at {where}, make colossalai\n"
    assert environment("colossalai")["colossalai"] is None
    packages = where / "lib" / "python3.11" / "site-packages" / "colossalai-0.4.9.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: colossalai\nVersion: 0.4.9\n")
    (where / "bin").mkdir()
    (where / "bin" / "python").touch()
    with pytest.raises(ConfigError, match=r"has colossalai 0\.4\.9, not 0\.5\.0"):
        get("colossal_zero").load()


@needs_colossalai
def test_dry_run_tells_the_command_with_its_interpreter(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main("run colossal_pipeline --nproc 4 --tp-size 2 --dry-run".split()) == 0
    starter = environments.folder("colossalai") / "bin" / "torchrun"
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"{starter} --standalone --nproc-per-node 4 -m gptscale.recipes colossal_pipeline" in line


@needs_colossalai
def test_a_killed_rank_ends_all_and_is_named(tmp_path):
    words = ["run", "colossal_pipeline", "--nproc", 2, "--steps", 100000, "--out", tmp_path, "--run-name", "long"]
    launcher = Started(command(*words))
    file = tmp_path / "runs" / "long" / "steps.csv"
    launcher.wait_for(lambda: file.exists() and file.read_text().count("\n") > 2)
    processes = launcher.ranks()
    processes[1].kill()
    status, _, err = launcher.ended()
    assert status == 7
    assert "rank 1 was killed by SIGKILL" in err
    assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=400)[1] == []
    assert [(row["status"], row["engine"]) for row in rows(tmp_path / "summary.csv")] == [("failed", "colossalai")]


@needs_colossalai
def test_ddp_runs_under_its_torch(one_process, tmp_path):
    there("run", "ddp", "--nproc", 2, *WORK, PLAIN, "--out", tmp_path, "--run-name", "r")
    found, one = steps(tmp_path / "runs" / "r"), steps(one_process)
    assert deviation(found, one, "loss") <= TOLERANCE


@needs_colossalai
@pytest.mark.timeout(800)
def test_common_runs_under_its_torch():
    # Without processes, whose forked ranks run in the tests above, without the fuzz, to which torch is all one, and without the
    # compiler and float8, which Colossal-AI's recipes refuse.
    others = "not fuzz and not compil and not float8"
    options = ["-q", "-p", "no:cacheprovider", "-m", "not world", "--ignore=tests/common/process", "-k", others]
    words = [environments.python("colossalai"), "-m", "pytest", *options, "tests/common"]
    ended = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=780, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " failed" not in ended.stdout.splitlines()[-1]
