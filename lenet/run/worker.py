"""One vision run as a function, and as a process of `gptscale lenet train` or `torchrun -m gptscale.lenet.run.worker`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from gptscale.common.checkpoint.folders import EVENT_BYTES, OTHER_BYTES, ROW_BYTES, check_free
from gptscale.common.checkpoint.manifest import damaged
from gptscale.common.checkpoint.reader import Reader
from gptscale.common.engine import Batch
from gptscale.common.errors import GptscaleError, PeerError
from gptscale.common.measure.evidence import RankEvidence
from gptscale.common.measure.spikes import SpikeWatch
from gptscale.common.process.begin import begin_process, share_cores
from gptscale.common.process.ending import StopRequest, end_process
from gptscale.common.process.roll_call import refuse
from gptscale.common.process.world import World, process_group
from gptscale.common.settings.command_line import bare_resume, parse
from gptscale.common.settings.run_config import VERDICT_STEPS_MIN
from gptscale.common.train import train as train_steps
from gptscale.launchers.run.checkpoints import Saver, resume
from gptscale.launchers.run.worker import facts_to_compare, take_evidence, train_and_record
from gptscale.lenet.run.config import BY_TRAINER, VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.loop import EpochEnd, VisionBatches
from gptscale.lenet.run.preflight import ReadyVisionRun, ready_run, world_from_environment
from gptscale.lenet.run.record import EarlierProgress, VisionRecord, VisionRecorder
from gptscale.lenet.run.strategy import backend_of


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """The end of a run.

    row: the row that was appended to lenet.csv. folder: the run's folder.
    """

    exit_status: int
    row: dict[str, Any]
    folder: Path


def train(config: VisionConfig, world: World) -> RunOutcome:
    """Train `config` in this process and return how it ended.

    The process group of a world of several is started and ended here. Raises GptscaleError for what is wrong before the run
    starts. An error after that is in the outcome and in the run's row.
    """
    began = time.perf_counter()
    ready = ready_run(config, world)
    data_time_s = time.perf_counter() - began
    backend, records = backend_of(config, world), []
    facts = facts_to_compare(ready.data.fingerprint, world, config)
    group = process_group(world, facts=facts, cuda_backend=backend) if backend else nullcontext()

    def begin_record() -> VisionRecord:
        records.append(VisionRecord(ready, began=began, data_time_s=data_time_s))
        return records[0]

    status = train_and_record(world, group, begin_record, _train)
    if not records:
        return RunOutcome(status, {}, config.out)
    return RunOutcome(status, records[0].row, records[0].folder)


def _train(record: VisionRecord, stop: StopRequest) -> int:
    """Build the engine, resume, train and test, and return the exit status: not 0 if the run was asked to stop early."""
    ready, folder, past = record.ready, record.folder, EarlierProgress()
    engine = VisionEngine(ready.config, ready.shape, ready.world)
    record.n_params = sum(p.numel() for p in engine.module.parameters())
    if ready.world.is_main:
        check_space(ready, engine, folder)

    def restore(reader: Reader) -> None:
        nonlocal past
        try:
            past = EarlierProgress(**reader.manifest["past"])
        except (KeyError, TypeError) as error:
            raise damaged(reader.path, "manifest.json", f"has no valid 'past' ({error})") from None

    start = resume(ready.run, engine, folder / "checkpoints", restore)
    recorder = VisionRecorder(ready, folder, start_step=start, past=past, began=record.began)
    record.recorder = recorder
    take_steps: Callable[..., int] = train_steps
    if ready.config.strategy in BY_TRAINER:
        from gptscale.lenet.run.trainer import train_by_trainer

        take_steps = partial(train_by_trainer, ready)
    with recorder:
        with record.sampler:
            last = take_steps(
                engine, VisionBatches(ready), recorder, lr_at=ready.lr_at, start=start, steps=ready.steps,
                evaluate=EpochEnd(ready, engine, recorder), stop_requested=stop,
                save=VisionSaver(ready, engine, recorder, folder / "checkpoints"),
            )  # fmt: skip
        status = stop.exit_status if last < ready.steps else 0
        record.steps_are_over(engine, status)
    # The evidence is of steps of our loop.
    if not (status or ready.config.strategy in BY_TRAINER):
        record.evidence = _evidence(ready, engine, recorder)
    return status


class VisionSaver(Saver):
    """Saves a checkpoint every `save_every` epochs, at the end, and when the run is asked to stop."""

    def __init__(self, ready: ReadyVisionRun, engine: VisionEngine, recorder: VisionRecorder, folder: Path) -> None:
        super().__init__(ready.run, engine, folder, recorder.sync, SpikeWatch())
        self.every, self.past = ready.config.save_every * ready.batch_order.steps_per_epoch, recorder.past

    def facts(self, step: int) -> dict[str, Any]:
        return {"past": dataclasses.asdict(self.past)}


def check_space(ready: ReadyVisionRun, engine: VisionEngine, folder: Path) -> None:
    """Raise StorageError if the checkpoints and logs of a run cannot fit on the disk of its `folder`."""
    config, epochs = ready.config, -(-ready.steps // ready.batch_order.steps_per_epoch)
    check_free(
        folder,
        saves=-(-epochs // config.save_every) if config.save_every else 0,
        keep=config.keep_checkpoints,
        checkpoint_bytes=sum(shard.tensor.nbytes for shard in engine.state()),
        log_bytes=OTHER_BYTES + ready.steps * (ROW_BYTES + EVENT_BYTES * config.tensorboard),
    )


def _evidence(ready: ReadyVisionRun, engine: VisionEngine, recorder: VisionRecorder) -> RankEvidence | None:
    """Return what a few steps more show, or None for a run that gets no verdict."""
    if not ready.config.verdict or recorder.n_steps < VERDICT_STEPS_MIN:
        return None
    data = VisionBatches(ready)

    def batch_of(i: int, part: int) -> Batch:
        batch = data.get(ready.planned_steps + i)
        n = max(1, len(batch.targets) // part)
        return batch._replace(inputs=batch.inputs[:n], targets=batch.targets[:n])

    return take_evidence(engine, recorder, batch_of, short=ready.world.device.type == "cpu")


def worker(argv: Sequence[str]) -> int:
    """Parse, check and train as one rank of a run, and return its exit status.

    Anything that is wrong before the run starts is one line, which rank 0 prints if all ranks find it.
    """
    try:
        config = parse(VisionConfig, bare_resume(argv), prog="gptscale lenet train", about="Train a vision model.")
        world = world_from_environment(config)
        share_cores()
        return train(config, world).exit_status
    except GptscaleError as error:
        refuse(error)
        # The same status for every mistake, since no run began and no file was created.
        return error.exit_status if isinstance(error, PeerError) else 2


if __name__ == "__main__":
    begin_process()
    end_process(worker(sys.argv[1:]))
