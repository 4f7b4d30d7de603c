"""`gptscale lenet memory`: what fills the memory in one training step, as a table, a picture and a CSV of events.

The account by category is the same on a CPU and on CUDA. On CUDA, --snapshot adds the allocator's own history for
pytorch.org/memory_viz.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.process.begin import share_cores
from gptscale.common.settings.checks import check_output_file, check_range
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.needs import OptionNeed
from gptscale.lenet.comparison.reference_figures import LENET_WITH_ADAM
from gptscale.lenet.comparison.tables import show, with_references
from gptscale.lenet.run.config import TORCHVISION_NEED, Precision, VisionConfig
from gptscale.results.render import DPI, markdown, subplots

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from gptscale.lenet.run.engine import VisionEngine
    from gptscale.lenet.run.preflight import VisionPlan
    from gptscale.lenet.studies.memory_account import Mark, StorageAccount

MIB = 2**20
# Most entries of the allocator's history. A step of resnet18 has some thousand.
HISTORY_ENTRIES = 100_000
# colours of the categories, in their order
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#CCCCCC")


@dataclass(frozen=True)
class VisionMemoryOptions:
    """The training step that is examined."""

    model: str = "lenet"
    """As in gptscale lenet train."""
    data: str = "digits"
    """As in gptscale lenet train."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist and cifar10."""
    download: bool = False
    """Download mnist or cifar10 to --data-dir if it is not there."""
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when it is there."""
    out: Path = Path("results")
    """Folder for the picture, if --png names none."""
    png: Path | None = None
    """File for the picture; default memory.png in --out."""
    md: Path | None = None
    """File for the table in Markdown."""
    csv: Path | None = None
    """File for the events of all steps: every allocation and release with its time, phase, operator, category and bytes."""
    snapshot: Path | None = None
    """File for the history of CUDA's allocator, a pickle for pytorch.org/memory_viz."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (TORCHVISION_NEED,)

    def __post_init__(self) -> None:
        check_range(self.steps, 1, 1000, "steps")
        for name in ("png", "md", "csv", "snapshot"):
            check_output_file(getattr(self, name), f"--{name}")

    def config(self) -> VisionConfig:
        """Return the options of the run whose steps are taken."""
        names = "model data data_dir download batch_size precision amp optimizer device out".split()
        return VisionConfig(augment="none", study="memory", **{name: getattr(self, name) for name in names})


def main(argv: Sequence[str]) -> int:
    """Take the steps, print the table, write the files."""
    options = parse(VisionMemoryOptions, argv, prog="gptscale lenet memory", about="What fills the memory in a step.")
    # It imports torch, so not before the options are read.
    from gptscale.lenet.run.preflight import make_plan, world_from_environment
    from gptscale.lenet.studies.memory_account import CATEGORIES, StorageAccount

    config = options.config()
    world = world_from_environment(config)
    if world.world_size > 1:
        raise ConfigError("the account is of one process", "in the launch", "start it without torchrun")
    if options.snapshot is not None and world.device.type != "cuda":
        fix = "leave it out: the table, --png and --csv are the same on a CPU"
        raise ConfigError("the allocator's history is CUDA's", "in --snapshot", fix)
    plan = make_plan(config, world)
    share_cores()
    account = StorageAccount(world.device)
    with allocator_history(options.snapshot):
        take_steps(plan, options.steps, account)
    events = account.timeline()
    step, heading = StepView.of(account, events, options.steps), title(plan)
    print(f"{heading}: MiB alive in step {options.steps}")
    lines = with_references(table(step), reference_rows(options))
    where = f"the peak is in {step.peak.phase}, at {step.peak.op}"
    show(lines)
    print(where)
    if options.md:
        options.md.write_text(markdown(lines, left=["MiB"], notes=[heading, where]))
    if options.csv:
        events.drop(columns=list(CATEGORIES)).to_csv(options.csv, index=False)
    picture = options.png or options.out / "memory.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(step, f"{heading}, step {options.steps}", picture)
    for path in (options.csv, options.md, options.snapshot, picture):
        if path:
            print(f"wrote {path}")
    return 0


def title(plan: VisionPlan) -> str:
    """Return the title of the table and the picture: what is trained, and on which device."""
    from gptscale.common.measure.devices import device_name

    config = plan.config
    precision = config.precision if config.amp else f"{config.precision} without autocast"
    return (
        f"{config.model} on {plan.data.name}, batch {config.batch_size}, {precision}, {config.optimizer}, "
        f"{device_name(plan.world.device)}"
    )


def take_steps(plan: VisionPlan, steps: int, account: StorageAccount) -> None:
    """Build the model, load the images and take `steps` training steps, all of it under `account`."""
    from torch.autograd.graph import saved_tensors_hooks

    from gptscale.lenet.data.loader import FastLoader
    from gptscale.lenet.run.engine import VisionEngine

    with account:
        engine = VisionEngine(plan.config, plan.shape, plan.world)
        loader = FastLoader(plan.data.train, plan.batch_order, plan.normalise(), plan.config.augment)
        account.hold((loader.images, loader.labels), "inputs")
        watch(engine, account)
        account.begin("loading", 1)
        batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
        for step, (images, labels) in enumerate(itertools.islice(batches, steps)):
            account.begin("forward")
            with saved_tensors_hooks(account.saved, lambda tensor: tensor):
                engine.train_step(step, images, labels, plan.config.lr)
            account.begin("loading", step + 2)


def watch(engine: VisionEngine, account: StorageAccount) -> None:
    """Label the engine's tensors in the account, and let it know when backward and the optimizer begin."""
    account.hold(engine.module.parameters(), "weights")
    for state in engine.optimizer.state.values():
        account.hold(state.values(), "optimizer state")

    def hold_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        account.hold([parameter.grad], "gradients")

    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(hold_gradient)
    backward = engine.backward

    def backward_as_a_phase(loss: Tensor) -> None:
        account.begin("backward")
        backward(loss)
        account.begin("optimizer")

    engine.backward = backward_as_a_phase


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


@dataclass(frozen=True)
class StepView:
    """One step of an account.

    events: rows of the timeline with `ms`, milliseconds since the step began. The first row is the state before the step.
    """

    events: pd.DataFrame
    marks: list[Mark]
    began_s: float

    @classmethod
    def of(cls, account: StorageAccount, timeline: pd.DataFrame, step: int) -> StepView:
        """Return 1-based `step` of the account whose timeline is given."""
        first = next(i for i, mark in enumerate(account.marks) if mark.step == step)
        marks, before = [mark for mark in account.marks if mark.step == step], account.marks[first - 1]
        events = timeline.iloc[before.n_events - 1 : marks[-1].n_events]
        return cls(events.assign(ms=1e3 * (events.time_s - before.time_s).clip(lower=0)), marks, before.time_s)

    @property
    def peak(self) -> Any:
        """The row of the highest total."""
        return self.events.iloc[int(self.events.live_bytes.to_numpy().argmax())]

    def ends(self) -> Iterator[tuple[Mark, float, Any]]:
        """Yield each phase with the time of its end in ms and the last row before that."""
        for mark in self.marks:
            yield mark, 1e3 * (mark.time_s - self.began_s), self.events.loc[mark.n_events - 1]


def table(step: StepView) -> list[dict[str, str]]:
    """Return the lines of the table in MiB: one for each category and one for all, at each phase's end and at the peak."""
    from gptscale.lenet.studies.memory_account import CATEGORIES

    at = {f"after {mark.phase}": row for mark, _, row in step.ends()} | {"peak": step.peak}
    names = [*zip(CATEGORIES, CATEGORIES, strict=True), ("all", "live_bytes")]
    rows = [{"MiB": name} | {when: mib(row[column]) for when, row in at.items()} for name, column in names]
    if step.marks[-1].allocated_bytes is not None:
        counted = {f"after {mark.phase}": mib(mark.allocated_bytes) for mark in step.marks}
        rows.append({"MiB": "CUDA's allocator"} | counted | {"peak": mib(step.marks[-1].peak_allocated_bytes)})
    return rows


def reference_rows(options: VisionMemoryOptions) -> list[dict[str, str]]:
    """Return a report's figure for the same model, which counts CUDA's context and the allocator's reserve too."""
    if options.model != "lenet":
        return []
    return [{"MiB": f"{LENET_WITH_ADAM['name']}, whole process", "peak": f"{LENET_WITH_ADAM['memory_mib']:,}"}]


def mib(n_bytes: int | None) -> str:
    """Format a number of bytes in MiB."""
    return "-" if n_bytes is None else f"{n_bytes / MIB:,.2f}"


def draw(step: StepView, heading: str, path: Path) -> None:
    """Write a picture of the step: stacked areas of live bytes over the host's time, with the phases and the peak."""
    figure, axes = subplots(1, 1, (12, 5), heading)
    paint(axes[0, 0], step)
    figure.savefig(path, dpi=DPI)


def paint(axes: Any, step: StepView) -> None:
    """Draw the picture of a step on matplotlib's `axes`."""
    from gptscale.lenet.studies.memory_account import CATEGORIES

    ends = [end for _, end, _ in step.ends()]
    ms = [*step.events.ms, ends[-1]]
    heights = [[*(step.events[name] / MIB), step.events[name].iloc[-1] / MIB] for name in CATEGORIES]
    axes.stackplot(ms, heights, labels=CATEGORIES, colors=COLOURS, step="post", linewidth=0)
    peak, top = step.peak, step.peak.live_bytes / MIB
    axes.plot(peak.ms, top, "k.")
    axes.annotate(
        f"peak {top:,.1f} MiB", (peak.ms, top), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8
    )
    for begin, end, mark in zip([0.0, *ends], ends, step.marks, strict=False):
        axes.axvline(end, color="black", linewidth=0.6)
        # A short phase, such as the loading of a batch that was prepared before, has no room for its name.
        if end - begin > 0.03 * ms[-1]:
            axes.text(
                (begin + end) / 2, 1.02, mark.phase, ha="center", fontsize=8, transform=axes.get_xaxis_transform()
            )
    axes.set(xlabel="ms on the host", ylabel="MiB", xlim=(0, ms[-1]), ylim=(0, 1.1 * top))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False, reverse=True)
