"""`gptscale doctor`: what this machine has, which recipes can run on it, and what stands in the way of the others."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name, peak_tflops
from gptscale.common.process import environments
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.launchers.run.preflight import why_not_here
from gptscale.ops.build import kernels as extension
from gptscale.recipes import RECIPES
from gptscale.results.render import console, table

PACKAGES = (
    "gptscale",
    "torch",
    "numpy",
    "transformers",
    "datasets",
    "deepspeed",
    "fairscale",
    "accelerate",
    "lightning-fabric",
)
BESIDE = {"colossalai": ("colossalai", "torch", "transformers")}  # environment: what is worth knowing of it
SHARED_MEMORY_GIB_MIN = 1.0  # NCCL's and data workers' rings; containers often give 64 MiB


@dataclass(frozen=True)
class DoctorOptions:
    """How to tell it."""

    json: bool = False
    """As JSON, for a script or a bug report."""
    nvme_path: Path | None = None
    """Measure this folder's disk through DeepSpeed's file I/O (1 GiB), and say whether it would starve zero_infinity."""
    model: str = "1.6b"
    """Preset to judge the disk for."""


def main(argv: Sequence[str]) -> int:
    """Gather and show."""
    options = parse(
        DoctorOptions, argv, prog="gptscale doctor", about="What is installed, what can run here, and why not the rest."
    )
    found = gather()
    if options.nvme_path is not None:
        found["nvme"] = nvme(options.nvme_path, options.model)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return 0


def gather() -> dict[str, Any]:
    """All facts, as plain data."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
        "environments": {name: environment(name) for name in BESIDE},
        "own_operators": {"cpu": extension.implementation(), "cuda": triton()},
        "operators": operators(),
        "recipes": {name: why_not_here(name) for name in RECIPES},
        "devices": devices(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "cpu_threads_of_torch": torch.get_num_threads(),
        "cxx_compiler": compiler(),
        "backends": [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()],
        "shared_memory_gib": free_gib(Path("/dev/shm")),
        "free_disk_gib": free_gib(Path.cwd()),
    }


def nvme(folder: Path, model: str) -> dict[str, Any]:
    """What the disk of `folder` does, and what that means for `model`."""
    if model not in PRESETS:
        raise ConfigError(f"unknown model {model!r}", "in --model", did_you_mean(model, PRESETS))
    from gptscale.launchers.bench.nvme import gemm_tflops, measure, verdict

    disk = measure(folder)
    tflops = gemm_tflops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    said = verdict(PRESETS[model], disk, tflops)
    return {
        "folder": str(folder),
        "read_gib_per_s": disk.read_gib_per_s,
        "write_gib_per_s": disk.write_gib_per_s,
        "verdict": said,
    }


def triton() -> str:
    """What the package's operators use on a GPU."""
    there = version("triton")
    return f"Triton {there}" if there else "PyTorch's own operations: Triton is not installed (pip install triton)"


def operators() -> dict[str, str | None]:
    """DeepSpeed's operators: None if compiled here, else why not and the line that changes it."""
    if version("deepspeed") is None:
        return {}
    return {op: str(lack) if (lack := deepspeed_ops.lack([op])) else None for op in deepspeed_ops.BUILDERS}


def environment(name: str) -> dict[str, str | None]:
    """An environment beside this one: its folder, and the versions in it; all None if it is not there."""
    versions = {package: environments.installed(package, name) for package in BESIDE[name]}
    return {"folder": str(environments.folder(name)), **versions}


def version(distribution: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[dict[str, Any]]:
    """The CPU and every GPU: name, memory, and the dense peak of each precision that the table knows."""
    places = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    found = []
    for place in places:
        name = device_name(place)
        facts: dict[str, Any] = {"device": str(place), "name": name}
        if place.type == "cuda":
            properties = torch.cuda.get_device_properties(place)
            facts |= {
                "memory_gib": properties.total_memory / 2**30,
                "capability": f"{properties.major}.{properties.minor}",
            }
        facts["peak_tflops"] = {
            p: peak for p in ("fp8", "bf16", "fp16", "fp32") if (peak := peak_tflops(name, p)) is not None
        }
        found.append(facts)
    return found


def compiler() -> str | None:
    """The C++ compiler that torch.compile uses on a CPU, as it names itself."""
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    return said.splitlines()[0] if said else path


def free_gib(path: Path) -> float | None:
    """Free space of the file system that holds `path`."""
    return shutil.disk_usage(path).free / 2**30 if path.exists() else None


def show(found: dict[str, Any]) -> None:
    """For people: what works first, then what does not and how to change that."""
    terminal = console()
    installed = ", ".join(f"{name} {v}" for name, v in found["packages"].items() if v)
    terminal.print(f"Python {found['python']}, {installed}", highlight=False, soft_wrap=True)
    terminal.print(
        f"{found['platform']}, {found['cpu_cores']} cores, backends {' '.join(found['backends'])}", highlight=False
    )
    for name, facts in found["environments"].items():
        there = ", ".join(f"{package} {v}" for package in BESIDE[name] if (v := facts[package]))
        said = f"{facts['folder']}: {there}" if facts[name] else f"no environment for {name}: make {name}"
        terminal.print(said, highlight=False, soft_wrap=True)
    for device in found["devices"]:
        memory = (
            f", {device['memory_gib']:.0f} GiB, capability {device['capability']}" if "memory_gib" in device else ""
        )
        peaks = ", ".join(f"{p} {t:g}" for p, t in device["peak_tflops"].items())
        terminal.print(
            f"{device['device']}: {device['name']}{memory}, dense peak TFLOP/s: {peaks or 'unknown'}", highlight=False
        )
    rows = [
        (name, "[green]yes[/]" if reason is None else "[red]no[/]", reason or "")
        for name, reason in found["recipes"].items()
    ]
    terminal.print(table(("recipe", "here", "why not"), rows))
    own = found["own_operators"]
    terminal.print(
        f"gptscale's operators on a CPU: {own['cpu']}; on a GPU: {own['cuda']}", highlight=False, soft_wrap=True
    )
    for op, reason in found["operators"].items():
        terminal.print(f"DeepSpeed's {op}: {reason or 'compiled'}", highlight=False, soft_wrap=True)
    if "nvme" in found:
        disk = found["nvme"]
        rates = f"read {disk['read_gib_per_s']:.2f} GiB/s, write {disk['write_gib_per_s']:.2f} GiB/s"
        terminal.print(f"{disk['folder']}: {rates} through DeepSpeed's async_io", highlight=False, soft_wrap=True)
        terminal.print(disk["verdict"], highlight=False, soft_wrap=True)
    for warning in warnings(found):
        terminal.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def warnings(found: dict[str, Any]) -> list[str]:
    """What will bite later, each with its cure."""
    said = []
    if found["cxx_compiler"] is None:
        said.append("no C++ compiler: --compile will fail on the CPU; apt-get install g++")
    shared = found["shared_memory_gib"]
    if shared is not None and shared < SHARED_MEMORY_GIB_MIN:
        said.append(
            f"/dev/shm has {shared:.2f} GiB free: NCCL and data workers may fail; start the container with --shm-size=8g"
        )
    if found["free_disk_gib"] < 10:
        said.append(
            f"{found['free_disk_gib']:.1f} GiB of disk free: a checkpoint of 1.6b takes 17.4 GiB, and two are kept"
        )
    return said
