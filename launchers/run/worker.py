"""The worker, which every process of a run executes, from its command line to its exit status."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch

from gptscale.common.checkpoint.replicas import ReplicaCheck
from gptscale.common.data.loader import Prefetcher, to_device
from gptscale.common.engine import Batch, Engine
from gptscale.common.errors import GptscaleError, NumericError, PeerError, StorageError, first_line
from gptscale.common.measure.evidence import SHORT, RankEvidence, evidence_of
from gptscale.common.measure.speed import synchronize
from gptscale.common.measure.spikes import SpikeWatch
from gptscale.common.process.begin import begin_process, keep_freed_memory, share_cores
from gptscale.common.process.ending import StopRequest, as_known, end_process, is_out_of_memory, report
from gptscale.common.process.environments import installed
from gptscale.common.process.heartbeat import Heartbeat
from gptscale.common.process.progress import progress
from gptscale.common.process.roll_call import refuse
from gptscale.common.process.world import World, gather_objects, process_group
from gptscale.common.settings.checks import OF_THE_MACHINE, option_of
from gptscale.common.settings.command_line import refuse_repeated
from gptscale.common.settings.run_config import VERDICT_STEPS_MIN
from gptscale.common.train import train
from gptscale.launchers.run.checkpoints import Saver, resume
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import ReadyRun, preflight
from gptscale.launchers.run.record import RunRecord
from gptscale.launchers.run.space import check_memory
from gptscale.recipes import get
from gptscale.results.record.files import warn
from gptscale.results.record.recorder import Recorder


def run_recipe(recipe: str, argv: Sequence[str] | None = None) -> None:
    """Parse, check, train, and end the process with the run's exit status."""
    begin_process()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        refuse_repeated(words)
        config, recipe_config = parse_run(recipe, words)
        ready = preflight(recipe, config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))
        folder = config.out / "runs" / str(config.run_name)
        if config.resume is not None:
            from gptscale.launchers.run.finished import is_finished

            if is_finished(ready, folder):
                sys.exit(0)
        check_memory(ready.run, recipe_config.offload)
    except GptscaleError as error:
        refuse(error)
        # Nothing ran and nothing was created, so all but a disk that cannot be read is an error of the options.
        sys.exit(error.exit_status if isinstance(error, StorageError) else 2)
    share_cores()
    end_process(work(ready))


def work(ready: ReadyRun) -> int:
    """Train, leave the row and the files, and return the exit status."""
    run = ready.run
    facts: dict[str, object] = {"the recipe": run.recipe, **ready.recipe_config.contents()}
    facts |= facts_to_compare(ready.fingerprint, run.world, run.config, ready.recipe_config)
    group = process_group(run.world, facts=facts) if get(run.recipe).axes else nullcontext()
    return train_and_record(run.world, group, partial(RunRecord, ready, run.recipe), partial(_train, ready))


def train_and_record(
    world: World,
    group: AbstractContextManager[None],
    begin_record: Callable[[], RunRecord],
    train: Callable[[Any, StopRequest], int],
) -> int:
    """Train in the process group of the world, leave the row and the files, and return the exit status."""
    keep_freed_memory()
    record: RunRecord | None = None
    heartbeat = Heartbeat(world.rank, world.world_size, None)
    with ExitStack() as signals, ExitStack() as stack:
        try:
            stack.enter_context(group)
            # Only now: rank 0 may have opened the store with the group.
            heartbeat = stack.enter_context(Heartbeat.of_world(world.rank, world.world_size))
            record = stack.enter_context(begin_record())
            # Until the row is written: the launcher sends SIGTERM to the peers of a dead rank.
            stop = signals.enter_context(StopRequest())
            status = train(record, stop)
            if not record.finish("interrupted" if status else "ok"):
                status = StorageError.exit_status
            # Here, because the end of the process group may miss a rank too.
            stack.close()
            record.afterwards()
            return status
        except BaseException as error:
            # torch's handler of this signal raises if a data worker has died. That error may be known already.
            signals.callback(signal.signal, signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))
            if record is not None and record.ended is not None and isinstance(as_known(error), PeerError):
                stack.pop_all()
                return _end_without(error, record, heartbeat)
            # Whatever the error was, the row must be left. Nothing is swallowed.
            reason, status = report(error, world.rank, heartbeat.missing)
            if record is not None:
                record.finish("oom" if is_out_of_memory(error) else "failed", reason)
            # After a failure nothing is torn down, see process_group.
            stack.pop_all()
            return status


def _end_without(error: BaseException, record: RunRecord, heartbeat: Heartbeat) -> int:
    """End a run whose steps were over when a rank died, with the row that it has earned, and return the exit status."""
    ended = record.ended
    assert ended is not None
    # Once the row is written, hearts stop one after the other, and nobody can be named.
    missing = heartbeat.missing() if record.row_taken is None else None
    who, where = missing or ("another rank", first_line(error))
    warn(f"rank {heartbeat.rank}: {who} died after the last step, {where}")
    return ended if record.finish("interrupted" if ended else "ok", alone=True) else StorageError.exit_status


def facts_to_compare(fingerprint: str, world: World, *options: Any) -> dict[str, object]:
    """Return the options, data and versions with which all ranks of a run must be started, options OF_THE_MACHINE left out."""
    fields = {name: value for part in options for name, value in dataclasses.asdict(part).items()}
    facts = {option_of(name): value for name, value in fields.items() if name not in OF_THE_MACHINE}
    facts |= {"the data's fingerprint": fingerprint, "the device": world.device.type}
    return facts | {f"the version of {name}": installed(name) for name in ("gptscale", "torch")}


def _train(ready: ReadyRun, record: RunRecord, stop: StopRequest) -> int:
    """Build the engine, resume, run the loop, and return the exit status: not 0 if it stopped because it was asked to."""
    with closing(get(ready.run.recipe).load().build(ready.run, ready.recipe_config)) as engine:
        return _train_with(engine, ready, record, stop)


def take_evidence(
    engine: Engine, recorder: Recorder, batch_of: Callable[[int, int], Batch], *, short: bool, keep: bool = False
) -> RankEvidence | None:
    """Take a few steps more, whose rate is 0, and return what they show. Everything is saved, and their state is thrown away.

    batch_of(i, part): the batch of the i-th of them, cut to one of so many parts. short: whether a part can be computed alone.
    """
    world = recorder.run.world

    def step(i: int, part: int = 1) -> None:
        with recorder.waiting():
            batch = batch_of(i, part)
        result = engine.train_step(batch, 0.0)
        progress.at("record")
        result.loss.item()
        synchronize(world.device)

    short_step = partial(step, part=SHORT) if short else None
    try:
        return evidence_of(world.rank, step, world.device, recorder.data_waits_s, short_step=short_step, keep=keep)
    except torch.OutOfMemoryError as error:
        # The profiler needs memory of its own, and the run is done.
        warn(f"rank {world.rank}: this run has no verdict ({first_line(error)})")
        return None


def _evidence(engine: Engine, data: Prefetcher, recorder: Recorder) -> RankEvidence | None:
    run = recorder.run

    def batch_of(i: int, part: int) -> Batch:
        batch, tokens = data.get(run.config.steps + i), run.seq_len // part
        return batch._replace(inputs=batch.inputs[:, :tokens], targets=batch.targets[:, :tokens])

    # Where shapes are fixed, by stages, compiled code or a library, all steps are alike.
    on_cuda = run.world.device.type == "cuda"
    same_shapes = engine.bubble() or run.config.compile or get(run.recipe).environment or on_cuda
    fits = run.rank_seq_len % (SHORT * run.tp_size * min(2, run.cp_size)) == 0
    return take_evidence(engine, recorder, batch_of, short=fits and not same_shapes, keep=run.config.profile)


def _train_with(engine: Engine, ready: ReadyRun, record: RunRecord, stop: StopRequest) -> int:
    run = ready.run
    if run.config.check_replicas:
        ReplicaCheck(engine).require_replicas()
    spikes = SpikeWatch(skip=run.config.on_spike == "skip")
    checkpoints = record.folder / "checkpoints"
    start = resume(ready, engine, checkpoints, lambda saved: spikes.restore(saved.manifest.get("recent_steps")))
    if spikes.skip:
        engine.skip_steps(spikes.skips)
    batches = ready.batches(ready.train, engine.data_rank, engine.data_size)
    held_out = ready.batches(ready.held_out, engine.data_rank, engine.data_size)
    evaluates = run.config.eval_every and run.world.is_main
    bytes_per_token = held_out.bytes_per_token(run.config.eval_batches) if evaluates else None
    of_data: dict[str, Any] = {"sequences": batches.sequences, "bytes_per_token": bytes_per_token}
    with (
        Recorder(run, record.folder, start_step=start, spikes=spikes, **of_data) as recorder,
        Prefetcher(batches, run.world.device) as data,
    ):
        record.recorder = recorder

        def evaluate(step: int) -> Any:
            if not run.config.eval_every or step % run.config.eval_every:
                return None
            progress.at("evaluation")
            batches = (to_device(held_out.batch(i), run.world.device) for i in range(run.config.eval_batches))
            return torch.stack([engine.eval_loss(batch) for batch in batches]).mean()

        saver = Saver(ready, engine, checkpoints, recorder.sync, spikes)
        try:
            last = train(
                engine,
                data,
                recorder,
                lr_at=run.lr_at,
                start=start,
                steps=run.config.steps,
                evaluate=evaluate,
                save=saver,
                stop_requested=stop,
            )
        except NumericError:
            # All ranks end here. What was being saved behind the training was saved before it.
            saver.wait()
            raise
        status = stop.exit_status if last < run.config.steps else 0
        record.steps_are_over(engine, status)
        if run.config.verdict and last == run.config.steps and last - start >= VERDICT_STEPS_MIN:
            record.evidence = _evidence(engine, data, recorder)
    progress.at("closing")
    # No rank closes its engine, which may delete files, while another still counts them.
    gather_objects(None)
    return status
