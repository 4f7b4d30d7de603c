"""`gptscale lenet WORD`: the vision experiments, a word each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import did_you_mean
from gptscale.lenet.run.config import VisionConfig


@dataclass(frozen=True)
class NprocOptions:
    """How many processes."""

    nproc: int = 1
    """Processes on this machine; with several the batch is split by DistributedDataParallel."""

    def __post_init__(self) -> None:
        if not 1 <= self.nproc <= 1024:
            raise ConfigError(f"nproc {self.nproc} is out of range", "in --nproc", "use 1 to 1024")


@dataclass(frozen=True)
class TrainOptions:
    """A run's options and the launcher's."""

    run: VisionConfig = field(default_factory=VisionConfig)
    launch: NprocOptions = field(default_factory=NprocOptions)


def train(argv: Sequence[str]) -> int:
    """gptscale lenet train [--nproc N] [options]: train one vision model."""
    from gptscale.common.process.begin import share_cores
    from gptscale.common.settings.command_line import bare_resume, parse
    from gptscale.lenet.run.preflight import world_from_environment
    from gptscale.lenet.run.start import start
    from gptscale.lenet.run.worker import train as run

    options = parse(TrainOptions, bare_resume(argv), prog="gptscale lenet train", about="Train a vision model.")
    if options.launch.nproc == 1 and options.run.strategy not in ("ddp", "fabric"):
        share_cores()
        return run(options.run, world_from_environment(options.run)).exit_status
    return start(options.run, options.launch.nproc)


def baseline(argv: Sequence[str]) -> int:
    """gptscale lenet baseline [--data D] [--preset P] [--seeds 1,2,3]: LeNet-5 beside the texts' figures, with a figure."""
    from gptscale.lenet.studies.baseline import main

    return main(argv)


def bench(argv: Sequence[str]) -> int:
    """gptscale lenet bench [--data D] [options]: images/s and accuracy beside a plain PyTorch script, in the same run."""
    from gptscale.lenet.studies.bench import main

    return main(argv)


def workers(argv: Sequence[str]) -> int:
    """gptscale lenet workers [--workers 0,2,4] [options]: what worker processes of the DataLoader buy."""
    from gptscale.lenet.studies.workers import main

    return main(argv)


def strategies(argv: Sequence[str]) -> int:
    """gptscale lenet strategies [--nproc N] [options]: one process, DataParallel, DDP and Fabric with equal loaders."""
    from gptscale.lenet.studies.strategies import main

    return main(argv)


def fused(argv: Sequence[str]) -> int:
    """gptscale lenet fused [--data D] [options]: 2 and 10 convolutions, fused with bias and ReLU or not, cuDNN on and off."""
    from gptscale.lenet.studies.fused import main

    return main(argv)


def memory(argv: Sequence[str]) -> int:
    """gptscale lenet memory [--model M] [--batch-size N] [options]: what fills the memory in one step, as a picture."""
    from gptscale.lenet.studies.memory import main

    return main(argv)


def precision(argv: Sequence[str]) -> int:
    """gptscale lenet precision [--modes M] [options]: fp32, tf32, fp16, bf16, with autocast and without, and loss scales."""
    from gptscale.lenet.studies.precision import main

    return main(argv)


def batch(argv: Sequence[str]) -> int:
    """gptscale lenet batch [--per-rank 16,32,64,128] [--nproc N]: what the batch of a rank does to time, memory and accuracy."""
    from gptscale.lenet.studies.batch import main

    return main(argv)


def backend(argv: Sequence[str]) -> int:
    """gptscale lenet backend [--per-rank 32,128] [--nproc N]: NCCL against Gloo, with the spread of equal runs."""
    from gptscale.lenet.studies.backend import main

    return main(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "backend": backend,
    "baseline": baseline,
    "batch": batch,
    "bench": bench,
    "memory": memory,
    "fused": fused,
    "precision": precision,
    "strategies": strategies,
    "workers": workers,
}


def main(argv: Sequence[str]) -> int:
    """Run the word that `argv` begins with."""
    if not argv or argv[0] in ("-h", "--help"):
        print("The vision experiments: LeNet-5 and others on digits, MNIST, CIFAR-10 or a folder of images.\n")
        for command in COMMANDS.values():
            print("  " + str(command.__doc__))
        print("\nEvery command has --help. A first try: gptscale lenet train --epochs 3")
        return 0
    if argv[0] not in COMMANDS:
        raise ConfigError(f"unknown command {argv[0]!r}", "after lenet", did_you_mean(argv[0], COMMANDS))
    return COMMANDS[argv[0]](argv[1:])
