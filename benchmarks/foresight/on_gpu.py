"""How much memory does one rank of a world take on this machine's GPU? The mock of CUDA stands beside it elsewhere.

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

from benchmarks.foresight.memory import FILE_BYTES_MAX, PROGRAM
from benchmarks.measurement import write_csv
from gptscale.common.errors import DataError
from gptscale.common.measure.gpus import GIB
from gptscale.common.settings.checks import check_output_file, check_range
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.user_file import read_rows
from gptscale.foresight.mock_cuda import boot
from gptscale.foresight.mock_cuda.build import SOURCES
from gptscale.foresight.simulate.own_program import ProgramOptions
from gptscale.foresight.simulate.processes import last_lines, own_environment, put_on_path, running
from gptscale.foresight.simulate.program import AFTER_IMPORT
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

    def refuse(reason: str) -> DataError:
        return DataError(
            f"{options.programs} has no programs ({reason})", "in --programs", "see benchmarks/foresight/memory.py"
        )

    programs = [*read_rows(options.programs, FILE_BYTES_MAX, refuse, PROGRAM)]
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
    compiler = shutil.which("cc") or "gcc"
    flags = ["-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-std=gnu11", f"-I{SOURCES}"]
    parts = []
    # A program is not to take this for the mock of CUDA, and what is copied lies on a real device.
    renamed = ["-Dmock_is_loaded=unused_is_loaded", "-Dcopy=unused_copy"]
    for source, names in (
        (SOURCES / "state.c", renamed),
        (SOURCES / "nccl.c", []),
        (Path(__file__).with_suffix(".c"), []),
    ):
        parts.append(str(folder / f"{source.stem}.o"))
        subprocess.run([compiler, *flags[1:], *names, "-c", str(source), "-o", parts[-1]], check=True)
    library = folder / "peers.so"
    subprocess.run([compiler, *flags, *parts, "-o", str(library), "-ldl", "-lpthread"], check=True)
    return library


def measure(row: Mapping[str, str], library: Path, limit_s: int) -> dict[str, float]:
    """Run a program to its last step, and return the GiB that torch's allocator gave out and held, each at its highest."""
    options = parse(ProgramOptions, shlex.split(row["options"]), prog="options")
    command = shlex.split(row["command"])
    with tempfile.TemporaryDirectory(prefix="gptscale-program-") as name:
        folder = Path(name)
        environ = _environment(options, folder)
        environ["LD_PRELOAD"] = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
        with running(command, environ, folder, Path(row["folder"])) as (process, tail, _):
            report = folder / "report.json"
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        if not report.exists():
            raise RuntimeError(f"no report, exit status {process.returncode}\n{last_lines(tail())}")
        facts = json.loads(report.read_text())
        if facts["error"] or facts["steps"] < options.steps:
            raise RuntimeError(f"after {facts['steps']} steps: {facts['error']}\n{last_lines(tail())}")
        return {name: max(i[name] for i in facts["intervals"]) / GIB for name in ("allocated", "reserved")}


def _environment(options: ProgramOptions, folder: Path) -> dict[str, str]:
    path, here = folder / "path", Path(boot.__file__).parent
    names = ("boot", "experts", "record", "stand_ins", "watch")
    put_on_path(path, here / "on_path.py", [here / f"{name}.py" for name in names])
    what = {"folder": str(folder), "inbox": str(folder), "steps": options.steps, "world": options.world}
    what |= {"rank": options.rank, "ends": True, "times_host": False, "share": False, "deadline": time.time() + 1e6}
    what |= {"no_weights": False, "fake_batches": False, "balanced_experts": False, "after_import": WATCHED}
    environ = own_environment(path) | {boot.TASK: json.dumps(what)}
    if options.world:
        rank = options.world - 1 if options.rank == "last" else int(options.rank)
        # One GPU plays every one of a machine: its number is always 0.
        environ |= boot.environment_of(rank, options.world, options.gpus_per_node) | boot.TORCHRUN
        environ["LOCAL_RANK"] = "0"
    environ.setdefault("OMP_NUM_THREADS", "2")
    return environ | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}


if __name__ == "__main__":
    sys.exit(start(main))
