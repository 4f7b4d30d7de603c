"""The faults: what each does, when it may strike, and how the run must then end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from gptscale.common.errors import (
    INTERRUPTED_EXIT_STATUS,
    PREEMPTED_EXIT_STATUS,
    CheckpointError,
    PeerError,
    StorageError,
)
from tools.soak import damage
from tools.soak.attempt import Attempt, last_row
from tools.soak.disk import SmallDisk

ANY = ("start", "step", "step", "eval", "save", "rename", "commit")
LATER = ("step", "eval", "save", "rename", "commit")
# Bytes that a rank may write to one file where no small disk can be mounted: more than its CSVs, less than a checkpoint.
FILE_BYTES = 2**16


@dataclass(frozen=True)
class Scene:
    """What a fault has to work on: the run's folder, its disk if it has one of its own, and random numbers."""

    run: Path
    disk: SmallDisk | None
    random: Random


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    statuses: the exit statuses with which the run may end; early: those that it may also have if it did no step since its
    start. moments: see moments.py. strike: what happens at the moment. damage: what happens to the checkpoints before the
    start. limit_s: how long the run may live after the strike. peers: whether it needs two ranks. fills: whether it fills
    the disk. short_timeout: whether the run waits only a short time for a silent rank.
    """

    name: str
    statuses: tuple[int, ...]
    moments: tuple[str, ...]
    strike: Callable[[Attempt, Scene], None]
    damage: Callable[[Path, Random], None] | None = None
    early: tuple[int, ...] = ()
    limit_s: float = 45.0
    peers: bool = False
    fills: bool = False
    short_timeout: bool = False


def kill_rank(attempt: Attempt, scene: Scene) -> None:
    """Kill one rank."""
    _any_rank(attempt, scene).kill()


def kill_all_ranks(attempt: Attempt, scene: Scene) -> None:
    """Kill all ranks at once."""
    for rank in attempt.ranks():
        rank.kill()


def kill_launcher(attempt: Attempt, scene: Scene) -> None:
    """Kill the launcher."""
    attempt.process.send_signal(signal.SIGKILL)


def terminate(attempt: Attempt, scene: Scene) -> None:
    """Send SIGTERM to the launcher, as a scheduler does before it takes the machine."""
    attempt.process.send_signal(signal.SIGTERM)


def terminate_rank(attempt: Attempt, scene: Scene) -> None:
    """Send SIGTERM to one rank."""
    _any_rank(attempt, scene).send_signal(signal.SIGTERM)


def terminate_twice(attempt: Attempt, scene: Scene) -> None:
    """Send SIGTERM to the launcher and again: at once, when it counts as the same request, or later, when it ends the run."""
    terminate(attempt, scene)
    time.sleep(scene.random.uniform(0.0, 1.5))
    terminate(attempt, scene)


def interrupt(attempt: Attempt, scene: Scene) -> None:
    """Send SIGINT to the launcher, as Ctrl-C does."""
    attempt.process.send_signal(signal.SIGINT)


def freeze(attempt: Attempt, scene: Scene) -> None:
    """Stop one rank for ever."""
    _any_rank(attempt, scene).suspend()


def pause(attempt: Attempt, scene: Scene) -> None:
    """Stop one rank for less than the timeout, and see the run go on."""
    rank = _any_rank(attempt, scene)
    rank.suspend()
    time.sleep(scene.random.uniform(0.2, 1.5))
    rank.resume()
    _go_on_and_terminate(attempt, scene)


def fill_disk(attempt: Attempt, scene: Scene) -> None:
    """Fill the disk until the run gives up."""
    _fill(attempt, scene)


def fill_disk_briefly(attempt: Attempt, scene: Scene) -> None:
    """Fill the disk, and free it as soon as a save was missed."""
    _fill(attempt, scene)
    attempt.wait_until(lambda: "(missed 1 of" in attempt.output())
    _free(attempt, scene)
    _go_on_and_terminate(attempt, scene)


def _go_on_and_terminate(attempt: Attempt, scene: Scene) -> None:
    """Wait for some more steps, and send SIGTERM."""
    steps = scene.run / "steps.csv"
    goal = last_row(steps) + 2
    if attempt.wait_until(lambda: last_row(steps) >= goal):
        terminate(attempt, scene)


def _any_rank(attempt: Attempt, scene: Scene) -> psutil.Process:
    ranks = attempt.ranks()
    if not ranks:
        raise psutil.NoSuchProcess(attempt.process.pid)
    return scene.random.choice(ranks)


def _fill(attempt: Attempt, scene: Scene) -> None:
    if scene.disk:
        scene.disk.fill()
    else:
        _limit_files(attempt, FILE_BYTES)


def _free(attempt: Attempt, scene: Scene) -> None:
    if scene.disk:
        scene.disk.free()
    else:
        _limit_files(attempt, psutil.RLIM_INFINITY)


def _limit_files(attempt: Attempt, n_bytes: int) -> None:
    for rank in attempt.ranks():
        rank.rlimit(psutil.RLIMIT_FSIZE, (n_bytes, psutil.RLIM_INFINITY))


PEER, PREEMPTED, FULL, BAD = (
    PeerError.exit_status,
    PREEMPTED_EXIT_STATUS,
    StorageError.exit_status,
    CheckpointError.exit_status,
)
# SIGTERM that comes before the run can heed it.
STARTING = (PEER, -signal.SIGTERM)
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill a rank", (PEER,), ANY, kill_rank),
        Fault("kill all ranks", (PEER,), ANY, kill_all_ranks),
        Fault("kill the launcher", (-signal.SIGKILL,), ("launch", *ANY), kill_launcher),
        Fault("kill before the row", (-signal.SIGKILL,), ("last",), kill_launcher),
        Fault("SIGTERM", (PREEMPTED,), ("launch", *ANY), terminate, early=STARTING),
        Fault("SIGTERM to a rank", (PREEMPTED,), ANY, terminate_rank, early=STARTING),
        Fault("SIGTERM twice", (PREEMPTED, PEER, -signal.SIGTERM), LATER, terminate_twice),
        Fault("Ctrl-C", (INTERRUPTED_EXIT_STATUS,), ANY, interrupt),
        Fault("freeze a rank", (PEER,), LATER, freeze, peers=True, short_timeout=True),
        Fault("pause a rank", (PREEMPTED,), LATER, pause),
        Fault("full disk", (FULL,), LATER, fill_disk, fills=True),
        # Three missed saves end a run, and they may be over before the disk is free again.
        Fault("full disk for a while", (PREEMPTED, FULL), LATER, fill_disk_briefly, fills=True),
        Fault("flipped bit", (PREEMPTED,), ("step",), terminate, damage.flip_in_newest),
        Fault("cut file", (PREEMPTED,), ("step",), terminate, damage.cut_in_newest),
        Fault("missing file", (PREEMPTED,), ("step",), terminate, damage.remove_in_newest),
        Fault("all damaged", (BAD,), ("step",), terminate, damage.flip_in_all),
    )
}
