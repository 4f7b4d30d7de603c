"""`gptscale doctor`: what this machine has, which recipes can run on it, and what stands in the way of the others."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.measure.devices import device_name, peak_tflops
from gptscale.common.process import environments
from gptscale.common.process.environments import installed, is_among
from gptscale.common.settings.checks import OptionNeed, check_name
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.families import MODELS, preset
from gptscale.launchers.run.preflight import why_not_here
from gptscale.launchers.run.record import PACKAGES
from gptscale.ops.build import kernels as extension
from gptscale.recipes import RECIPES
from gptscale.results.render import console, table

# Environments beside this one, and the packages whose versions matter there.
BESIDE = {"colossalai": ("colossalai", "torch", "transformers")}
# NCCL and data workers keep their rings in shared memory. Containers often give 64 MiB.
SHARED_MEMORY_GIB_MIN = 1.0


@dataclass(frozen=True)
class DoctorOptions:
    """The form of the report, and what else to measure."""

    nodes: bool = False
    """Inside an allocation of Slurm: compare its nodes, their clocks, the results folder and the network between them."""
    out: Path = Path("results")
    """With --nodes: the results folder, which all nodes must see."""
    json: bool = False
    """As JSON, for a script or a bug report."""
    nvme_path: Path | None = None
    """Measure this folder's disk through DeepSpeed's file I/O (1 GiB), and say whether it would starve zero_infinity."""
    model: str = "1.6b"
    """Preset to judge the disk for."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("out", lambda c: c.nodes, "only nodes are asked for a folder", "add --nodes"),
        OptionNeed("json", lambda c: not c.nodes, "the comparison of nodes is a table", "leave out --nodes"),
        OptionNeed("model", lambda c: c.nvme_path is not None, "no disk is measured", "add --nvme-path FOLDER"),
    )


def main(argv: Sequence[str]) -> int:
    """Gather all facts and print them."""
    about = "What is installed, what can run here, and why not the rest."
    options = parse(DoctorOptions, argv, prog="gptscale doctor", about=about)
    if options.nodes:
        from gptscale.launchers.cluster.node_check import compare_nodes

        return compare_nodes(options.out)
    facts = gather()
    if options.nvme_path is not None:
        facts["nvme"] = nvme(options.nvme_path, options.model)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        show(facts)
    return 0


def gather() -> dict[str, Any]:
    """Return all facts as plain data."""
    triton = installed("triton")
    on_gpu = f"Triton {triton}" if triton else "PyTorch's own operations: Triton is not installed (pip install triton)"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed(name) for name in ("gptscale", *PACKAGES)},
        "environments": {name: environment(name) for name in BESIDE},
        "own_operators": {"cpu": extension.implementation(), "cuda": on_gpu},
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
    """Measure the disk of `folder`, and say what that means for training `model`."""
    check_name(model, MODELS, "model", "in --model")
    from gptscale.launchers.nvme import gemm_tflops, measure, verdict

    disk = measure(folder)
    tflops = gemm_tflops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {"folder": str(folder), **disk, "verdict": verdict(preset(model), disk, tflops)}


def operators() -> dict[str, str | None]:
    """Return DeepSpeed's operators, each with None if it is compiled here, or why not and the line that changes it."""
    if installed("deepspeed") is None:
        return {}
    return {op: str(lack) if (lack := deepspeed_ops.lack([op])) else None for op in deepspeed_ops.BUILDERS}


def environment(name: str) -> dict[str, str | None]:
    """Return the folder of an environment beside this one and the versions in it, None for what is not installed."""
    versions = {package: installed(package, name) for package in BESIDE[name]}
    return {"folder": str(environments.folder(name)), **versions}


def devices() -> list[dict[str, Any]]:
    """Return the CPU and every GPU with name, memory, and the dense peak of each precision that the table has."""
    places = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    result = []
    for place in places:
        name = device_name(place)
        facts: dict[str, Any] = {"device": str(place), "name": name}
        if place.type == "cuda":
            properties = torch.cuda.get_device_properties(place)
            capability = f"{properties.major}.{properties.minor}"
            facts |= {"memory_gib": properties.total_memory / 2**30, "capability": capability}
        peaks = {precision: peak_tflops(name, precision) for precision in ("fp8", "bf16", "fp16", "fp32")}
        result.append(facts | {"peak_tflops": {p: peak for p, peak in peaks.items() if peak is not None}})
    return result


def compiler() -> str | None:
    """Return the name that the C++ compiler of torch.compile gives itself, None if there is no compiler."""
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if path is None:
        return None
    output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    return output.splitlines()[0] if output else path


def free_gib(path: Path) -> float | None:
    """Return the free GiB of the file system that holds `path`, None if there is no such path."""
    return shutil.disk_usage(path).free / 2**30 if path.exists() else None


def show(report: dict[str, Any]) -> None:
    """Print the facts for people: what works first, then what does not and how to change that."""
    from rich.text import Text

    terminal = console(highlight=False, soft_wrap=True)
    versions = ", ".join(f"{name} {v}" for name, v in report["packages"].items() if v)
    terminal.print(f"Python {report['python']}, {versions}")
    terminal.print(f"{report['platform']}, {report['cpu_cores']} cores, backends {' '.join(report['backends'])}")
    shared = report["shared_memory_gib"]
    shown = "" if shared is None else f"{shared:.1f} GiB free in /dev/shm, "
    terminal.print(f"{shown}{report['free_disk_gib']:.1f} GiB of disk free here")
    for name, facts in report["environments"].items():
        packages = ", ".join(f"{package} {v}" for package in BESIDE[name] if (v := facts[package]))
        lack = f"no environment for {name}: {environments.remedy(name)}"
        terminal.print(f"{facts['folder']}: {packages}" if facts[name] else lack)
    for device in report["devices"]:
        memory = ""
        if "memory_gib" in device:
            memory = f", {device['memory_gib']:.0f} GiB, capability {device['capability']}"
        peaks = ", ".join(f"{p} {t:g}" for p, t in device["peak_tflops"].items())
        terminal.print(f"{device['device']}: {device['name']}{memory}, dense peak TFLOP/s: {peaks or 'unknown'}")
    rows = [
        (name, Text("yes", style="green") if reason is None else Text("no", style="red"), reason or "")
        for name, reason in report["recipes"].items()
    ]
    terminal.print(table(("recipe", "here", "why not"), rows), soft_wrap=False)
    own = report["own_operators"]
    terminal.print(f"gptscale's operators on a CPU: {own['cpu']}; on a GPU: {own['cuda']}")
    for op, reason in report["operators"].items():
        terminal.print(f"DeepSpeed's {op}: {reason or 'compiled'}")
    if "nvme" in report:
        disk = report["nvme"]
        rates = f"read {disk['read_gib_per_s']:.2f} GiB/s, write {disk['write_gib_per_s']:.2f} GiB/s"
        terminal.print(f"{disk['folder']}: {rates} through DeepSpeed's async_io")
        terminal.print(disk["verdict"])
    for warning in warnings(report):
        terminal.print(f"warning: {warning}", style="yellow")


def warnings(report: dict[str, Any]) -> list[str]:
    """Return what will cause errors later, each with its cure."""
    lines = []
    ranges = [(f"{name} {v}", v, environments.tried(name)) for name, v in report["packages"].items() if v]
    if untried := ", ".join(f"{what} ({tried})" for what, v, tried in ranges if not is_among(v, tried)):
        lines.append(f"outside what was tried: {untried}; gptscale parity says whether the losses are still equal")
    if report["cxx_compiler"] is None:
        lines.append("no C++ compiler: --compile will fail on the CPU; apt-get install g++")
    shared = report["shared_memory_gib"]
    if shared is not None and shared < SHARED_MEMORY_GIB_MIN:
        fix = "start the container with --shm-size=8g"
        lines.append(f"/dev/shm has {shared:.2f} GiB free: NCCL and data workers may fail; {fix}")
    if report["free_disk_gib"] < 10:
        why = "a checkpoint of 1.6b takes 17.4 GiB, and two are kept"
        lines.append(f"{report['free_disk_gib']:.1f} GiB of disk free: {why}")
    return lines
