"""One vision run as a function, and as a process of `gptscale lenet train` or `torchrun -m gptscale.lenet.run.worker`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.errors import GptscaleError, PeerError
from gptscale.common.process.begin import begin_process, share_cores
from gptscale.common.process.ending import StopRequest
from gptscale.common.process.roll_call import refuse
from gptscale.common.process.world import World, process_group
from gptscale.common.settings.checks import words_to_compare
from gptscale.common.settings.command_line import bare_resume, parse
from gptscale.common.train import train as train_steps
from gptscale.launchers.run.checkpoints import resume
from gptscale.launchers.run.worker import train_and_record
from gptscale.lenet.run.checkpoints import VisionSaver, check_space, earlier_progress
from gptscale.lenet.run.config import BY_TRAINER, VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.evidence import vision_evidence
from gptscale.lenet.run.loop import EpochEnd, VisionBatches
from gptscale.lenet.run.preflight import VisionPlan, make_plan, world_from_environment
from gptscale.lenet.run.record import VisionRecord
from gptscale.lenet.run.recorder import EarlierProgress, VisionRecorder
from gptscale.lenet.run.strategy import backend_of
from gptscale.results.record.facts import version


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """The end of a run.

    row: the row that was appended to lenet.csv. folder: the run's folder.
    """

    exit_status: int
    row: dict[str, Any]
    folder: Path


def train(config: VisionConfig, world: World, *, quiet: bool = False) -> RunOutcome:
    """Train `config` in this process and return how it ended.

    The process group of a world of several is started and ended here. Raises GptscaleError for what is wrong before the run
    starts. An error after that is in the outcome and in the run's row.
    """
    began = time.perf_counter()
    plan = make_plan(config, world)
    data_time_s = time.perf_counter() - began
    backend, records = backend_of(config, world), []
    group = process_group(world, facts=_facts_to_compare(plan), cuda_backend=backend) if backend else nullcontext()

    def begin_record() -> VisionRecord:
        records.append(VisionRecord(plan, began=began, data_time_s=data_time_s, quiet=quiet))
        return records[0]

    status = train_and_record(world, group, begin_record, _train)
    if not records:
        return RunOutcome(status, {}, config.out)
    return RunOutcome(status, records[0].row, records[0].folder)


def _facts_to_compare(plan: VisionPlan) -> dict[str, object]:
    """Return the options, data and versions with which all ranks of a run must be started."""
    facts = words_to_compare(plan.config)
    facts |= {"the data's fingerprint": plan.data.fingerprint, "the device": plan.world.device.type}
    return facts | {f"the version of {name}": version(name) for name in ("gptscale", "torch")}


def loop_of(plan: VisionPlan) -> Callable[..., int]:
    """Return the function that takes the steps of a run: the one training loop, or Lightning's."""
    if plan.config.strategy not in BY_TRAINER:
        return train_steps
    from gptscale.lenet.run.trainer import train_by_trainer

    return partial(train_by_trainer, plan)


def _train(record: VisionRecord, stop: StopRequest) -> int:
    """Build the engine, resume, train and test, and return the exit status: not 0 if the run was asked to stop early."""
    plan, folder = record.plan, record.folder
    engine = VisionEngine(plan.config, plan.shape, plan.world)
    record.n_params = sum(p.numel() for p in engine.module.parameters())
    if plan.world.is_main:
        check_space(plan, engine, folder)
    past = EarlierProgress()

    def restore(reader: Reader) -> None:
        nonlocal past
        past = earlier_progress(reader)

    start = resume(cast(Any, plan), engine, folder / "checkpoints", restore)
    recorder = VisionRecorder(plan, folder, start_step=start, past=past, began=record.began, quiet=record.quiet)
    record.recorder = recorder
    after_step = {
        "evaluate": EpochEnd(plan, engine, recorder),
        "save": VisionSaver(plan, engine, recorder, folder / "checkpoints"),
        "stop_requested": stop,
    }
    with recorder:
        with record.sampler:
            last = loop_of(plan)(
                engine, VisionBatches(plan), recorder, lr_at=plan.lr_at, start=start, steps=plan.steps, **after_step
            )
        status = stop.exit_status if last < plan.steps else 0
        record.steps_are_over(engine, status)
    # A study asks for figures alone, and the evidence is of steps of our loop.
    if not (status or record.quiet or plan.config.strategy in BY_TRAINER):
        record.evidence = vision_evidence(plan, engine, recorder)
    return status


def worker(argv: Sequence[str]) -> int:
    """Parse, check and train as one rank of a run, and return its exit status.

    Anything that is wrong before the run starts is one line, which rank 0 prints if all ranks find it.
    """
    try:
        config = parse_vision(argv)
        world = world_from_environment(config)
        share_cores()
        return train(config, world).exit_status
    except GptscaleError as error:
        refuse(error)
        # The same status for every mistake, since no run began and no file was created.
        return error.exit_status if isinstance(error, PeerError) else 2


def parse_vision(argv: Sequence[str]) -> VisionConfig:
    """Return the options of a run from a command line, or raise ConfigError for anything that is not one of them."""
    return parse(VisionConfig, bare_resume(argv), prog="gptscale lenet train", about="Train a vision model.")


if __name__ == "__main__":
    begin_process()
    status = worker(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on disk. The interpreter's teardown could only hang on a peer that is gone.
    os._exit(status)
