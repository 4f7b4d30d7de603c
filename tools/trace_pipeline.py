"""Timelines of pipeline schedules, from real steps: forward, backward, bubble, communication.

python -m tools.trace_pipeline [--schedules A,B] [--nproc N] [options of a run]
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from gptscale.common.data.loader import to_device
from gptscale.common.engines.pipeline.stages import SCHEDULES
from gptscale.common.errors import ConfigError
from gptscale.common.measure.bubble import StageSpan, bubble_fraction, needs, result
from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.process.world import runs_on_cuda, world_of
from gptscale.common.settings.checks import OptionNeed, check_range, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import KEPT, RunConfig
from gptscale.launchers.cli import start
from gptscale.launchers.run.options import default_recipe_config, option_words, parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.results.render import DPI, console, subplots, table

# The last step is drawn, when buffers and caches have the size that they keep.
STEPS = 6
# The first word of a rank, which no user types.
RANK = "rank"
WITHOUT_EFFECT = ",".join(("steps", *(name for name in KEPT if name != "out")))


@dataclass(frozen=True)
class TraceOptions:
    """What to trace."""

    schedules: str = "all"
    """Names with commas between, or all of torch's."""
    nproc: int = 2
    """Processes of the pipeline."""

    def __post_init__(self) -> None:
        check_range(self.nproc, 1, 1024, "nproc")

    @property
    def names(self) -> list[str]:
        if self.schedules == "all":
            return list(SCHEDULES)
        return parse_names(self.schedules, SCHEDULES, "schedule", "--schedules")


@dataclass(frozen=True)
class RunAndTraceOptions:
    """A run's options and the trace's."""

    run: RunConfig = field(default_factory=lambda: RunConfig(n_layer=8, n_embd=256, out=Path("traces")))
    trace: TraceOptions = field(default_factory=TraceOptions)

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(WITHOUT_EFFECT, lambda c: False, f"a trace is {STEPS} steps of each schedule and leaves no run"),
    )


def gaps(spans: Mapping[int, Sequence[StageSpan]], n_stages: int) -> dict[int, list[tuple[str, float, float]]]:
    """Return what each rank did between its computations as (what, begin, end), from a trace on one clock.

    Before a computation a rank waits. The wait is `bubble` until another rank has computed what is needed, and `communication`
    from then on (the transfer, and work of the runtime). After its last computation, until all ranks are done, it is `bubble`.
    """
    done = {(result(s.kind), s.stage, s.micro_batch): s.end for of_rank in spans.values() for s in of_rank}
    begin = min(s.begin for of_rank in spans.values() for s in of_rank)
    end = max(done.values())
    waits: dict[int, list[tuple[str, float, float]]] = {}
    for rank, of_rank in spans.items():
        free, waits[rank] = begin, []
        for span in of_rank:
            ready = max([free, *(done[need] for need in needs(span.kind, span.stage, span.micro_batch, n_stages))])
            ready = min(ready, span.begin)
            waits[rank] += [("bubble", free, ready), ("communication", ready, span.begin)]
            free = span.end
        waits[rank].append(("bubble", free, end))
    return {rank: [wait for wait in of_rank if wait[2] > wait[1]] for rank, of_rank in waits.items()}


def main(argv: Sequence[str]) -> int:
    """Run every schedule for a few steps in one world, draw the last step of each, and return 0 if all were drawn."""
    options = parse(
        RunAndTraceOptions,
        argv,
        prog="python -m tools.trace_pipeline",
        about="Timelines of pipeline schedules, from real steps.",
    )
    names, config = options.trace.names, dataclasses.replace(options.run, tensorboard=False)
    if config.grad_accum_steps is None and config.micro_batch_size is None:
        micro_batches = 4 * options.trace.nproc
        global_batch_size = config.global_batch_size or micro_batches
        config = dataclasses.replace(config, grad_accum_steps=micro_batches, global_batch_size=global_batch_size)
    begin_warm_parent(config.device, imports=[])
    words = option_words("pipeline", config, default_recipe_config("pipeline"))
    # All schedules are checked before the first runs.
    for name in names:
        preflight(
            "pipeline",
            *parse_run("pipeline", [*words, "--schedule", name]),
            world_of(config.device, config.dist_timeout_s, options.trace.nproc),
        )
    config.out.mkdir(parents=True, exist_ok=True)
    program = Program("tools.trace_pipeline", (RANK, ",".join(names), *words))
    if status := launch(program, options.trace.nproc, fork=not runs_on_cuda(config.device)):
        raise ConfigError(f"the pipeline ended with status {status}", "in trace", "see its own message above")
    rows = []
    for name in names:
        trace = json.loads((config.out / f"{name}.json").read_text())
        spans, between = read(trace)
        print(f"wrote {draw(trace, spans, between, config.out / f'{name}.png')}")
        shares = _shares(spans, between)
        figures = (shares["bubble"], trace["theory"], shares["communication"])
        rows.append((name, f"{1e3 * trace['step_s']:.1f}", *(f"{share:.1%}" for share in figures)))
    console(100).print(table(("schedule", "step ms", "bubble", "in theory", "communication"), rows))
    return 0


def worker(names: str, words: Sequence[str]) -> None:
    """Run each schedule in turn as one rank, and on rank 0 write what all ranks measured of the last step."""
    from gptscale.common.process.begin import share_cores
    from gptscale.common.process.world import World, gather_objects, process_group
    from gptscale.recipes import get

    share_cores()
    config, _ = parse_run("pipeline", words)
    world = World.from_environment(config.device, config.dist_timeout_s)
    with process_group(world):
        for name in names.split(","):
            plan = preflight("pipeline", *parse_run("pipeline", [*words, "--schedule", name]), world)
            engine = get("pipeline").load().build(plan.run, plan.recipe_config)
            batches = plan.batches(plan.train, engine.data_rank, engine.data_size)
            for step in range(STEPS):
                engine.train_step(to_device(batches.batch(step), world.device), plan.run.lr_at(step))
            bubbles = gather_objects(engine.bubble())
            began = min(b.began_at for b in bubbles)
            trace = {
                "schedule": name,
                "n_stages": max(span.stage for b in bubbles for span in b.spans) + 1,
                "micro_batches": plan.run.batch.grad_accum_steps,
                "theory": bubbles[0].theory,
                "step_s": max(b.span_s[-1] for b in bubbles),
                "ranks": [
                    [(*s[:3], s.begin + b.began_at - began, s.end + b.began_at - began) for s in b.spans]
                    for b in bubbles
                ],
            }
            if world.is_main:
                (plan.run.config.out / f"{name}.json").write_text(json.dumps(trace))
    sys.stdout.flush()
    os._exit(0)


def read(trace: dict[str, Any]) -> tuple[dict[int, list[StageSpan]], dict[int, list[tuple[str, float, float]]]]:
    """Return the computations of each rank, and what was between them."""
    spans = {rank: [StageSpan(*span) for span in of_rank] for rank, of_rank in enumerate(trace["ranks"])}
    return spans, gaps(spans, trace["n_stages"])


def _shares(spans: dict[int, list[StageSpan]], between: dict[int, list[tuple[str, float, float]]]) -> dict[str, float]:
    """Return the share of all ranks' time that each kind of waiting takes, 0 for a kind that did not occur."""
    waited_s = dict.fromkeys(KINDS[-2:], 0.0)
    for kind, begin, end in chain.from_iterable(between.values()):
        waited_s[kind] += end - begin
    computed_s = sum(span.end - span.begin for span in chain.from_iterable(spans.values()))
    all_s = computed_s + sum(waited_s.values())
    return {kind: seconds / all_s for kind, seconds in waited_s.items()}


KINDS = ("forward", "backward", "backward of inputs", "backward of weights", "bubble", "communication")
OF_SPAN = dict(zip("FBIW", KINDS, strict=False))
COLOURS = dict(zip(KINDS, ("#4c8bbf", "#e08a3c", "#e0a860", "#7fb069", "#eeeeee", "#b04a5a"), strict=True))


def draw(
    trace: dict[str, Any],
    spans: dict[int, list[StageSpan]],
    between: dict[int, list[tuple[str, float, float]]],
    path: Path,
) -> Path:
    """Draw a row per rank with time to the right, the micro-batch's number in each box, and return the path."""
    from matplotlib.patches import Patch

    figure, ((axes,),) = subplots(1, 1, (14, 1.4 + 0.7 * len(spans)))
    used: dict[str, None] = {}
    for rank, of_rank in spans.items():
        first_stage = min(span.stage for span in of_rank)
        for what, begin, end in between[rank]:
            axes.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (rank - 0.4, 0.8), color=COLOURS[what], linewidth=0)
            used[what] = None
        for span in of_rank:
            kind, width = OF_SPAN[span.kind], 1e3 * (span.end - span.begin)
            used[kind] = None
            axes.broken_barh(
                [(1e3 * span.begin, width)],
                (rank - 0.4, 0.8),
                facecolor=COLOURS[kind],
                edgecolor="white" if span.stage == first_stage else "black",
                linewidth=0.8,
            )
            axes.text(1e3 * span.begin + width / 2, rank, str(span.micro_batch), ha="center", va="center", fontsize=7)
    measured = bubble_fraction(spans)
    axes.set_title(
        f"{trace['schedule']}: {trace['n_stages']} stages on {len(spans)} processes, {trace['micro_batches']} micro-batches; "
        f"{measured:.1%} of the time nothing is computed, {trace['theory']:.1%} in theory",
        loc="left",
        fontsize=10,
    )
    axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in spans])
    axes.invert_yaxis()
    axes.set_xlabel("ms (black edges: a rank's later stages)" if trace["n_stages"] > len(spans) else "ms")
    axes.set_xlim(0, 1e3 * max(span.end for of_rank in spans.values() for span in of_rank))
    axes.legend(
        handles=[Patch(color=COLOURS[k], label=k) for k in KINDS if k in used],
        ncols=6,
        loc="upper left",
        bbox_to_anchor=(0, -0.35 if len(spans) < 4 else -0.2),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=DPI)
    return path


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        worker(sys.argv[2], sys.argv[3:])
    sys.exit(start(main))
