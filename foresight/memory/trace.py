"""Build a recipe and step it while every byte is counted, in a real world or as one rank of one that is not there."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from gptscale.common.engine import Batch
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.foresight.memory.counter import Counter
from gptscale.foresight.memory.fake_world import observing
from gptscale.foresight.memory.owners import FORWARD, Owners
from gptscale.foresight.memory.timeline import Timeline, read_timeline
from gptscale.recipes import get

# The second step finds what the first left: state that is made at the first step, and buckets in the order of backward.
STEPS = 2


def trace(run: Run, recipe_config: RecipeConfig, steps: int = STEPS) -> Timeline:
    """Build the engine of a run, do some steps on made-up tokens, and return what lived when.

    A process group must be there if the recipe splits anything.
    """
    counter = Counter()
    began = []
    with counter.counting():
        owners = Owners(counter)
        with owners.watching(), observing(owners.seen_by_group) if run.world.world_size > 1 else nullcontext():
            engine = get(run.recipe).load().build(run, recipe_config)
            owners.of_engine(engine)
            for step in range(steps):
                began.append(counter.now())
                with owners.part(FORWARD):
                    engine.train_step(made_up_batch(run, step), 1e-4)
            owners.label_state(engine)
        log = counter.events()
        engine.close()
    return read_timeline(log, owners, began)


def made_up_batch(run: Run, step: int) -> Batch:
    """Return a data rank's share of a global batch, in the shapes and types that the loader would give."""
    rows = torch.randint(run.gpt.vocab_size, (run.batch.sequences_per_rank, run.seq_len + 1))
    return Batch(step, rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
