"""Measure the memory that one rank of a world takes on this machine's GPU, to compare it with what simulate says.

python -m benchmarks.foresight.on_gpu --programs FILE --csv OUT

FILE has the columns of benchmarks/foresight/memory.py, which reads OUT: there stand the GiB that torch's allocator gave out here.
A rank is alone as it is in a simulation, and watched by the same code. NCCL is the mock's, whose peers answer at once, and all
else is real. Several programs share the GPU while they fit: `gib` says what a program takes, as simulate has it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.foresight.memory import programs_of
from benchmarks.measurement import write_csv
from gptscale.common.measure.gpus import GIB
from gptscale.common.settings.checks import check_output_file, check_range
from gptscale.common.settings.command_line import parse
from gptscale.foresight.mock_cuda.build import FLAGS, SOURCES
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.simulate.own_program import ProgramOptions
from gptscale.foresight.simulate.processes import last_lines, running
from gptscale.foresight.simulate.program import AFTER_IMPORT, ProgramTask, watched
from gptscale.launchers.cli import start

# A context of CUDA, cuBLAS's workspaces and compiled kernels, beside what torch's allocator holds.
CONTEXT_GIB = 1.5
# The launchers become the rank, and DeepSpeed's own steps count. Weights and batches stay what they are.
WATCHED = {
    name: [function for function in functions if not function.startswith(("stand_ins", "record"))]
    for name, functions in AFTER_IMPORT.items()
}


@dataclass(frozen=True)
class OnGpuOptions:
    """Which programs to run, and how many at a time."""

    programs: Path
    """A CSV of programs, of which gib is what each takes at most."""
    csv: Path
    """File for what they took: a row for what was allocated, and one for what was reserved."""
    at_once: int = 6
    """Programs at a time, if they fit on the GPU together."""
    together_gib: float | None = None
    """GiB that they may take together. By default all that is free."""
    limit_s: int = 120
    """Seconds for each program."""
    minutes: float = 60.0
    """After these no further program begins."""

    def __post_init__(self) -> None:
        check_range(self.at_once, 1, 64, "at_once")
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Run the programs, write what they took as soon as it is known, and return 1 if one failed."""
    import pandas as pd
    import torch

    about = "The memory of one rank of a world on this machine's GPU, beside what simulate says."
    options = parse(OnGpuOptions, argv, prog="python -m benchmarks.foresight.on_gpu", about=about)

    programs = programs_of(options.programs)
    ends = time.monotonic() + 60 * options.minutes
    free = options.together_gib or torch.cuda.mem_get_info()[0] / GIB
    told, failed = list[dict[str, Any]](), list[str]()
    room, whole = threading.Condition(), free

    def run(row: Mapping[str, str]) -> None:
        nonlocal free
        needs = float(row["gib"]) + CONTEXT_GIB
        with room:
            room.wait_for(lambda: free >= min(needs, whole))
            free -= needs
        try:
            if time.monotonic() > ends:
                return
            took = measure(row, library, options.limit_s)
        except RuntimeError as error:
            failed.append(row["what"])
            print(f"{row['what']}: {error}", flush=True)
            return
        finally:
            with room:
                free += needs
                room.notify_all()
        print(f"{row['what']}: {took['allocated']:.3f} GiB allocated, {took['reserved']:.3f} reserved", flush=True)
        told.extend({**row, "figure": figure, "gib": gib} for figure, gib in took.items())
        write_csv(pd.DataFrame(told), options.csv)

    with tempfile.TemporaryDirectory(prefix="gptscale-on-gpu-") as folder:
        library = compile_peers(Path(folder))
        with ThreadPoolExecutor(options.at_once) as pool:
            [*pool.map(run, programs)]
    print(f"{len(told) // 2} programs measured, {len(failed)} failed")
    return int(bool(failed))


def compile_peers(folder: Path) -> Path:
    """Compile the mock's NCCL for a process whose CUDA is real, and return its library."""
    library = folder / "peers.so"
    command = [shutil.which("cc") or "gcc", *shlex.split(FLAGS), f"-I{SOURCES}", "-o", str(library)]
    subprocess.run([*command, str(Path(__file__).with_suffix(".c")), "-ldl", "-lpthread"], check=True)
    return library


def measure(row: Mapping[str, str], library: Path, limit_s: int) -> dict[str, float]:
    """Run a program to its last step, and return the GiB that torch's allocator gave out and held, each at its highest."""
    options = parse(ProgramOptions, shlex.split(row["options"]), prog="options")
    command, device = shlex.split(row["command"]), device_named(options.device_kind)
    sizes = options.gpus_per_node, options.steps, limit_s
    task = ProgramTask(command, options.world, options.rank, device, *sizes, share_host_memory=False)
    with tempfile.TemporaryDirectory(prefix="gptscale-program-") as name:
        folder = Path(name)
        environ = watched(task, folder, WATCHED)
        # One GPU stands for every one of a machine: its number is always 0.
        environ |= {"LOCAL_RANK": "0"} if options.world else {}
        environ["LD_PRELOAD"] = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
        with running(command, environ, folder, Path(row["folder"])) as (process, tail, _):
            report = folder / "report.json"
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        if not report.exists():
            raise RuntimeError(f"no report, exit status {process.poll()}\n{last_lines(tail())}")
        facts = json.loads(report.read_text())
        if facts["error"] or facts["steps"] < options.steps:
            raise RuntimeError(f"after {facts['steps']} steps: {facts['error']}\n{last_lines(tail())}")
        return {name: max(i[name] for i in facts["intervals"]) / GIB for name in ("allocated", "reserved")}


if __name__ == "__main__":
    sys.exit(start(main))
