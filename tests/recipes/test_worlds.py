"""Recipes in real worlds of gloo processes.

Starting a world costs most, so that each test asserts all that a world shows.
"""

import functools
import json
import os
import re
import shutil
import signal
import time

import psutil
import pytest
from machines import has_sigterm, suspend
from worlds import ENVIRONMENT, Started, assert_same_state, command, deviation, ok, ranks, rows, steps

from gptscale.common.checkpoint.reader import Reader, step_folders
from gptscale.common.process.program import Program
from gptscale.common.process.task import run_captured
from gptscale.launchers.run.preflight import why_not_here
from gptscale.recipes import RECIPES

TOLERANCE = 1e-5


SAVED = {"single": 1, "ddp": 2, "fsdp": 4, "zero1": 2, "zero2": 2, "zero3": 2, "zero_offload": 2, "zero_infinity": 2}
SAVED |= {"fairscale_sdp": 2, "accelerate_fsdp": 2, "lightning_fabric": 2}
SAVED |= {"tensor_parallel": 2, "context_parallel": 4, "pipeline": 2, "hybrid_3d": 4}
# Four ranks are dp 2 x tp 2, or dp 2 x cp 2, where a ring would have no dropout.
MESH = {"hybrid_3d": ["--tp-size", "2"], "context_parallel": ["--cp-size", "2", "--cp-style", "ulysses"]}
# As many blocks as a pipeline of two stages needs.
SMALL = ["--n-layer", "2"]
LONG = [*SMALL, "--steps", "8", "--save-every", "4", "--dropout", "0.1", "--data", "synthetic", "--seq-len", "32"]
LOOPBACK = {"127.0.0.1", "::1"}


def here(recipes):
    """Return those of the recipes that run here. zero_infinity lacks its library where libaio is missing."""
    return [recipe for recipe in recipes if not why_not_here(recipe)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run 8 steps of each recipe that runs here, with dropout and checkpoints at 4 and 8, and note what listens at each step."""
    out = tmp_path_factory.mktemp("saved")
    for recipe in here(SAVED):
        words = ["--nproc", SAVED[recipe], *MESH.get(recipe, []), *LONG, "--log-every", 1, "--out", out]
        run = Started(command("run", recipe, *words, "--run-name", recipe))
        listening = [run.listening() for line in run.stdout if line.startswith("step ")]
        status, _, err = run.ended()
        assert status == 0, err
        (out / f"{recipe}.json").write_text(json.dumps(listening))
    return out / "runs"


# The first test to ask makes the saved runs of all recipes.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", SAVED)
def test_resume_is_bit_identical(recipe, saved, tmp_path):
    """Compare losses, norms, final weights and optimizer state of a resumed run with one that never stopped."""
    resume = ["--run-name", "again", "--resume", saved / recipe / "checkpoints" / "step-4"]
    said = ok("run", recipe, "--nproc", SAVED[recipe], *MESH.get(recipe, []), *LONG, "--out", tmp_path, *resume)
    assert f"saved by {recipe} on {SAVED[recipe]}" in said.stdout
    whole, again = steps(saved / recipe), steps(tmp_path / "runs" / "again")
    assert list(again.index) == [5, 6, 7, 8]
    assert whole.loc[5:, ["tokens", "loss", "grad_norm", "lr"]].equals(again[["tokens", "loss", "grad_norm", "lr"]])
    assert_same_state(tmp_path / "runs" / "again" / "checkpoints" / "step-8", saved / recipe / "checkpoints" / "step-8")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["fsdp", "tensor_parallel", "pipeline"])
def test_resume_is_bit_identical_in_another_family_and_with_muon(recipe, tmp_path):
    work = ["--nproc", 2, "--model", "llama-tiny", "--optimizer", "muon", *LONG, "--out", tmp_path]
    ok("run", recipe, *work, "--run-name", "whole")
    whole = tmp_path / "runs" / "whole"
    ok("run", recipe, *work, "--run-name", "again", "--resume", whole / "checkpoints" / "step-4")
    again = tmp_path / "runs" / "again"
    assert steps(whole).loc[5:, ["loss", "grad_norm"]].equals(steps(again)[["loss", "grad_norm"]])
    assert_same_state(again / "checkpoints" / "step-8", whole / "checkpoints" / "step-8")


@pytest.mark.promise(
    "X10 | a rendezvous open to others, one byte to it, or junk in it | local ranks have no port; gloo's connections "
    "listen on the loopback alone; of torchrun's own port rank 0 warns; junk is an error in one line"
)
@pytest.mark.parametrize("recipe", SAVED)
def test_nothing_listens_off_the_loopback(recipe, saved):
    listening = json.loads((saved.parent / f"{recipe}.json").read_text())
    assert {address for addresses in listening for address in addresses} <= LOOPBACK
    # Gloo's own listener of each rank.
    assert max(map(len, listening)) >= SAVED[recipe] or recipe == "single"


# Whatever has no saved run above.
OTHERS = {name: ["run", name, "--nproc", 2, *SMALL, "--steps", 10**6] for name in RECIPES if name not in SAVED}
OTHERS["lenet"] = ["lenet", "train", "--nproc", 2, "--epochs", 10**4, "--device", "cpu"]


@pytest.mark.promise("X10")
@pytest.mark.parametrize("what", OTHERS)
def test_nothing_else_listens_off_the_loopback(what, tmp_path):
    if what in RECIPES and (reason := why_not_here(what)):
        pytest.skip(reason)
    run = Started(command(*OTHERS[what], "--no-tensorboard", "--out", tmp_path))
    assert any(line.startswith(("step ", "epoch ")) for line in run.stdout), run.ended()
    listening = run.listening()
    run.process.send_signal(signal.SIGKILL)
    run.ended()
    assert set(listening) <= LOOPBACK
    assert len(listening) >= 2


# One process reads what every recipe has saved. The others read each kind of layout, many on another number of ranks.
TARGETS = {"single": 1, "ddp": 4, "fsdp": 2, "fsdp_offload": 2, "zero1": 4, "zero2": 2, "zero3": 4, "zero_offload": 2}
TARGETS |= {"zero_infinity": 2, "fairscale_sdp": 4, "accelerate_fsdp": 2, "lightning_fabric": 2}
TARGETS |= {"tensor_parallel": 2, "context_parallel": 4, "pipeline": 2, "hybrid_3d": 4}
SOME = ("single", "fsdp", "zero2", "zero3", "hybrid_3d", "pipeline")


@pytest.mark.promise("C13 | another number of processes on resume | the state is cut anew without a changed bit")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", TARGETS)
def test_state_moves_between_recipes_and_world_sizes_without_a_changed_bit(recipe, saved, tmp_path):
    sources = [saved / name / "checkpoints" / "step-4" for name in here(SAVED if recipe == "single" else SOME)]
    ranks("world_reload.py", TARGETS[recipe], recipe, tmp_path, *sources, *SMALL, *MESH.get(recipe, []))
    for source in sources:
        assert_same_state(tmp_path / source.parents[1].name / "step-4", source)


SHORT = [*SMALL, "--seq-len", "32"]
# So wide that weights too are swapped to disk, of whatever number of blocks.
WIDE = ["--n-embd", "512", "--n-layer", "2", "--global-batch-size", "4", "--seq-len", "16"]
# Recipes with their processes. Each goes on from what the one before it has saved.
CHAINS = {
    "fsdp 2, context_parallel 4, zero3 2, tensor_parallel 2, pipeline 2, single 1": SHORT,
    "fsdp 2, tensor_parallel 2, pipeline 2, single 1": [*SHORT, "--optimizer=muon"],
    "ddp 2, zero_infinity 2, zero1 4, fairscale_sdp 2": WIDE,
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_in_another_recipe_and_in_another_again(chain, tmp_path):
    """Compare losses and norms, optimizer state included, with those of the first recipe as if it never stopped."""
    links, resume = [link.split() for link in chain.split(", ")], []
    last = 2 * len(links) + 2
    words = ["--steps", last, *"--save-every 2 --keep-checkpoints 9 --data synthetic --out".split(), tmp_path]
    for number, (recipe, nproc) in enumerate(links):
        ok("run", recipe, "--nproc", nproc, *words, *CHAINS[chain], "--run-name", recipe, *resume)
        run = tmp_path / "runs" / recipe
        found, done = steps(run), 2 * number
        if not number:
            whole = found
        assert list(found.index) == list(range(done + 1, last + 1))
        assert deviation(found, whole.loc[done + 1 :], "loss", "grad_norm") <= TOLERANCE
        resume = ["--resume", run / "checkpoints" / f"step-{done + 2}"]


SICK = {
    "loss": ["ddp", "fsdp", "zero1", "zero3", "zero_infinity", "fairscale_sdp", "lightning_fabric"],
    "gradient": ["ddp", "fsdp", "zero2", "zero3", "fairscale_sdp", "tensor_parallel", "hybrid_3d"],
}


@pytest.mark.promise("N1 | NaN on one rank | all stop before the optimizer, 6, the batch is named")
@pytest.mark.promise("N2 | Inf in a gradient | no weight changes, on any rank")
def test_nan_or_inf_on_one_rank_stops_all_before_the_optimizer(tmp_path):
    """The loss is NaN, which its sequences tell. Or only a gradient is Inf, so that the norm over all ranks tells."""
    cases = [f"{sick},{recipe}" for sick in SICK for recipe in here(SICK[sick])]
    ranks("world_nan.py", 2, tmp_path, *cases)
    for folder in (tmp_path / case / rank for case in cases for rank in ("rank0", "rank1")):
        error, sequences = (folder / "error").read_text(), re.escape((folder / "expected").read_text())
        of_loss = rf"loss nan.* at step 3 \(data rank 1, sequences {sequences}\)"
        of_gradient = r"loss \d+\.\d+, gradient norm (inf|nan), at step 3"
        assert re.match(of_loss if "loss" in folder.parent.name else of_gradient, error), (folder, error)
        assert (folder / "moved").read_text() == "", folder
    assert all(list(steps(tmp_path / case / "rank0").index) == [1, 2, 3] for case in cases)


def begun(out, recipe="ddp", *options):
    """Start a run on two ranks that would last minutes, and return it once it has saved, with its ranks' processes."""
    words = ["--nproc", 2, *SHORT, "--steps", 100000, "--save-every", 5, "--out", out, "--run-name", "long", *options]
    launcher = Started(command("run", recipe, *words))
    launcher.wait_for(lambda: step_folders(out / "runs" / "long" / "checkpoints"))
    return launcher, launcher.ranks()


@pytest.mark.promise(
    "P1 | SIGKILL of a rank in its forward | the others end within seconds and name it, 7; the run resumes to the bit"
)
@pytest.mark.promise("P4 | of rank 0 | as P1; the launcher writes the run's row")
@pytest.mark.parametrize(("recipe", "victim"), [("ddp", 0), ("tensor_parallel", 0), ("pipeline", 1), ("hybrid_3d", 1)])
def test_a_killed_rank_ends_all_leaves_a_row_and_the_run_resumes(recipe, victim, tmp_path):
    launcher, processes = begun(tmp_path, recipe)
    processes[victim].kill()
    status, _, err = launcher.ended()
    assert status == 7
    assert f"rank {victim} was killed by SIGKILL (last seen at step " in err
    assert re.search(rf"rank {1 - victim}: rank {victim} died or fell silent .* at step \d+ in [\w-]+, while", err), err
    assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=400)[1] == []
    (row,) = rows(tmp_path / "summary.csv")
    assert (row["status"], row["run_id"]) == ("failed", "long")
    last = Reader(step_folders(tmp_path / "runs" / "long" / "checkpoints")[0]).verify().step
    words = [*SHORT, "--steps", last + 3, "--save-every", 5, "--out", tmp_path, "--run-name", "long", "--resume"]
    ok("run", recipe, "--nproc", 2, *words)
    assert list(steps(tmp_path / "runs" / "long").index) == list(range(1, last + 4))


@pytest.mark.promise("P12 | SIGSTOP for longer than the timeout | the others name the rank, 7, it is killed")
@pytest.mark.parametrize("recipe", ["ddp", "fsdp"])
def test_a_stopped_rank_is_named_when_the_others_have_waited_long_enough(recipe, tmp_path):
    launcher, processes = begun(tmp_path, recipe, "--dist-timeout-s", 15)
    began = time.monotonic()
    processes[1].suspend()
    status, _, err = launcher.ended()
    assert status == 7, err
    assert time.monotonic() - began < 15 + 60
    said = r"rank 0: rank 1 died or fell silent .*, last seen \d\d s ago at step \d+ in [\w-]+, while rank 0"
    assert re.search(said, err)
    assert psutil.wait_procs(processes, timeout=400)[1] == []
    (row,) = rows(tmp_path / "summary.csv")
    assert row["error"].startswith("rank 1 died or fell silent")


@pytest.mark.promise(
    "P13 | SIGSTOP and SIGCONT within the timeout | the run goes on with the same bits; the slow rank is named, unless "
    "it was waiting for others when it was stopped"
)
@pytest.mark.promise("P17")
def test_a_rank_that_stands_still_for_a_while_is_named_and_changes_nothing(tmp_path, capfd):
    words = [*SHORT, "--steps", 48, "--data", "synthetic", "--no-verdict", "--device", "cpu", "--out", tmp_path]
    ranks("world_faulty.py", 2, "stopped", "ddp", *words, "--run-name", "paused")
    assert "rank 1 is slow" in capfd.readouterr().err
    ok("run", "ddp", "--nproc", 2, *words, "--run-name", "even")
    figures = ["tokens", "loss", "grad_norm", "lr"]
    assert steps(tmp_path / "runs" / "paused")[figures].equals(steps(tmp_path / "runs" / "even")[figures])


@pytest.mark.promise(
    "P9 | SIGTERM, or Ctrl-C, to the launcher | all ranks save the same step, 75 (Ctrl-C: 130); also during an "
    "evaluation and a save; before the first step one line"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_saves_and_exits_75(tmp_path, number):
    """A lost terminal sends SIGHUP to the launcher and to every rank at once. Ranks that stand meanwhile hear all at once too."""
    launcher, processes = begun(tmp_path)
    told = processes if number == signal.SIGHUP else []
    suspend(told)
    for process in told:
        process.send_signal(number)
    launcher.process.send_signal(number)
    for process in told:
        launcher.wait_for(functools.partial(has_sigterm, process))
        process.resume()
    assert launcher.ended()[0] == 75
    assert psutil.wait_procs(processes, timeout=400)[1] == []
    done = steps(tmp_path / "runs" / "long").index[-1]
    assert Reader(step_folders(tmp_path / "runs" / "long" / "checkpoints")[0]).verify().step == done
    assert [row["status"] for row in rows(tmp_path / "summary.csv")] == ["interrupted"]


@pytest.mark.timeout(1200)
def test_a_corrupt_checkpoint_falls_back_to_the_one_before(saved, tmp_path):
    shutil.copytree(saved / "single", tmp_path / "runs" / "r")
    newest = tmp_path / "runs" / "r" / "checkpoints" / "step-8"
    data = bytearray((newest / "rank-00000-0000.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "rank-00000-0000.safetensors").write_bytes(data)
    said = ok("run", "single", *LONG, "--out", tmp_path, "--run-name", "r", "--resume")
    assert "does not match its SHA-256" in said.stdout
    assert "set aside as step-8.corrupt" in said.stdout
    assert list(steps(tmp_path / "runs" / "r").index) == list(range(1, 9))
    assert_same_state(newest, saved / "single" / "checkpoints" / "step-8")


def test_torchrun_by_hand(tmp_path):
    words = [*SHORT, "--steps", "3", "--out", str(tmp_path)]
    own = ["--standalone", "--nproc-per-node", "2", "-m", "gptscale.recipes.fabric", *words]
    # torchrun itself is forked, and starts its ranks afresh.
    ended = run_captured(Program("torch.distributed.run", tuple(own)), timeout=600, environ=os.environ | ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "step 3/3  loss" in ended.stdout
    assert [row["status"] for row in rows(tmp_path / "summary.csv")] == ["ok"]
    (warning,) = (line for line in ended.stderr.splitlines() if line.startswith("gptscale: "))
    assert warning.startswith("gptscale: warning: torchrun lets every machine that reaches this one write to port ")


def test_offload_is_in_the_row(tmp_path):
    """Check the columns of bytes, bandwidth and waiting."""
    work = ["--nproc", 2, "--steps", 6, "--n-embd", 256, "--seq-len", 32, "--out", tmp_path]
    for recipe in here(["fsdp_offload", "zero_offload", "zero_infinity"]):
        ok("run", recipe, *work)
    found = {row["recipe"]: row for row in rows(tmp_path / "summary.csv")}
    # The parameters of the matrices, in GiB.
    n = 4 * 12 * 256**2 / 2**30
    for recipe in ("fsdp_offload", "zero_offload"):
        assert float(found[recipe]["offload_cpu_gib"]) == pytest.approx(12 * n / 2, rel=0.08)
    for recipe in ("zero_offload", "zero_infinity"):
        if recipe in found:
            assert 0 < float(found[recipe]["offload_wait_fraction"]) < 1
            assert float(found[recipe]["offload_cpu_gib"]) > 0
    if "zero_infinity" in found:
        row = found["zero_infinity"]
        assert float(row["offload_disk_gib"]) >= 12 * n
        assert float(row["offload_read_gib_per_s"]) > 0
        assert float(row["offload_write_gib_per_s"]) > 0


@pytest.mark.promise("C17")
def test_a_rank_whose_options_do_not_parse_says_it_though_it_is_not_rank_0(tmp_path, capfd):
    """Rank 0 waits for it, and could not know why it never comes."""
    ranks("world_faulty.py", 2, "own,1,--learning-rte,1", "ddp", "--device", "cpu", "--out", tmp_path, status=2)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "learning" in line]
    assert line.startswith("gptscale: error: rank 1: unknown option '--learning-rte', on the command line")
    assert not list(tmp_path.iterdir())


DIFFERING = {
    "ddp": "--micro-batch-size 2 --bucket-cap-mb 5.0 --activation-checkpointing full --save-every 2 --eval-every 2 --log-every 3",
    "lenet": "--log-every 3 --save-every 1 --loader dataloader",
}


@pytest.mark.promise(
    "C17 | ranks that were started differently | refused with every option in which they differ, before they connect; a "
    "rank that was refused alone tells the others why, at once"
)
@pytest.mark.parametrize("what", DIFFERING)
def test_ranks_that_differ_are_refused_with_every_option_in_which_they_do(what, tmp_path, capfd):
    """Before, some of them trained on unnoticed, hung or aborted. Each rank says the same, in one line."""
    own = DIFFERING[what].split()
    ranks("world_faulty.py", 2, ",".join(["own", "1", *own]), what, "--device", "cpu", "--out", tmp_path, status=2)
    lines = capfd.readouterr().err.splitlines()
    assert [line[: len("gptscale: error: rank 0")] for line in sorted(lines)] == [
        f"gptscale: error: rank {rank}" for rank in (0, 1)
    ]
    for option, value in zip(own[::2], own[1::2], strict=True):
        assert all(f"{option} is " in line and f"but {value} on rank 1" in line for line in lines), (option, lines)
    assert not list(tmp_path.iterdir())
