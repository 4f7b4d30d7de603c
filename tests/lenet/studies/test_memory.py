"""The memory picture's categories agree with arithmetic, and their sum with the allocator's count."""

import pandas as pd
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gptscale.common.engine import Batch
from gptscale.launchers.cli import main
from gptscale.lenet.data.loader import FastLoader
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import ready_run, world_from_environment
from gptscale.lenet.studies.memory import CATEGORIES, VisionMemoryOptions, allocator_history, take_steps
from gptscale.lenet.studies.memory_account import StorageAccount

BATCH, STEPS = 32, 2
# Numbers that torch wraps are tensors of 8 bytes, which no operator returns.
WRAPPED_BYTES = 200


@pytest.fixture(autouse=True)
def _needs_digits():
    pytest.importorskip("sklearn")


def planned(device="cpu", **options):
    config = VisionMemoryOptions(batch_size=BATCH, device=device, **options).config()
    return ready_run(config, world_from_environment(config))


def ends(account, step=STEPS):
    """Return live bytes at the end of each phase of a step."""
    rows = step_of(account, step)
    ends = rows.groupby("phase", sort=False).tail(1)
    return {row.phase: row for _, row in ends.iterrows()} | {"peak": rows.loc[rows.live_bytes.idxmax()]}


def step_of(account, step=STEPS):
    timeline = account.timeline()
    return timeline[timeline.step == step]


def taken(ready):
    account = StorageAccount(ready.world.device)
    take_steps(ready, STEPS, account)
    return account


@pytest.mark.parametrize(("model", "optimizer"), [("lenet", "adam"), ("cnn", "adamw"), ("cnn", "sgd")])
def test_categories_are_what_arithmetic_says(model, optimizer):
    ready = planned(model=model, optimizer=optimizer)
    at = ends(taken(ready))
    parameters = list(VisionEngine(ready.config, ready.shape, ready.world).module.parameters())
    n = sum(p.numel() for p in parameters)
    # Adam also keeps a count of steps for each parameter.
    state = 4 * n if optimizer == "sgd" else 8 * n + 4 * len(parameters)
    assert list(at) == ["loading", "forward", "backward", "optimizer", "peak"]
    for row in at.values():
        assert row.weights == 4 * n
        assert row["optimizer state"] == state
        assert row.live_bytes == sum(row[category] for category in CATEGORIES)
    assert [at[phase].gradients for phase in ("loading", "forward", "backward", "optimizer")] == [0, 0, 4 * n, 0]
    assert [at[phase].activations for phase in ("loading", "backward", "optimizer")] == [0, 0, 0]
    assert at["forward"].activations > 0
    assert at["peak"].live_bytes >= max(row.live_bytes for row in at.values())


def test_activations_of_lenet_by_hand():
    """Add up every tensor that backward needs. torch keeps the places of the maxima as int64, twice the size of the maxima."""
    # Pooling keeps the first convolution's result, only for its shape.
    per_image = 4 * 6 * 28 * 28
    # ReLU's result and the places of the maxima.
    per_image += (4 + 8) * 6 * 14 * 14
    # The same of the second convolution.
    per_image += 4 * 16 * 10 * 10 + (4 + 8) * 16 * 5 * 5
    # The flattened result is a copy, since channels lie together.
    per_image += 4 * 400
    # ReLU, ReLU and log-softmax.
    per_image += 4 * 120 + 4 * 84 + 4 * 10
    # The 4 bytes are the sum of the loss's weights.
    assert ends(taken(planned()))["forward"].activations == BATCH * per_image + 4


class ProfiledAccount(StorageAccount):
    """An account that writes its count into the profiler's timeline after every operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        with record_function(f"counted {self.live_bytes}"):
            return result


@pytest.mark.parametrize("options", [{}, {"model": "cnn"}, {"model": "cnn", "precision": "bf16"}])
def test_the_sum_is_what_the_cpu_allocator_counts(options):
    """torch's profiler gets every allocation and release from the allocator. It must have the same bytes after every operator."""
    ready = planned(**options)
    account = ProfiledAccount(ready.world.device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        take_steps(ready, STEPS, account)
    allocator, apart = 0, []
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            allocator += event.nbytes()
        elif event.name().startswith("counted"):
            apart.append(int(event.name().split()[1]) - allocator)
    # The data set was there before the profiler.
    steps = apart[apart.index(apart[-1]) :]
    assert len(steps) > 0.6 * len(apart) > 60
    assert max(steps) - min(steps) <= WRAPPED_BYTES < account.live_bytes / 1000


def test_watching_changes_nothing(monkeypatch):
    ready, plain, watched = planned(model="cnn"), VisionEngine.train_step, []

    def told(*args):
        result = plain(*args)
        watched.append(result.loss.item())
        return result

    engine = VisionEngine(ready.config, ready.shape, ready.world)
    batches = FastLoader(ready.data.train, ready.batch_order, ready.normalise(), "none").epoch(0)
    losses = [engine.train_step(Batch(step, *next(batches)), 1e-3).loss.item() for step in range(STEPS)]
    monkeypatch.setattr(VisionEngine, "train_step", told)
    taken(ready)
    assert watched == losses


def test_the_command(tmp_path, capsys):
    files = {name: tmp_path / f"m.{name}" for name in ("png", "csv")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert main(["lenet", "memory", "--batch-size", "64", "--steps", "2", "--device", "cpu", *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("lenet on scikit-learn's handwritten digits")
    assert said[1].split()[:1] == ["MiB"]
    by_name = {line.split("  ")[0]: line.split()[-5:] for line in said[2:9]}
    assert list(by_name) == [*CATEGORIES, "all"]
    # The weights have 246,824 bytes.
    assert by_name["weights"] == ["0.24"] * 5
    assert by_name["gradients"][2] == "0.24"
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    events = pd.read_csv(files["csv"])
    assert list(events) == "time_s step phase op storage change_bytes category live_bytes".split()
    assert (events.change_bytes.cumsum() == events.live_bytes).all()
    assert events.time_s.is_monotonic_increasing
    assert set(events.category) == set(CATEGORIES)
    assert sorted(set(events.step)) == [0, 1, 2]
    # Tensors that `hold` found were made before, and have no operator.
    assert events.op[events.change_bytes > 0].notna().mean() > 0.9


class ComparedAccount(StorageAccount):
    """An account that compares requested and rounded bytes with CUDA's allocator after every operator."""

    apart: list[tuple[int, int]]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        stats = torch.cuda.memory_stats()
        rounded = sum(-(-nbytes // 512) * 512 for nbytes in self._nbytes)
        asked, allocated = stats["requested_bytes.all.current"], stats["allocated_bytes.all.current"]
        if self._step == STEPS:
            self.apart.append((asked - self.live_bytes, allocated - rounded))
        return result


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_sum_is_what_cudas_allocator_counts(precision, tmp_path):
    """Except for what cuBLAS and cuDNN keep from the first step on. A block with up to 1 MiB too much is not split."""
    ready = planned("cuda", model="cnn", precision=precision)
    account = ComparedAccount(ready.world.device)
    account.apart = []
    torch.cuda.init()
    with allocator_history(tmp_path / "s.pickle"):
        take_steps(ready, STEPS, account)
    asked = [of_asked for of_asked, _ in account.apart]
    assert max(asked) - min(asked) <= WRAPPED_BYTES
    assert all(most >= least for least, most in account.apart)
    assert step_of(account).groupby("phase").allocated_bytes.last().gt(0).all()
    assert (tmp_path / "s.pickle").stat().st_size > 0
