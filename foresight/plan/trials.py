"""A row of a plan, tried: under the mock of CUDA with its step priced, or on this machine's processor for a few steps."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptscale.common.errors import GptscaleError
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.process.task import reason
from gptscale.foresight.plan.question import Cluster
from gptscale.foresight.plan.rows import PlannedRow, Tried, words_of
from gptscale.foresight.price.replay import Replayed, replay
from gptscale.foresight.price.step_time import SPREAD, priced
from gptscale.foresight.simulate.program import Simulation
from gptscale.foresight.simulate.simulation import simulate

# A step is bound by the host if it lasts so many times as long as with one that is always ahead.
HOST_BOUND = 1.1
# Micro-batches that are recorded without stages. Each one more lasts as long as the middle one of these.
RECORDED = 3
MEASURED, CONTENDED = "measured here", "measured here, contended"
# Steps that are timed on a processor, behind those that warm up.
WARM_UP, TIMED, LIMIT_S = 3, 5, 900


def simulated(row: PlannedRow) -> Tried:
    """Simulate the kinds of ranks of a row, and replay them together. Raises GptscaleError if one fails."""
    run, cluster = row.run, row.cluster
    n = run.batch.grad_accum_steps
    written = min(n, RECORDED) if run.pp_size == 1 else n
    batch: dict[str, Any] = {"grad_accum_steps": written, "global_batch_size": None}
    batch["micro_batch_size"] = run.batch.micro_batch_size
    config = dataclasses.replace(run.config, data="synthetic", **batch)
    world: dict[str, Any] = {"world_size": cluster.ranks, "ranks_per_node": cluster.per_node}
    simulations = [
        simulate(run.recipe, config, row.config, device=cluster.device, rank=rank, **world)
        for rank in run.mesh.ranks("pp")
    ]
    return tried(simulations, cluster, run.config.precision, n, written)


def tried(simulations: Sequence[Simulation], cluster: Cluster, precision: str, n: int, written: int) -> Tried:
    """Return what the ranks of a step of `n` micro-batches tell, of which `written` were recorded."""
    memory = max((s.memory() for s in simulations), key=lambda memory: (not memory.fits, memory.needed))
    recorded = {s.facts["rank"]: s.recorded for s in simulations if s.recorded}
    if not recorded:
        return Tried(float("inf"), 0.0, float("inf"), "no step was made", memory=memory)
    costs = cluster.costs(precision, simulations[0].facts["torch"])
    hosts = {s.facts["rank"]: s.host_s for s in simulations if s.recorded}
    ahead, replayed = (replay(recorded, costs, each) for each in (dict.fromkeys(hosts, 0.0), hosts))
    (least, _), (seconds, slowest) = (_whole(ranks, n, written) for ranks in (ahead, replayed))
    time = priced(slowest, slowest.step_s, costs, precision)
    bound, share = time.bound, time.parts[time.bound] / slowest.step_s
    if seconds > HOST_BOUND * least:
        bound, share = "the host", 1 - least / seconds
    mfu = time.mfu * slowest.step_s * n / written / seconds
    bound_by, low, high = f"{bound} ({share:.0%})", least / SPREAD, seconds * SPREAD
    grade = costs.grade if all(hosts.values()) else f"{costs.grade}, if the host keeps up"
    return Tried(seconds, low, high, grade, bound_by, mfu, memory, replayed, time.parts)


def _whole(replayed: Mapping[int, Replayed], n: int, written: int) -> tuple[float, Replayed]:
    """Return the seconds of a step of `n` micro-batches, and its slowest rank's step of the `written` ones.

    Stages wait for each other, so that all have the same length but for the last messages.
    """
    slowest = max(replayed.values(), key=lambda step: step.step_s)
    more = (n - written) * one_more_s(replayed[max(replayed)], written) if n > written else 0.0
    return slowest.step_s + more, slowest


def one_more_s(step: Replayed, count: int) -> float:
    """Return the seconds that each further micro-batch takes: those from the last forward but one to the last.

    step: of `count` micro-batches, on the last stage if there are stages. Raises GptscaleError unless it shows so many forwards.
    """
    begins = step.forwards()
    if len(begins) != count:
        what = f"the recorded step shows {len(begins)} forwards, not those of {count} micro-batches"
        raise GptscaleError(what, "in plan", "name a batch with fewer micro-batches")
    return begins[-1] - begins[-2]


def measured(row: PlannedRow, timed: int = TIMED) -> Tried:
    """Train with a row for a few steps on this machine's processor. Raises GptscaleError if the run fails."""
    import pandas as pd

    run = row.run
    with tempfile.TemporaryDirectory(prefix="gptscale-plan-") as out:
        numbers = f"--nproc {row.cluster.ranks} --steps {WARM_UP + timed} --timing-warmup-steps {WARM_UP}"
        words = [*numbers.split(), *words_of(row), "--data", "synthetic"]
        words += ["--out", out, "--run-name", "trial", "--no-tensorboard"]
        command = [sys.executable, "-m", "gptscale.launchers.cli", "run", run.recipe, *words]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise GptscaleError(f"no {WARM_UP + timed} steps in {LIMIT_S} s", "in plan", "plan for less work") from None
        if ended.returncode:
            raise GptscaleError(reason(ended.stderr)[:160], "in its trial", "see gptscale run")
        times_s = pd.read_csv(Path(out, "runs", "trial", "steps.csv")).step_time_s[WARM_UP:]
        taken = float(pd.read_csv(Path(out, "summary.csv")).taken_fraction[0])
    grade = CONTENDED if taken > TAKEN_MAX else MEASURED
    return Tried(statistics.median(times_s), min(times_s), max(times_s), grade)
