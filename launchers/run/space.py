"""The space that a run will take on the disk and in memory, estimated before its first step."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

from gptscale.common.checkpoint.folders import EVENT_BYTES, OTHER_BYTES, ROW_BYTES, check_free
from gptscale.common.errors import ConfigError
from gptscale.common.settings.run import Run


def check_space(run: Run, folder: Path) -> None:
    """Raise StorageError if the checkpoints and logs of a run cannot fit on the disk of its `folder`."""
    config = run.config
    saves = config.steps // config.save_every if config.save_every else 0
    if config.save_last or (config.save_every and config.steps % config.save_every):
        saves += 1
    n = run.gpt.n_params_in_memory
    log_bytes = OTHER_BYTES + config.steps * (ROW_BYTES + EVENT_BYTES * config.tensorboard)
    check_free(
        folder,
        saves=saves,
        keep=config.keep_checkpoints,
        # It holds fp32 whatever the run keeps its state in.
        checkpoint_bytes=round(4 * n + run.optimizer_bytes(n, "fp32")),
        log_bytes=log_bytes,
    )


def check_memory(run: Run, offload: str) -> None:
    """Raise ConfigError if weights, gradients and moments cannot fit even if they are split over all ranks, or a batch cannot.

    offload: cpu adds the host's memory to a GPU's; with nvme the disk is checked instead. What a recipe keeps whole, and
    most activations, come on top, so that a run which passes may still end out of memory.
    """
    if offload == "nvme":
        return
    world = run.world
    needed = run.state_bytes / world.world_size
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    present = (memory.total + swap.total) / int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
    if world.device.type == "cuda":
        on_device = torch.cuda.get_device_properties(world.device).total_memory
        present = on_device + (present if offload == "cpu" else 0)
    what = f"{run.gpt.n_params:,} parameters, their gradients and moments"
    fix = "use a smaller --model, --n-embd or --n-layer, or more machines"
    _refuse_beyond(present, needed, what, "in the model's size", fix)
    # The input of one block in 16 bits, which tensor ranks may share, and the ids of the step's inputs and targets.
    batch = run.batch
    tokens, ids = batch.micro_batch_size * run.rank_seq_len, batch.sequences_per_rank * run.seq_len
    needed = 2 * tokens * run.gpt.n_embd / run.tp_size + 16 * ids
    what = f"micro-batches of {batch.micro_batch_size:,} and {batch.sequences_per_rank:,} sequences a step"
    fix = "use a smaller --global-batch-size, or --micro-batch-size 1"
    _refuse_beyond(present, needed, what, "in the batch's size", fix)


def _refuse_beyond(present: float, needed: float, what: str, where: str, fix: str) -> None:
    if needed > present:
        needs = f"each rank needs {needed / 2**30:,.2f} GiB of memory or more for {what}"
        raise ConfigError(f"{needs}, it has {present / 2**30:,.2f}", where, fix)
