"""Measure what is no part of a step's products: copies, the disk, the launch of an operator, memory outside of tensors."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from gptscale.common.measure.devices import device_name
from gptscale.foresight.calibrate.file import CalibratedMachine, MachineFact
from gptscale.foresight.calibrate.timing import Timing, timings
from gptscale.foresight.time.operations import AmountShape
from gptscale.foresight.time.work import Operation

COPIED, WRITTEN = 2**26, 2**27


def this_machine(device: torch.device, world: int) -> CalibratedMachine:
    """Return what the figures of this machine are filed under."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return CalibratedMachine(device_name(device), torch.__version__.partition("+")[0], threads, world)


def time_copies(device: torch.device, on: str, repeats: int) -> dict[Operation, Timing]:
    """Return the seconds of a copy to the device and one back, from pinned memory. Without CUDA there are none."""
    if device.type != "cuda":
        return {}
    here, there = (
        torch.empty(COPIED, dtype=torch.uint8, pin_memory=True),
        torch.empty(COPIED, dtype=torch.uint8, device=device),
    )
    calls = {"copy from host": lambda: there.copy_(here), "copy to host": lambda: here.copy_(there)}
    measured = timings(calls, device, repeats)
    return {Operation(kind, AmountShape(COPIED), on): timing for kind, timing in measured.items()}


def time_disk(folder: Path, on: str) -> dict[Operation, Timing]:
    """Return the seconds to write a file of 128 MiB to disk and to read it, once."""
    shape, block = AmountShape(WRITTEN), os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(WRITTEN // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        # Otherwise it is read from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began_read = time.perf_counter()
        with open(file.name, "rb", buffering=0) as again:
            while again.read(2**20):
                pass
        read = time.perf_counter()
    seconds = {"disk write": written - began, "disk read": read - began_read}
    return {Operation(kind, shape, on): Timing(s, 0.3, 1) for kind, s in seconds.items()}


def facts(device: torch.device, repeats: int) -> list[MachineFact]:
    """Return the time of an operator that computes nothing, and on CUDA what is used beside torch's tensors."""
    x = torch.zeros(1, device=device)
    launch = timings({"launch": lambda: x.add_(1)}, device, repeats)["launch"]
    machine_facts = [MachineFact("launch of an operator", launch.seconds, "s", launch.spread)]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        machine_facts.append(MachineFact("context and libraries", outside / 2**30, "GiB"))
    return machine_facts
