"""Anybody's program as one rank of a world that is not there, in its own interpreter and environment, and what it needed.

The program gets the mock of CUDA by LD_PRELOAD, and files on its path: on_path.py, as sitecustomize.py, boot.py, watch.py and
what these use. They answer for its peers, end it after some steps and leave a report. Nothing of it is left running, whatever it
has started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gptscale.common.errors import ConfigError
from gptscale.common.process.task import reason
from gptscale.common.process.warm_parent import Process
from gptscale.foresight.memory.constants import outside_of_torch
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.memory.timeline import Timeline, read_timeline
from gptscale.foresight.mock_cuda import boot, devices, watch
from gptscale.foresight.mock_cuda.build import COMPILED, prepare
from gptscale.foresight.price.record import Work, read_calls, recorded_step, summary
from gptscale.foresight.simulate import processes
from gptscale.foresight.simulate.interpreters import cuda_version, interpreter_of, torch_of
from gptscale.foresight.simulate.processes import ProgramError, Start, afresh, last_lines, running

# A call that torch knows of, and one that a library looks up by its name.
LACKS = re.compile(r"(?:the program called (?=\w+, which the mock lacks)|undefined symbol: )(\w+)")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
# The functions that are called as soon as a program has imported a module.
AFTER_IMPORT = {
    "torch": ("boot.begin", "watch.begin", "stand_ins.begin"),
    "torch.distributed.launcher.api": ("boot.launch_torchrun",),
    "torch.distributed.pipelining.stage": ("boot.know_gradients",),
    "torch.distributed.checkpoint.state_dict_saver": ("stand_ins.write_nothing",),
    "safetensors.torch": ("stand_ins.write_nothing", "stand_ins.load_nothing"),
    "transformers.modeling_utils": ("stand_ins.build_from_config",),
    "transformers.masking_utils": ("stand_ins.pack_nothing",),
    "deepspeed.ops.op_builder.builder": ("stand_ins.compile_nothing",),
    "torch._dynamo.eval_frame": ("record.pause_for_guards",),
    "torch._inductor.runtime.triton_heuristics": ("record.watch_inductor",),
    "torch._dynamo.repro.after_aot": ("stand_ins.write_nothing",),
    "torch._inductor.select_algorithm": ("record.choose_first",),
    "triton.runtime.jit": ("record.watch_triton",),
    "transformers.trainer": ("stand_ins.write_nothing",),
    "accelerate.commands.launch": ("boot.launch_accelerate",),
    "deepspeed.launcher.runner": ("boot.launch_deepspeed",),
    "deepspeed.runtime.engine": ("watch.watch_deepspeed",),
}
# The findings of a program's starter, and all files that tell of a simulation.
FOUND = "found.json"
LEFT = (FOUND, "report.json", watch.RECIPE_FACTS, "sends_to", "events.bin", "calls.tsv")
# Seconds for the interpreter to write its stacks.
WRITE_S = 1.0
# The share of this machine's free memory that a program may use, unless its task says more.
FREE_SHARE = 0.75


@dataclass(frozen=True)
class ProgramTask:
    """A command, and the rank of which world on which device it is to be.

    world: None for what its launcher says, or one. rank: a number or "last". host_limit: bytes of this machine's memory that it
    may take. no_weights, fake_batches, balanced_experts: see ProgramOptions. ends: after its last step, instead of by itself.
    folder: where it runs, None for the current one. keep: a folder for what it leaves, for read_simulation. inbox: a folder for
    the objects that ranks send to those simulated after them. torch_folder: of its interpreter's torch, None to look for it.
    start: what starts it.
    """

    command: Sequence[str]
    world: int | None
    rank: str
    device: devices.Properties
    gpus_per_node: int
    steps: int
    limit_s: int
    host_limit: float = field(default_factory=lambda: FREE_SHARE * psutil.virtual_memory().available)
    share_host_memory: bool = True
    no_weights: bool = False
    fake_batches: bool = False
    balanced_experts: bool = False
    ends: bool = True
    folder: Path | None = None
    keep: Path | None = None
    inbox: Path | None = None
    torch_folder: Path | None = None
    start: Start = afresh


@dataclass(frozen=True)
class Simulation:
    """One rank's memory, and what one step asks of its device.

    facts: what foresight/mock_cuda/watch.py reports, in bytes, and what a recipe's own program adds. recorded: the work of the
    last step in order, None if no whole step came after the first.
    """

    facts: dict[str, Any]
    timeline: Timeline
    recorded: list[Work] | None

    @property
    def host_s(self) -> float:
        """Return the seconds in which this machine's processor asks for a step that nobody records, if there was one.

        They are 0 for a program whose integers are computed, which takes its host longer.
        """
        *earlier, recorded = self.facts["step_host_s"][: self.facts["recorded"]]
        least = self.facts.get("host_s", min(earlier[1:], default=recorded))
        return 0.0 if self.facts["experts"] is not None else float(least)

    @property
    def step(self) -> dict[str, Any] | None:
        return summary(self.recorded) if self.recorded else None

    def memory(self, host_capacity: int | None = None) -> RankMemory:
        """Return the memory of the rank, with what lies on its device beside torch's allocator.

        host_capacity: bytes of the host that it may have, None if that is not known.
        """
        facts = self.facts
        allocated, reserved = (max(i[name] for i in facts["intervals"]) for name in ("allocated", "reserved"))
        return RankMemory(
            facts["rank"],
            self.timeline,
            allocated,
            reserved,
            facts["device_memory"],
            facts["pinned"],
            facts["host"],
            host_capacity,
            outside_of_torch(facts["communicators"]),
            facts["out_of_memory"],
        )


def run_program(task: ProgramTask) -> Simulation:
    """Run a program under the mock until it has stepped often enough, and return what it needed.

    Raises ConfigError if it cannot be started or asks for another world, and ProgramError if it ends without a report.
    """
    torch_folder = task.torch_folder or torch_of(interpreter_of(task.command))
    with tempfile.TemporaryDirectory(prefix="gptscale-program-") as name:
        folder = Path(name)
        environ = environment(task, torch_folder, folder)
        with running(task.command, environ, folder, task.folder, task.start) as (process, tail, family):
            ended_by_us = _wait(process, task, folder, family)
        if (folder / "refused.json").exists():
            raise ConfigError(*json.loads((folder / "refused.json").read_text()))
        if not (folder / "report.json").exists():
            _explain(process, task, folder, ended_by_us, last_lines(tail()))
        simulation = read_simulation(folder)
        facts, lacking = simulation.facts, list(dict.fromkeys(LACKS.findall(tail())))
        if facts["error"] and not facts["refused_bytes"]:
            why = f"it calls {lacking[0]}, which the mock of CUDA lacks" if lacking else facts["error"][:200]
            raise ProgramError(
                f"it failed after {facts['steps']} steps ({why})", "see its last lines", last_lines(tail())
            )
        if facts["device"] is None:
            raise ProgramError("it made its steps without a GPU", "let it use cuda", last_lines(tail()))
        if facts["refused_bytes"] and facts["steps"] < task.steps:
            facts["out_of_memory"] = _refusal(facts)
        elif process.poll() and not task.ends:
            raise ProgramError("it failed after its last step", "see its last lines", last_lines(tail()))
        facts["lacking"] = lacking
        if task.keep:
            (folder / FOUND).write_text(json.dumps({"out_of_memory": facts["out_of_memory"], "lacking": lacking}))
            for name in LEFT:
                if (folder / name).exists():
                    shutil.copy(folder / name, task.keep)
        return simulation


def read_simulation(folder: Path) -> Simulation:
    """Read what foresight/mock_cuda/watch.py has left in a folder, and what its starter found."""
    facts: dict[str, Any] = json.loads((folder / "report.json").read_text()) | {"out_of_memory": ""}
    for name in (watch.RECIPE_FACTS, FOUND):
        if (folder / name).exists():
            facts |= json.loads((folder / name).read_text())
    peers = folder / "sends_to"
    facts["sends_to"] = [int(line) for line in peers.read_text().splitlines()] if peers.exists() else []
    log = np.fromfile(folder / "events.bin", dtype=np.int64) if facts["device"] else np.empty(0, dtype=np.int64)
    timeline = read_timeline(log.reshape(-1, 3), facts.pop("owners"))
    calls = folder / "calls.tsv"
    return Simulation(facts, timeline, recorded_step(read_calls(calls)) if calls.exists() else None)


def _refusal(facts: Mapping[str, Any]) -> str:
    """Return what the allocator said, or would have said to a program that does not show it."""
    asked = f"CUDA out of memory. Tried to allocate {facts['refused_bytes'][-1] / 2**20:,.2f} MiB."
    said = re.search(r"CUDA out of memory\. Tried to allocate [\d.,]+ \w+\.", facts["error"])
    return f"{said[0] if said else asked} That was after {facts['steps']} steps."


def watched(task: ProgramTask, folder: Path, after_import: Mapping[str, Any] = AFTER_IMPORT) -> dict[str, str]:
    """Return the environment in which files of ours watch a program as a rank of its world, whatever its CUDA is."""
    path, here = folder / "path", Path(boot.__file__).parent
    names = ("boot", "experts", "record", "stand_ins", "watch")
    processes.put_on_path(path, here / "on_path.py", [here / f"{name}.py" for name in names])
    same = "steps world rank ends no_weights fake_batches balanced_experts".split()
    what = {name: getattr(task, name) for name in same} | {"folder": str(folder), "inbox": str(task.inbox or folder)}
    what |= {"deadline": time.time() + task.limit_s, "share": task.share_host_memory, "after_import": after_import}
    environ = processes.own_environment(path) | {boot.TASK: json.dumps(what)}
    if task.world:
        rank = task.world - 1 if task.rank == "last" else int(task.rank)
        environ |= boot.environment_of(rank, task.world, task.gpus_per_node) | boot.TORCHRUN
    return environ


def environment(task: ProgramTask, torch_folder: Path, folder: Path) -> dict[str, str]:
    """Return the environment in which a program is a rank of its world under the mock. folder: for files of ours."""
    environ, path = watched(task, folder), folder / "path"
    # Programs print what it says into their logs.
    (path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{devices.PREFIX}{task.device.name}'\n")
    (path / "nvidia-smi").chmod(0o755)
    program, *words = task.command
    launched = Path(program).name in LAUNCHERS or bool({*words[:3]} & {*LAUNCHER_MODULES})
    visible = task.gpus_per_node if launched else min(task.gpus_per_node, task.world or 1)
    library = prepare(torch_folder / "lib")
    mock = devices.environment(task.device, library, visible, cuda_version(torch_folder))
    behind = {"PATH": str(path), **{key: mock[key] for key in ("LD_LIBRARY_PATH", "LIBRARY_PATH")}}
    environ |= mock | {key: ":".join(filter(None, (value, os.environ.get(key)))) for key, value in behind.items()}
    compiled = library.parents[1] / COMPILED
    return environ | {f"{name}_CACHE_DIR": str(compiled / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}


def _wait(process: Process, task: ProgramTask, folder: Path, family: set[psutil.Process]) -> str:
    """Wait for a program's end or report, note its family, and return what was exceeded: "time", "host" or nothing."""
    deadline = time.monotonic() + task.limit_s
    while process.poll() is None:
        if task.ends and (folder / "report.json").exists():
            deadline = min(deadline, time.monotonic() + processes.GRACE_S)
        if time.monotonic() > deadline + WRITE_S:
            return "time"
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            family |= {first, *first.children(recursive=True)}
        if sum(map(processes.resident, filter(psutil.Process.is_running, family))) > task.host_limit:
            return "host"
        with suppress(subprocess.TimeoutExpired):
            process.wait(processes.LOOK_S)
    return ""


def _explain(process: Process, task: ProgramTask, folder: Path, exceeded: str, tail: str) -> None:
    """Raise ProgramError for a program that has left no report."""
    if exceeded == "host":
        fix = "simulate fewer layers, or raise --host-limit"
        raise ProgramError(f"it took more than {task.host_limit / 2**30:.1f} GiB of this machine's memory", fix, tail)
    if exceeded == "time":
        stacks = folder / f"stacks.{process.pid}"
        # The main thread comes last, its innermost call first.
        waited = stacks.read_text().split("\n\n")[-1].splitlines() if stacks.exists() else []
        what = f"it made no {task.steps} steps in {task.limit_s} s"
        lines = "\n".join([tail, *waited[: processes.TAIL_LINES]])
        raise ProgramError(what, "raise --time-limit, or see where it waited", lines)
    if not list(folder.glob("stacks.*")):
        raise ProgramError("it did not read PYTHONPATH", "start Python without -I, -E and -S", tail)
    status = process.wait()
    what = f"it ended with exit status {status} before a step" if status else "it ended before a step"
    if status < 0:
        what = f"it was ended by {signal.Signals(-status).name}"
    elif status:
        what += f" ({reason(tail)[:200]})"
    raise ProgramError(what, "see its last lines", tail)
