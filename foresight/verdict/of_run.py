"""The verdict on a run of the GPT: what is known of it, what the plan foresees for the remedy, and what else was seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from gptscale.common.measure.contention import MachineTime
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.plan.question import Resolve
from gptscale.foresight.verdict.calibrated import calibrated_run
from gptscale.foresight.verdict.evidence import RankEvidence, right_threads, verdict_of
from gptscale.foresight.verdict.planned import planned_gain
from gptscale.foresight.verdict.remedies import RunFacts, options_against
from gptscale.foresight.verdict.verdict import Verdict
from gptscale.results.record.files import warn

# Makes the options of a run with these words behind its own.
Reparse = Callable[[list[str]], tuple[RunConfig, RecipeConfig]]


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """What the timed steps of a run say.

    late: the rank with the most work of its own, and that divided by the median of the others', if they can tell. taken: what
    others had of the machine. times: what each rank saw of its machine. offload_wait: the share of time in which a rank waited
    for state that is kept off its device, None if none is.
    """

    step_times_s: Sequence[float]
    late: tuple[int, float] | None
    taken: float | None
    times: Sequence[MachineTime | None]
    offload_wait: float | None = None


def verdict_of_run(
    run: Run,
    recipe_config: RecipeConfig,
    evidence: Sequence[RankEvidence | None],
    timed: TimedRun,
    *,
    pipeline: bool,
    reparse: Reparse,
    resolve: Resolve,
) -> Verdict | None:
    """Return the verdict on a run, None without evidence. reparse, resolve: make a run with the remedy's options."""
    facts = RunFacts(
        run.recipe,
        cuda=run.world.device.type == "cuda",
        pipeline=pipeline,
        compiled=run.config.compile,
        micro_batch_size=run.batch.micro_batch_size,
        grad_accum_steps=run.batch.grad_accum_steps,
        right_threads=right_threads(),
    )
    verdict = verdict_of(evidence, facts, timed.step_times_s, timed.taken, timed.late, partial(calibrated_run, run))
    if verdict is None:
        return None
    planned = None
    if words := options_against(verdict.bound_by, facts):
        try:
            planned = planned_gain(run, recipe_config, reparse(words), resolve)
        except Exception as error:
            # A fault of the plan is none of the run.
            warn(f"the plan does not know the remedy ({type(error).__name__}: {error})")
    return dataclasses.replace(verdict, planned=planned, notes=notes(evidence, timed))


def notes(evidence: Sequence[RankEvidence | None], timed: TimedRun) -> list[str]:
    """Return what the meters of a run say beside its steps, a sentence each."""
    lines = [f"rank {rank}: {time.gpu_time}" for rank, time in enumerate(timed.times) if time and time.gpu_time]
    retries = {rank: e.alloc_retries for rank, e in enumerate(evidence) if e and e.alloc_retries}
    lines += [f"rank {rank}: the allocator freed its cache and tried again {n} times" for rank, n in retries.items()]
    if timed.offload_wait is not None:
        lines.append(f"in the timed steps {timed.offload_wait:.1%} of the time was a wait for state off the device")
    return lines
