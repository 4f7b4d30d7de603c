"""Count what one rank on CPUs allocates in a few steps of a recipe.

`gptscale simulate` and `gptscale bench simulate` start it. It is one rank of a world that is not there, or, beside others that
a launcher has started, a rank of one that is.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from gptscale.common.errors import GptscaleError
from gptscale.common.process.ending import report
from gptscale.common.process.world import World, process_group
from gptscale.foresight.memory.fake_world import believe_rank_0, fake_world
from gptscale.foresight.memory.owners import GRADIENT, OPTIMIZER, PARAMETER, STATE
from gptscale.foresight.memory.saved import save_timeline
from gptscale.foresight.memory.timeline import Timeline
from gptscale.foresight.memory.trace import STEPS, trace
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get

Case = tuple[str, list[str]]
FAKE, REAL = "fake", "real"
# When a thread of gloo lets go of a buffer is chance. Several steps show what is usual.
REAL_STEPS = 5


def main(argv: Sequence[str]) -> int:
    """Count each case, a recipe and its options, and leave facts and timelines in a folder.

    argv: the folder, `fake` or `real`, and the cases in JSON.
    """
    folder, kind, cases = Path(argv[0]), argv[1], json.loads(argv[2])
    torch.set_num_threads(1)
    try:
        world = World.from_environment("cpu", None)
        with _group(kind, world, any(get(recipe).axes for recipe, _ in cases)), tempfile.TemporaryDirectory() as out:
            for number, case in enumerate(cases):
                if kind == FAKE:
                    believe_rank_0(get(case[0]).engine)
                timeline = count(case, world, Path(out), REAL_STEPS if kind == REAL else STEPS)
                save_timeline(timeline, folder / f"{kind}-{number}-{world.rank}.npz")
                facts = json.dumps(facts_of(timeline))
                (folder / f"{kind}-{number}-{world.rank}.json").write_text(facts)
    except GptscaleError as error:
        print(f"gptscale: error: {error}", file=sys.stderr, flush=True)
        return 2
    except BaseException as error:
        return report(error, world.rank)[1]
    return 0


def _group(kind: str, world: World, splits: bool) -> AbstractContextManager[object]:
    if not splits:
        return nullcontext()
    return fake_world(world.rank, world.world_size) if kind == FAKE else process_group(world)


def count(case: Case, world: World, out: Path, steps: int = STEPS) -> Timeline:
    """Return the timeline of one case on this rank."""
    recipe, words = case
    config, recipe_config = parse_run(recipe, [*words, "--data", "synthetic", "--device", "cpu", "--out", str(out)])
    plan = preflight(recipe, config, recipe_config, world)
    return trace(plan.run, recipe_config, steps)


def usual_peak(timeline: Timeline) -> int:
    """Return the highest of three peaks: before the steps, in the first, which sets up, and in the middle one of the others."""
    ends = [*timeline.steps[1:], timeline.times]
    peaks = [timeline.peak_of(begin, end) for begin, end in zip(timeline.steps, ends, strict=True)]
    return max(timeline.peak_of(0, timeline.steps[0]), peaks[0], statistics.median_low(peaks[1:]))


def facts_of(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a timeline: its peak, whose it is, and the bytes of state."""
    peak_at, end = timeline.peak_at, timeline.by_owner(timeline.times - 1)
    stepped = [begin for begin, part in timeline.marks if part == OPTIMIZER]
    gradients = timeline.by_owner(stepped[-1] - 1).get(GRADIENT, 0) if stepped else 0
    return {
        "peak": timeline.peak,
        "usual_peak": usual_peak(timeline),
        "peak_part": timeline.part_at(peak_at),
        "peak_step": sum(begin <= peak_at for begin in timeline.steps),
        "peak_by_owner": timeline.by_owner(peak_at),
        "parameters": end.get(PARAMETER, 0),
        "optimizer_state": end.get(STATE, 0),
        "gradients": gradients,
    }


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries have threads that wait for peers.
    os._exit(status)
