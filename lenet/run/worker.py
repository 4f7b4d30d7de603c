"""One vision run as a function, and as a process of `gptscale lenet train` or `torchrun -m gptscale.lenet.run.worker`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError, GptscaleError, PeerError, StorageError
from gptscale.common.process.begin import begin_process, keep_freed_memory, share_cores
from gptscale.common.process.ending import StopRequest, as_known, is_out_of_memory, report
from gptscale.common.process.roll_call import refuse
from gptscale.common.process.world import World, process_group
from gptscale.common.settings.checks import words_to_compare
from gptscale.common.settings.command_line import bare_resume, parse
from gptscale.lenet.run.checkpoints import VisionSaver, check_space, resume
from gptscale.lenet.run.config import BY_TRAINER, VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.evidence import vision_evidence
from gptscale.lenet.run.loop import train_epochs
from gptscale.lenet.run.preflight import VisionPlan, make_plan, world_from_environment
from gptscale.lenet.run.record import VisionRunRow
from gptscale.lenet.run.recorder import VisionRecorder
from gptscale.lenet.run.strategy import backend_of, other_devices
from gptscale.results.record.facts import version
from gptscale.results.record.files import warn
from gptscale.results.record.usage import UsageSampler


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
    keep_freed_memory()
    backend = backend_of(config, world)
    with ExitStack() as stack:
        if backend and "MASTER_ADDR" not in os.environ:
            what = f"{config.strategy} needs a rendezvous, which no launcher has set"
            raise ConfigError(what, "in the environment", "start with `gptscale lenet train` or torchrun")
        facts = _facts_to_compare(plan)
        stack.enter_context(process_group(world, facts=facts, cuda_backend=backend) if backend else nullcontext())
        run = PlannedRun(plan, VisionRunRow(plan, began=began, data_time_s=data_time_s, quiet=quiet))
        try:
            run.row.open(stack)
            status = run.train()
            outcome = run.finish("interrupted" if status else "ok", None, status)
            # Here, because the end of the process group may miss a rank too.
            stack.close()
            return outcome
        except BaseException as error:
            if (ended := run.row.ended) is not None and isinstance(as_known(error), PeerError):
                stack.pop_all()
                lines = str(error).splitlines() or [""]
                warn(f"rank {world.rank}: another rank died after the last step, {lines[0][:160]}")
                return run.finish(ended.status, None, ended.exit_status, alone=True)
            # The row is written whatever the error was, and `report` prints the error.
            row_error, status = report(error, world.rank)
            # After a failure nothing is torn down, see process_group.
            stack.pop_all()
            return run.finish("oom" if is_out_of_memory(error) else "failed", row_error, status)


def _facts_to_compare(plan: VisionPlan) -> dict[str, object]:
    """Return the options, data and versions with which all ranks of a run must be started."""
    facts = words_to_compare(plan.config)
    facts |= {"the data's fingerprint": plan.data.fingerprint, "the device": plan.world.device.type}
    return facts | {f"the version of {name}": version(name) for name in ("gptscale", "torch")}


def loop_of(plan: VisionPlan) -> Callable[..., bool]:
    """Return the function that takes the steps of a run: our loop, or Lightning's."""
    if plan.config.strategy not in BY_TRAINER:
        return train_epochs
    from gptscale.lenet.run.trainer import trainer_epochs

    return trainer_epochs


class PlannedRun:
    """A planned run with its row and its measurements, which are there however the run ends."""

    def __init__(self, plan: VisionPlan, row: VisionRunRow) -> None:
        self.plan, self.row = plan, row
        self.recorder: VisionRecorder | None = None
        self.outcome: RunOutcome | None = None
        self.sampler = UsageSampler(plan.world.device, others=other_devices(plan.config, plan.world))

    def train(self) -> int:
        """Build the engine, resume, train and test, and return the exit status: not 0 if the run was asked to stop early."""
        plan, folder = self.plan, self.row.folder
        with StopRequest() as stop:
            engine = VisionEngine(plan.config, plan.shape, plan.world)
            self.row.n_params = sum(p.numel() for p in engine.module.parameters())
            if plan.world.is_main:
                check_space(plan, engine, folder)
            start, past = resume(plan, engine, folder / "checkpoints")
            began, quiet = self.row.began, self.row.quiet
            recorder = VisionRecorder(plan, folder, start_step=start, past=past, began=began, quiet=quiet)
            saver = VisionSaver(plan, engine, recorder, folder / "checkpoints")
            with ExitStack() as stack:
                self.recorder = stack.enter_context(recorder)
                stack.enter_context(self.sampler)
                stopped = loop_of(plan)(plan, engine, recorder, start, saver, stop)
            self.row.steps_are_over(recorder, stop.exit_status if stopped else 0)
            # A study asks for figures alone.
            if not (stopped or quiet):
                self.row.machine_time = recorder.machine_time()
                # The evidence is of steps of our loop.
                if plan.config.strategy not in BY_TRAINER:
                    self.row.evidence = vision_evidence(plan, engine, recorder)
            return stop.exit_status if stopped else 0

    def finish(self, status: str, error: BaseException | None, exit_status: int, *, alone: bool = False) -> RunOutcome:
        """Write the run's row unless that was done, and return how the run ended. alone: without the figures of other ranks."""
        if self.outcome is None:
            row = self.row.finish(status, error, self.recorder, self.sampler.usage(), alone=alone)
            if not self.row.is_on_disk and error is None:
                exit_status = StorageError.exit_status
            self.outcome = RunOutcome(exit_status, row, self.row.folder)
        return self.outcome


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
