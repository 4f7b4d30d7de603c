"""One vision run, as a command and as a function: `gptscale lenet train`, or `torchrun -m gptscale.lenet.run.worker`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from gptscale.common.errors import PREEMPTED_EXIT_STATUS, ConfigError, GptscaleError
from gptscale.common.process.begin import begin_process, keep_freed_memory, share_cores
from gptscale.common.process.ending import StopRequest, is_out_of_memory, report
from gptscale.common.process.world import World, agree_any, gather_objects, process_group
from gptscale.common.settings.command_line import bare_resume, parse
from gptscale.lenet.data.loader import rank_part
from gptscale.lenet.run.checkpoints import VisionSaver, resume
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import VisionPlan, make_plan, world_from_environment
from gptscale.lenet.run.record import VisionRunRow
from gptscale.lenet.run.recorder import StepOnDevice, VisionRecorder
from gptscale.lenet.run.strategy import backend_of
from gptscale.lenet.run.usage import UsageSampler

EVAL_BATCH_SIZE = 1000


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """How a run ended. row: what was appended to lenet.csv."""

    exit_status: int
    row: dict[str, Any]
    folder: Path


def train(config: VisionConfig, world: World, *, quiet: bool = False) -> RunOutcome:
    """Plan and run `config` in this process; the process group of a world of several is started and ended here.

    Raises GptscaleError for what is wrong before the run starts; whatever goes wrong later is in the outcome, and has left
    its row.
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
        stack.enter_context(process_group(world, cuda_backend=backend) if backend else nullcontext())
        run = PlannedRun(plan, VisionRunRow(plan, began=began, data_time_s=data_time_s, quiet=quiet))
        try:
            check_same_options(plan)
            run.row.open(stack)
            status = PREEMPTED_EXIT_STATUS if run.train() else 0
            return run.finish("interrupted" if status else "ok", None, status)
        except BaseException as error:  # the row must be left whatever it was; nothing is swallowed
            noted, status = report(error, world.rank)
            stack.pop_all()  # after a failure nothing is torn down, see process_group
            return run.finish("oom" if is_out_of_memory(error) else "failed", noted, status)


def check_same_options(plan: VisionPlan) -> None:
    """ConfigError if a rank was started with other options or data than rank 0."""
    hashes = gather_objects(plan.workload_hash)
    if others := [rank for rank, h in enumerate(hashes) if h != hashes[0]]:
        what = f"ranks {others} train something else than rank 0"
        raise ConfigError(what, "in their options or data", "start all alike")


class PlannedRun:
    """A planned run: its row, and what was measured when it ended, however it did."""

    def __init__(self, plan: VisionPlan, row: VisionRunRow) -> None:
        self.plan, self.row = plan, row
        self.recorder: VisionRecorder | None = None
        self.sampler = UsageSampler(plan.world.device)

    def train(self) -> bool:
        """Build, resume, train, test; whether it stopped early because it was asked to."""
        plan, folder = self.plan, self.row.folder
        with StopRequest() as stop:
            engine = VisionEngine(plan.config, plan.shape, plan.world)
            self.row.n_params = sum(p.numel() for p in engine.module.parameters())
            start, past = resume(plan, engine)
            recorder = VisionRecorder(
                plan, folder, start_step=start, past=past, began=self.row.began, quiet=self.row.quiet
            )
            with recorder as self.recorder, self.sampler:
                return train_epochs(
                    plan, engine, recorder, start, VisionSaver(plan, engine, recorder, folder / "checkpoints"), stop
                )

    def finish(self, status: str, error: BaseException | None, exit_status: int) -> RunOutcome:
        """Leave the row."""
        row = self.row.finish(status, error, self.recorder, self.sampler.usage())
        return RunOutcome(exit_status, row, self.row.folder)


def train_epochs(
    plan: VisionPlan,
    engine: VisionEngine,
    recorder: VisionRecorder,
    start: int,
    save_checkpoint: Callable[[int, int], None],
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Optimizer steps `start`+1 to the last, tests between; whether it stopped early because it was asked to.

    save_checkpoint(step, epochs): after an epoch with how many are complete, or before stopping within one with -1.
    """
    config, per_epoch = plan.config, plan.batch_order.steps_per_epoch
    loader, test = plan.loader(), TestSet(plan)
    for epoch in range(start // per_epoch, config.epochs):
        recorder.begin_epoch()
        first = start % per_epoch if epoch == start // per_epoch else 0
        step, asked = epoch * per_epoch + first, time.perf_counter()
        for images, labels in loader.epoch(epoch, first):
            got, lr = time.perf_counter(), plan.lr_at(step)
            loss = engine.train_step(step, images, labels, lr)
            step, now = step + 1, time.perf_counter()
            ends = step % per_epoch == 0 or step == plan.steps
            pending = StepOnDevice(
                step, epoch + 1, lr, loss, load_s=got - asked, update_s=now - got, skipped=engine.skipped
            )
            if recorder.step(pending, last=ends) and not ends and agree_any(stop_requested()):
                save_checkpoint(step, -1)
                return True
            asked = time.perf_counter()
            if step == plan.steps:
                break
        tested, began = None, time.perf_counter()
        if (epoch + 1) % config.eval_every == 0 or step == plan.steps:
            engine.settle()
            tested = engine.evaluate(test.batches())
        recorder.end_epoch(epoch + 1, step, tested, time.perf_counter() - began)
        stop = step < plan.steps and agree_any(stop_requested())
        save_checkpoint(step, -1 if stop else epoch + 1)
        if stop or step == plan.steps:
            return stop
    return False


class TestSet:
    """This rank's part of the test images on the device; the parts of all ranks are every image once."""

    def __init__(self, plan: VisionPlan) -> None:
        part, device = plan.data.test, plan.world.device
        mine = rank_part(len(part), plan.world.rank, plan.world.world_size)
        self.normalise = plan.normalise()
        self.images, self.labels = part.images[mine].to(device), part.labels[mine].to(device)

    def batches(self) -> Any:
        """Pairs of images, normalised, and labels."""
        for images, labels in zip(self.images.split(EVAL_BATCH_SIZE), self.labels.split(EVAL_BATCH_SIZE), strict=True):
            yield self.normalise(images), labels


def worker(argv: Sequence[str]) -> int:
    """A rank of a run: parse, check, train; its exit status. What is wrong before the run starts is one line of rank 0."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = parse_vision(argv)
        share_cores()
        return train(config, world_from_environment(config)).exit_status
    except GptscaleError as error:
        if rank == 0:
            print(f"gptscale: error: {error}", file=sys.stderr, flush=True)
        return 2  # whatever its kind: nothing ran, nothing was created


def parse_vision(argv: Sequence[str]) -> VisionConfig:
    """The options of a run from a command line; ConfigError for anything that is not one of them."""
    return parse(VisionConfig, bare_resume(argv), prog="gptscale lenet train", about="Train a vision model.")


if __name__ == "__main__":
    begin_process()
    status = worker(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is on disk, and the interpreter's teardown could only hang on a peer that is gone
