"""The GPUs that the mock can simulate, and the environment of a process that is to see one."""

from __future__ import annotations

from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import SIMULATED, Properties
from gptscale.common.settings.checks import did_you_mean
from gptscale.foresight.mock_cuda.build import NVRTC

# The name of every device of the mock begins so. csrc/state.c writes it, and nothing can leave it out.
PREFIX = "mock of "
DEVICES = {name: gpu.properties for name, gpu in SIMULATED.items() if gpu.properties}


def device_named(name: str, where: str = "in --as", more: str = "") -> Properties:
    """Return what a device of the table tells of itself, or raise ConfigError with the nearest name and what `more` says."""
    if name not in DEVICES:
        near = next((each for each in DEVICES if each.startswith(name)), None)
        named = f"did you mean {near!r}?" if near else did_you_mean(name, DEVICES)
        raise ConfigError(f"unknown device {name!r}", where, named + more)
    return DEVICES[name]


def ranks_named(words: str, world: int | None, more: str) -> list[str]:
    """Return the words of --rank, or raise ConfigError for a rank that the world does not have. more: what else it may be."""
    found = [word.strip() for word in words.split(",")]
    for word in found:
        if word != "last" and not (word.isdecimal() and int(word) < (world or 2**16)):
            fix = f"use numbers from 0 {f'to {world - 1}' if world else 'on'}, last, or {more}"
            raise ConfigError(f"no such rank: {word[:40]!r}", "in --rank", fix)
    return found


def environment(device: Properties, library: Path, devices: int, cuda_version: int) -> dict[str, str]:
    """Return the variables under which a program sees `devices` devices of a kind, and no driver of this machine.

    cuda_version: as CUDA counts, 13000 for 13.0, of the torch that the program uses.
    """
    major, minor = device.capability
    numbers = {"DEVICES": devices, "VERSION": cuda_version, "MAJOR": major, "MINOR": minor}
    numbers |= {"CODE": device.code or 10 * major + minor, "SHARED_MULTIPROCESSOR": device.shared}
    same = ("multiprocessors", "threads", "blocks", "shared_block", "l2", "bus", "memory")
    numbers |= {name.upper(): getattr(device, name) for name in same}
    return {
        "GPTSCALE_MOCK_NAME": device.name,
        **{f"GPTSCALE_MOCK_{name}": str(value) for name, value in numbers.items()},
        # libcuda.so.1 is a link to the same file: torch and Triton open it by its name. So they do NVRTC.
        "LD_PRELOAD": f"{library}:{library.with_name(NVRTC.format(cuda_version // 1000))}",
        **{name: str(library.parent) for name in ("LD_LIBRARY_PATH", "LIBRARY_PATH")},
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
    }
