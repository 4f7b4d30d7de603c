"""DeepSpeed's own start, so that it uses the device that the run uses and compiles nothing."""

from __future__ import annotations

import torch


def start(device: torch.device) -> None:
    """Inside an initialised process group, for a model on `device`."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())  # it takes a GPU whenever it sees one
    # On CPUs it would compile, silently, a shared-memory all-reduce that only inference uses: no operator is "compatible".
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
