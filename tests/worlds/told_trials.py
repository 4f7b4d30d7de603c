"""Trials of a plan's rows that are told instead of simulated."""

import numpy as np

from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.memory.timeline import Timeline
from gptscale.foresight.plan.rows import Tried
from gptscale.foresight.price.record import Work
from gptscale.foresight.price.replay import replay


def tried(row, nbytes=None, seconds=None):
    """Return a trial of a row, by its bound and its estimate where nothing else is said: a product and a reduction."""
    nbytes, seconds = nbytes or row.places.on_device, seconds or row.estimate
    alive = np.array([0]), np.array([2]), np.array([nbytes]), ["parameter"]
    timeline = Timeline(*alive, 2, [(0, "forward")], [0, 2])
    memory = RankMemory(0, timeline, nbytes, nbytes, row.cluster.memory)
    works = [
        Work(0.0, "product", 0, "mm", 1e13, 0.0, "bf16", part=1),
        Work(0.5, "collective", 7, "all-reduce", nbytes=4e9, ranks=2, part=2),
    ]
    replayed = replay({0: works}, row.cluster.costs("bf16"), {0: 0.0})
    return Tried(seconds, seconds / 1.2, seconds * 1.2, "data sheet", "products (70%)", 0.4, memory, replayed)
