"""`gptscale lenet memory`: what fills the memory in one training step, as a table, a picture and a CSV of events.

The account by category is the same on a CPU and on CUDA. On CUDA, --snapshot adds the allocator's own history for
pytorch.org/memory_viz.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.process.begin import share_cores
from gptscale.common.settings.checks import check_output_file, check_range
from gptscale.common.settings.command_line import parse
from gptscale.lenet.comparison.tables import ROWS, Lines, finish, with_references
from gptscale.lenet.run.config import Precision, VisionConfig
from gptscale.lenet.studies.study import StudyFiles
from gptscale.results.render import DPI, subplots

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from gptscale.lenet.run.preflight import ReadyVisionRun
    from gptscale.lenet.studies.memory_account import StorageAccount

MIB = 2**20
# Most entries of the allocator's history. A step of resnet18 has some thousand.
HISTORY_ENTRIES = 100_000
# The colour of each category. `other` is what no other category has.
CATEGORIES = {
    "weights": "#0072B2", "optimizer state": "#56B4E9", "inputs": "#009E73", "gradients": "#F0E442",
    "activations": "#E69F00", "other": "#CCCCCC",
}  # fmt: skip


@dataclass(frozen=True)
class VisionMemoryOptions(StudyFiles):
    """The training step that is examined."""

    model: str = "lenet"
    """As in gptscale lenet train."""
    batch_size: int = 128
    """Images per step."""
    precision: Precision = "fp32"
    """As in gptscale lenet train: fp32 | tf32 | bf16 | fp16."""
    amp: bool = True
    """With bf16 and fp16: autocast, weights in fp32. --no-amp casts weights and images instead."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """adam | adamw | sgd (with momentum 0.9)."""
    steps: int = 3
    """Steps that are taken; the last is shown, when all is as it stays."""
    csv: Path | None = None
    """File for the events of all steps: every allocation and release with its time, phase, operator, category and bytes."""
    snapshot: Path | None = None
    """File for the history of CUDA's allocator, a pickle for pytorch.org/memory_viz."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.steps, 1, 1000, "steps")
        check_output_file(self.snapshot, "--snapshot")

    def config(self) -> VisionConfig:
        """Return the options of the run whose steps are taken."""
        names = "model data data_dir download batch_size precision amp optimizer device out".split()
        return VisionConfig(augment="none", study="memory", **{name: getattr(self, name) for name in names})


def main(argv: Sequence[str]) -> int:
    """Take the steps, print the table, write the files."""
    options = parse(VisionMemoryOptions, argv, prog="gptscale lenet memory", about="What fills the memory in a step.")
    # It imports torch, so not before the options are read.
    from gptscale.lenet.run.preflight import ready_run, world_from_environment
    from gptscale.lenet.studies.memory_account import StorageAccount

    config = options.config()
    world = world_from_environment(config)
    if world.world_size > 1:
        raise ConfigError("the account is of one process", "in the launch", "start it without torchrun")
    if options.snapshot is not None and world.device.type != "cuda":
        fix = "leave it out: the table, --png and --csv are the same on a CPU"
        raise ConfigError("the allocator's history is CUDA's", "in --snapshot", fix)
    ready = ready_run(config, world)
    share_cores()
    account = StorageAccount(world.device)
    with allocator_history(options.snapshot):
        take_steps(ready, options.steps, account)
    events = account.timeline()
    step, heading = events[events.step == options.steps], title(ready)
    print(f"{heading}: MiB alive in step {options.steps}")
    if options.csv:
        made = events[events.change_bytes != 0]
        made["time_s step phase op storage change_bytes category live_bytes".split()].to_csv(options.csv, index=False)
    peak = step.iloc[step.live_bytes.argmax()]
    # The report's figure, of lenet, counts CUDA's context and the allocator's reserve too.
    lines = with_references(table(step), ROWS["memory"] if options.model == "lenet" else [])
    notes, of_step = [heading, f"the peak is in {peak.phase}, at {peak.op}"], f"{heading}, step {options.steps}"
    written, png = [options.csv, options.snapshot], options.picture("memory")
    finish([lines], notes, options.md, png, lambda path: draw(step, of_step, path), written)
    return 0


def title(ready: ReadyVisionRun) -> str:
    """Return the title of the table and the picture: what is trained, and on which device."""
    from gptscale.common.measure.devices import device_name

    config, device = ready.config, device_name(ready.world.device)
    precision = config.precision if config.amp else f"{config.precision} without autocast"
    return f"{config.model} on {ready.data.name}, batch {config.batch_size}, {precision}, {config.optimizer}, {device}"


def take_steps(ready: ReadyVisionRun, steps: int, account: StorageAccount) -> None:
    """Build the model, load the images and take `steps` training steps, all of it under `account`."""
    from torch.autograd.graph import saved_tensors_hooks

    from gptscale.lenet.run.engine import VisionEngine
    from gptscale.lenet.run.loop import VisionBatches

    with account:
        engine, batches = VisionEngine(ready.config, ready.shape, ready.world), VisionBatches(ready)
        account.hold((batches.loader.images, batches.loader.labels), "inputs")  # type: ignore[union-attr]
        account.hold(engine.module.parameters(), "weights")
        for state in engine.optimizer.state.values():
            account.hold(state.values(), "optimizer state")
        for parameter in engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: account.hold([p.grad], "gradients"))
        plain_backward = engine.backward

        def backward(loss: Tensor) -> None:
            account.begin("backward")
            plain_backward(loss)
            account.begin("optimizer")

        engine.backward = backward
        account.begin("loading", 1)
        for step in range(steps):
            batch = batches.get(step)
            account.begin("forward")
            with saved_tensors_hooks(account.saved, lambda tensor: tensor):
                engine.train_step(batch, ready.config.lr)
            account.begin("loading", step + 2)


@contextmanager
def allocator_history(path: Path | None) -> Iterator[None]:
    """Record the history of CUDA's allocator with the callers' stacks and write it to `path`, or do nothing for None."""
    if path is None:
        yield
        return
    import torch

    torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def table(step: pd.DataFrame) -> Lines:
    """Return the lines of the table in MiB: one for each category and one for all, at each phase's end and at the peak.

    step: the rows of one step of an account's timeline. On CUDA the allocator's own count stands below.
    """

    def mib(n_bytes: float) -> str:
        return f"{n_bytes / MIB:,.2f}"

    ends = step.groupby("phase", sort=False).tail(1)
    at = {f"after {row.phase}": row for _, row in ends.iterrows()} | {"peak": step.iloc[step.live_bytes.argmax()]}
    names = [*zip(CATEGORIES, CATEGORIES, strict=True), ("all", "live_bytes")]
    rows = [{"MiB": name} | {when: mib(row[column]) for when, row in at.items()} for name, column in names]
    if ends.allocated_bytes.notna().all():
        counted = {f"after {row.phase}": mib(row.allocated_bytes) for _, row in ends.iterrows()}
        rows.append({"MiB": "CUDA's allocator"} | counted | {"peak": mib(ends.peak_allocated_bytes.iloc[-1])})
    return rows


def draw(step: pd.DataFrame, heading: str, path: Path) -> None:
    """Write a picture of the step: stacked areas of live bytes over the host's time, with the phases and the peak."""
    figure, ((axes,),) = subplots(1, 1, (12, 5), heading)
    ms = 1e3 * (step.time_s - step.time_s.iloc[0])
    heights = [step[name] / MIB for name in CATEGORIES]
    axes.stackplot(ms, heights, labels=CATEGORIES, colors=CATEGORIES.values(), step="post", linewidth=0)
    at, top, begin, last = ms[step.live_bytes.idxmax()], step.live_bytes.max() / MIB, 0.0, ms.iloc[-1]
    axes.plot(at, top, "k.")
    axes.annotate(f"peak {top:,.1f} MiB", (at, top), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    for index, row in step.groupby("phase", sort=False).tail(1).iterrows():
        end = ms[index]
        axes.axvline(end, color="black", linewidth=0.6)
        # A short phase, such as the loading of a batch that was prepared before, has no room for its name.
        if end - begin > 0.03 * last:
            middle, above = (begin + end) / 2, axes.get_xaxis_transform()
            axes.text(middle, 1.02, row.phase, ha="center", fontsize=8, transform=above)
        begin = end
    axes.set(xlabel="ms on the host", ylabel="MiB", xlim=(0, last), ylim=(0, 1.1 * top))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False, reverse=True)
    figure.savefig(path, dpi=DPI)
