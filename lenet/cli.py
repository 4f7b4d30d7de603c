"""`gptscale lenet WORD`: the vision experiments, one command each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module

from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_name, check_range
from gptscale.common.settings.command_line import bare_resume, parse
from gptscale.lenet.run.config import OF_PROCESSES, RUN_IMPORTS, VisionConfig, imports_of, option_words

# Every word but `train` is a module of lenet/studies with a `STUDY`, or with a `main` where it is no grid of runs.
USAGE = {
    "train": "[--nproc N] [options]: train one vision model.",
    "backend": "[--per-rank 32,128] [--nproc N]: NCCL against Gloo, with the spread of equal runs.",
    "baseline": "[--data D] [--preset P] [--seeds 1,2,3]: LeNet-5 beside the reports' figures, with a figure.",
    "batch": "[--per-rank 16,32,64,128] [--nproc N]: what the batch of a rank does to time, memory and accuracy.",
    "memory": "[--model M] [--batch-size N] [options]: what fills the memory in one step, as a picture.",
    "minigrad": "[--model pure_linear|simple_conv|LeNet]: train with a small autograd, beside the old figures.",
    "fused": "[--data D] [options]: 2 and 10 convolutions, fused with bias and ReLU or not, cuDNN on and off.",
    "precision": "[--modes M] [options]: fp32, tf32, fp16, bf16, with autocast and without, and loss scales.",
    "report": "[--results FOLDER] [--out FOLDER]: every figure of the exercise and the reports beside ours, as one page.",
    "strategies": "[--nproc N] [options]: one process, DataParallel, DDP, Fabric and the Trainer with equal loaders.",
    "workers": "[--workers 0,2,4] [options]: what worker processes of the DataLoader buy.",
}


@dataclass(frozen=True)
class TrainOptions:
    """The options of `gptscale lenet train`: the run's, and its number of processes."""

    run: VisionConfig = field(default_factory=VisionConfig)
    nproc: int = 1
    """Processes on this machine; with several the batch is split by DistributedDataParallel."""

    def __post_init__(self) -> None:
        check_range(self.nproc, 1, 1024, "nproc")


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` begins with and return its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print("The vision experiments: LeNet-5 and others on digits, MNIST, CIFAR-10 or a folder of images.\n")
        for word, usage in USAGE.items():
            print(f"  gptscale lenet {word} {usage}")
        print("\nEvery command has --help. A first try: gptscale lenet train --epochs 3")
        return 0
    check_name(argv[0], USAGE, "command", "after lenet")
    if argv[0] == "train":
        return train(argv[1:])
    module = import_module(f"gptscale.lenet.studies.{argv[0]}")
    if not hasattr(module, "STUDY"):
        return int(module.main(argv[1:]))
    from gptscale.lenet.studies.study import run_study

    return run_study(argv[0], module.STUDY, argv[1:])


def train(argv: Sequence[str]) -> int:
    """Train one vision model, in this process or in several."""
    options = parse(TrainOptions, bare_resume(argv), prog="gptscale lenet train", about="Train a vision model.")
    if options.nproc > 1 or options.run.strategy in OF_PROCESSES:
        return launch_run(options.run, options.nproc)
    from gptscale.common.process.begin import share_cores
    from gptscale.launchers.run.verdict import tell_verdict
    from gptscale.lenet.run.preflight import world_from_environment
    from gptscale.lenet.run.worker import train as train_here

    world = world_from_environment(options.run)
    share_cores()
    outcome = train_here(options.run, world)
    if outcome.exit_status == 0:
        tell_verdict(outcome.folder)
    return outcome.exit_status


def launch_run(config: VisionConfig, nproc: int) -> int:
    """Check a run, train it in `nproc` processes on this machine, and return its exit status.

    A run whose rank 0 is killed gets its row from here.
    """
    begin_warm_parent(config.device, RUN_IMPORTS, imports_of(config))
    from gptscale.common.process.world import runs_on_cuda, world_of
    from gptscale.launchers.run.record import new_run_id
    from gptscale.launchers.run.verdict import tell_verdict
    from gptscale.lenet.run.columns import LENET
    from gptscale.lenet.run.preflight import ready_run
    from gptscale.results.record.launch_with_row import launch_with_row

    # A mistake is one line of this process, before any other process starts.
    ready_run(config, world_of(config.device, config.dist_timeout_s, nproc))
    name = config.run_name or new_run_id(f"lenet-{config.model}")
    words = option_words(dataclasses.replace(config, run_name=name))
    program = Program("gptscale.lenet.run.worker", tuple(words), imports=imports_of(config))
    folder = config.out / "runs" / name
    status = launch_with_row(program, nproc, folder, LENET, fork=not runs_on_cuda(config.device))
    if status == 0:
        tell_verdict(folder)
    return status
