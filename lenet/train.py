"""One vision run, as a command and as a function: `gptscale lenet train`, or `torchrun -m gptscale.lenet.train`."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from gptscale.common.checkpoint import Reader, newest_valid
from gptscale.common.checkpoint_writer import save
from gptscale.common.devices import device_name
from gptscale.common.distributed import World, agree_any, gather_objects, process_group
from gptscale.common.errors import PREEMPTED_EXIT_STATUS, ConfigError, GptscaleError
from gptscale.common.host_memory import keep_freed_memory
from gptscale.common.metrics import peak_memory
from gptscale.launchers.entry import StopRequest, as_known, is_out_of_memory, share_cores
from gptscale.launchers.options import parse
from gptscale.launchers.record import git_commit
from gptscale.lenet.config import VisionConfig
from gptscale.lenet.engine import VisionEngine, strategy_of
from gptscale.lenet.loader import rank_part
from gptscale.lenet.plan import VisionPlan, check_same_work, make_plan, world_from_environment
from gptscale.lenet.recorder import Pending, Progressed, VisionRecorder
from gptscale.lenet.results import append_summary
from gptscale.results.writer import run_directory, write_json

EVAL_BATCH_SIZE = 1000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended. row: what was appended to lenet.csv."""

    exit_status: int
    row: dict[str, Any]
    folder: Path


def train(config: VisionConfig, world: World, *, quiet: bool = False) -> Outcome:
    """Plan and run `config` in this process; the process group of a world of several is started and ended here.

    Raises GptscaleError for what is wrong before the run starts; whatever goes wrong later is in the outcome, and has left
    its row.
    """
    began = time.perf_counter()
    plan = make_plan(config, world)
    data_time_s = time.perf_counter() - began
    keep_freed_memory()
    with ExitStack() as stack:
        is_distributed = strategy_of(config, world) in ("ddp", "fabric")
        if is_distributed and "MASTER_ADDR" not in os.environ:
            what = f"{config.strategy} needs a rendezvous, which no launcher has set"
            raise ConfigError(what, "in the environment", "start with `gptscale lenet train` or torchrun")
        stack.enter_context(process_group(world) if is_distributed else nullcontext())
        run = _Run(plan, began, data_time_s, quiet)
        try:
            check_same_options(plan)
            run.open(stack)
            status = PREEMPTED_EXIT_STATUS if run.train() else 0
            return run.finish("interrupted" if status else "ok", None, status)
        except BaseException as error:  # the row must be left whatever it was; nothing is swallowed
            known = as_known(error)
            if known is None:
                traceback.print_exc()
            print(f"gptscale: error: rank {world.rank}: {known or error}", file=sys.stderr, flush=True)
            status = known.exit_status if known else 130 if isinstance(error, KeyboardInterrupt) else 1
            stack.pop_all()  # after a failure nothing is torn down, see process_group
            return run.finish("oom" if is_out_of_memory(error) else "failed", known or error, status)


def check_same_options(plan: VisionPlan) -> None:
    """ConfigError if a rank was started with other options or data than rank 0."""
    hashes = gather_objects(plan.workload_hash)
    if others := [rank for rank, h in enumerate(hashes) if h != hashes[0]]:
        what = f"ranks {others} train something else than rank 0"
        raise ConfigError(what, "in their options or data", "start all alike")


class _Run:
    """A planned run from its folder to its row."""

    def __init__(self, plan: VisionPlan, began: float, data_time_s: float, quiet: bool) -> None:
        self.plan, self.began, self.data_time_s, self.quiet = plan, began, data_time_s, quiet
        self.run_id = ""
        self.recorder: VisionRecorder | None = None
        self.n_params: int | None = None

    @property
    def folder(self) -> Path:
        return self.plan.config.out / "runs" / self.run_id

    def open(self, stack: ExitStack) -> None:
        """Make and hold the folder; its name is rank 0's."""
        config = self.plan.config
        fresh = f"lenet-{config.model}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:4]}"
        self.run_id = str(gather_objects(config.run_name or fresh)[0])
        if self.plan.world.is_main:
            stack.enter_context(run_directory(config.out, self.run_id))
            write_json(self.folder / "run.json", self.noted())
        gather_objects(None)  # the folder exists before any other rank goes on

    def train(self) -> bool:
        """Build, resume, train, test; whether it stopped early because it was asked to."""
        plan = self.plan
        with StopRequest() as stop:
            engine = VisionEngine(plan.config, plan.shape, plan.world)
            self.n_params = sum(p.numel() for p in engine.module.parameters())
            start, past = resume(plan, engine)
            with VisionRecorder(
                plan, self.folder, start_step=start, past=past, began=self.began, quiet=self.quiet
            ) as recorder:
                self.recorder = recorder
                saver = _Saver(plan, engine, recorder, self.folder / "checkpoints")
                return train_epochs(plan, engine, recorder, start, saver, stop)

    def finish(self, status: str, error: BaseException | None, exit_status: int) -> Outcome:
        """Leave the row and the status; after a failure this rank's own memory must do, since its peers may be gone."""
        mine = peak_memory(self.plan.world.device)
        told = gather_objects(mine) if status in ("ok", "interrupted") else [mine]
        row = self.identity() | {"status": status, "error": "" if error is None else str(error)}
        row |= self.recorder.figures() if self.recorder else {}
        row |= {"data_time_s": self.data_time_s, "total_time_s": time.perf_counter() - self.began}
        for kind, column in (("allocated_gib", "mem_allocated"), ("reserved_gib", "mem_reserved"), ("rss_gib", "rss")):
            known = [value for memory in told if (value := getattr(memory, kind)) is not None]
            row[f"peak_{column}_gib"] = max(known) if known else None
        if self.plan.world.is_main and self.run_id:
            path = append_summary(self.plan.config.out, row)
            step = self.recorder.last_step if self.recorder else 0
            write_json(self.folder / "status.json", {"status": status, "error": row["error"], "step": step})
            if not self.quiet:
                print_summary(row, path, self.folder)
        return Outcome(exit_status, row, self.folder)

    def identity(self) -> dict[str, Any]:
        """The columns that are known before the first step."""
        plan = self.plan
        config, data, world = plan.config, plan.data, plan.world
        same = (
            "model batch_norm augment loader num_workers precision amp channels_last batch_size epochs optimizer lr lr_schedule "
            "weight_decay label_smoothing seed study variant"
        ).split()
        return {name: getattr(config, name) for name in same} | {
            "run_id": self.run_id,
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "gelu": config.gelu,
            "n_params": self.n_params,
            "data": data.name,
            "n_train": len(data.train),
            "n_test": len(data.test),
            "image_size": data.side,
            "strategy": strategy_of(config, world),
            "world_size": world.world_size,
            "steps": plan.steps,
            "device": device_name(world.device),
            "threads": torch.get_num_threads(),
            "host": socket.gethostname(),
            "torch_version": torch.__version__,
            "git_commit": git_commit(),
            "workload_hash": plan.workload_hash,
        }

    def noted(self) -> dict[str, Any]:
        """What run.json holds, for whoever wants to repeat the run."""
        return {
            "run_id": self.run_id,
            "config": dataclasses.asdict(self.plan.config),
            "identity": self.identity(),
            "workload": self.plan.work,
            "classes": self.plan.data.classes,
            "environment": {"python": platform.python_version(), "platform": platform.platform()},
        }


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
    config, per_epoch = plan.config, plan.walk.steps_per_epoch
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
            pending = Pending(step, epoch + 1, lr, loss, load_s=got - asked, update_s=now - got)
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


class _Saver:
    """Saves when it is due: every `save_every` epochs, at the end, and when the run is asked to stop."""

    def __init__(self, plan: VisionPlan, engine: VisionEngine, recorder: VisionRecorder, folder: Path) -> None:
        self.plan, self.engine, self.recorder, self.folder = plan, engine, recorder, folder

    def __call__(self, step: int, epochs: int) -> None:
        every = self.plan.config.save_every
        if not every or (epochs >= 0 and epochs % every and step != self.plan.steps):
            return
        self.recorder.sync()  # rows up to this step reach the disk first, so that a resumed CSV has no gap
        facts = {
            "recipe": "lenet",
            "world_size": self.plan.world.world_size,
            "workload": self.plan.work,
            "past": dataclasses.asdict(self.recorder.past),
        }
        engine: Any = self.engine  # has what the writer asks of an Engine: state and counters
        save(engine, self.folder, step, facts, keep=self.plan.config.keep_checkpoints)


def resume(plan: VisionPlan, engine: VisionEngine) -> tuple[int, Progressed]:
    """Load the checkpoint that --resume means, the same on every rank; the step to go on from, and what is known of the past."""
    if plan.resume is None:
        return 0, Progressed()
    found: str | GptscaleError | None = None
    if plan.world.is_main:
        try:
            explicit = (plan.resume / "manifest.json").exists()
            reader = Reader(plan.resume) if explicit else newest_valid(plan.resume)  # the plan verified an explicit one
            check_same_work(reader, plan)
            found = str(reader.path)
        except GptscaleError as error:
            found = error
    found = gather_objects(found)[0]
    if isinstance(found, GptscaleError):
        raise found
    reader = Reader(Path(str(found)))
    state: Any = engine
    reader.load_into(state)
    if plan.world.is_main:
        print(f"resumed from {reader.path}", flush=True)
    return reader.step, Progressed(**reader.manifest["past"])


def print_summary(row: dict[str, Any], csv: Path, folder: Path) -> None:
    """The block that ends a run."""

    def shown(key: str, form: str, unit: str = "") -> str:
        value = row.get(key)
        return "-" if value is None else f"{value:{form}}{unit}"

    print(
        f"\n{row['model']} {row['status']} on {row['data']}: loss {shown('loss_first', '.4f')} -> {shown('loss_last', '.4f')}, "
        f"test accuracy {shown('test_accuracy', '.2%')} of {row['n_test']:,} images\n"
        f"  speed   {shown('images_per_s', ',.0f')} images/s, load {shown('load_s', '.6f', ' s')} and update "
        f"{shown('update_s', '.6f', ' s')} per step, training {shown('train_time_s', '.1f', ' s')}, in all "
        f"{shown('total_time_s', '.1f', ' s')} (99 % after {shown('seconds_to_99', '.1f', ' s')})\n"
        f"  memory  peak allocated {shown('peak_mem_allocated_gib', '.3f', ' GiB')}, "
        f"host {shown('peak_rss_gib', '.2f', ' GiB')}\n"
        f"  files   {folder}\n"
        f"  row     {csv}",
        flush=True,
    )


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


def bare_resume(argv: Sequence[str]) -> list[str]:
    """`--resume` with no path behind it means the newest checkpoint of the named run."""
    result = []
    for i, word in enumerate(argv):
        result.append(word)
        if word == "--resume" and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            result.append("auto")
    return result


if __name__ == "__main__":
    status = worker(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is on disk, and the interpreter's teardown could only hang on a peer that is gone
