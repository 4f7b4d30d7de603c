"""The GPUs that the mock can play, and the environment of a process that is to see one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import did_you_mean

GIB, MIB = 2**30, 2**20
# The name of every device of the mock begins so. csrc/state.c writes it, and nothing can leave it out.
PREFIX = "mock of "


@dataclass(frozen=True)
class MockDevice:
    """What a program can ask a GPU about itself.

    memory: bytes that the driver reports, a little less than the name says. threads, blocks: per multiprocessor, at most.
    shared_block, shared: bytes of shared memory per block (at most) and per multiprocessor. bus: bits.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    multiprocessors: int
    threads: int = 2048
    blocks: int = 32
    shared_block: int = 232448
    shared: int = 233472
    l2: int = 50 * MIB
    bus: int = 5120


# Memory: "total capacity" in torch's messages for this device (github.com/pytorch/pytorch/issues). The rest: CUDA C++ programming
# guide, table of compute capabilities, and NVIDIA's architecture papers of each generation.
DEVICES = {
    "a100-80": MockDevice(
        "NVIDIA A100-SXM4-80GB", int(79.25 * GIB), (8, 0), 108, 2048, 32, 166912, 167936, 40 * MIB, 5120
    ),
    "h100-80": MockDevice("NVIDIA H100 80GB HBM3", int(79.11 * GIB), (9, 0), 132),
    "h200": MockDevice("NVIDIA H200", int(139.81 * GIB), (9, 0), 132, bus=6144),
    "b200": MockDevice("NVIDIA B200", int(178.35 * GIB), (10, 0), 148, l2=126 * MIB, bus=8192),
    "24gb": MockDevice(
        "NVIDIA GeForce RTX 4090", int(23.64 * GIB), (8, 9), 128, 1536, 24, 101376, 102400, 72 * MIB, 384
    ),
}


# PyTorch's wheels hold no kernels for 8.9. It runs those for 8.6, and CUB chooses its parameters by that.
CODE_FOR = {(8, 9): 86}


def device_named(name: str) -> MockDevice:
    """Return a device of the table, or raise ConfigError with the nearest name."""
    if name not in DEVICES:
        raise ConfigError(f"unknown device {name!r}", "in --as", did_you_mean(name, DEVICES))
    return DEVICES[name]


def environment(device: MockDevice, library: Path, devices: int, cuda_version: int) -> dict[str, str]:
    """Return the variables under which a program sees `devices` devices of a kind, and no driver of this machine.

    cuda_version: as CUDA counts, 13000 for 13.0, of the torch that the program uses.
    """
    numbers = {
        "DEVICES": devices,
        "VERSION": cuda_version,
        "MAJOR": device.capability[0],
        "MINOR": device.capability[1],
        "CODE": CODE_FOR.get(device.capability, 10 * device.capability[0] + device.capability[1]),
        "MULTIPROCESSORS": device.multiprocessors,
        "THREADS": device.threads,
        "BLOCKS": device.blocks,
        "SHARED_BLOCK": device.shared_block,
        "SHARED_MULTIPROCESSOR": device.shared,
        "L2": device.l2,
        "BUS": device.bus,
        "MEMORY": device.memory,
    }
    return {
        "GPTSCALE_MOCK_NAME": device.name,
        **{f"GPTSCALE_MOCK_{name}": str(value) for name, value in numbers.items()},
        # libcuda.so.1 is a link to the same file: torch and Triton open it by its name.
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
    }
