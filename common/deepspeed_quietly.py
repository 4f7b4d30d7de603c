"""DeepSpeed, imported so that it speaks only of errors: by itself it writes some hundred lines around each run."""

import logging

import torch

logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: record.levelno >= logging.ERROR)

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator, set_accelerator  # noqa: E402
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # noqa: E402

__all__ = ["deepspeed", "start"]


def start(device: torch.device) -> None:
    """DeepSpeed's own start inside an initialised process group, for a model on `device`."""
    if device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())  # it takes a GPU whenever it sees one
    # On CPUs it would compile, silently, a shared-memory all-reduce that only inference uses: no operator is "compatible".
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
