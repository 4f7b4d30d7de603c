"""A program of somebody else for some steps on this CPU, in its own interpreter and environment, and what it computed.

It runs as it is, with all its ranks and gloo between them. Files of ours on its path (rider.py and parts.py, copied) note what
each step computes. It is ended when all ranks have made their steps, and nothing of it is left running.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gptscale.common.errors import ConfigError
from gptscale.common.process.task import reason
from gptscale.foresight.mock_cuda import on_path
from gptscale.foresight.simulate import processes
from gptscale.foresight.simulate.interpreters import interpreter_of

# The functions that are called as soon as a program has imported a module.
AFTER_IMPORT = {
    "torch": ["rider.begin"],
    "torch.nn.attention.flex_attention": ["no_cuda.plain_flex_attention"],
    "torch.distributed.fsdp.fully_sharded_data_parallel": ["rider.watch_fsdp"],
    "deepspeed.runtime.engine": ["rider.watch_deepspeed"],
    "colossalai.zero.low_level.low_level_optim": ["rider.refuse_colossalai"],
    "colossalai.zero.gemini.gemini_ddp": ["rider.refuse_colossalai"],
}
# The same where the CPU takes the place of CUDA.
WITHOUT_CUDA = {
    "torch": ["no_cuda.begin", "rider.begin"],
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": ["no_cuda.sums_of_fsdp"],
}
# A program that fails with such words is tried again with the CPU in the place of CUDA.
NAMES_CUDA = re.compile(r"cuda|nccl|nvidia|gpu|accelerator", re.IGNORECASE)
# Where torchrun begins to say that a rank has failed, and what torch puts before a rank's lines.
TORCHRUN = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.MULTILINE)
RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
# Said of a candidate that fails or is wrong.
RESHAPED = "the reference's samples have another shape than its own: if its loader cuts them, add --own-data"
# When a rank is through, the others have this long, or as long as it took.
BEHIND_S = 30.0


@dataclass(frozen=True)
class ProveTask:
    """A command, and how many steps of it are noted.

    reference: the folder of what the reference has noted, whose weights and batches it is given. limit_s: for all of it.
    without_cuda: the CPU takes the place of CUDA. environ: variables beside its own. start: what starts it.
    """

    command: Sequence[str]
    steps: int
    limit_s: int
    own_data: bool = False
    reference: Path | None = None
    without_cuda: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    start: processes.Start = processes.afresh


class Recording:
    """What all ranks of a program have noted. by_kind: the lines of each kind, with the number of a rank as "rank"."""

    def __init__(self, folder: Path, without_cuda: bool) -> None:
        self.folder, self.without_cuda = folder, without_cuda
        self.by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for file in sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem)):
            for line in file.read_text().splitlines():
                # The last line of a program that was ended may be cut.
                if line.endswith("}"):
                    fact = json.loads(line) | {"rank": int(file.stem)}
                    self.by_kind[fact["kind"]].append(fact)

    @property
    def world(self) -> int:
        return max((fact["world"] for fact in self.by_kind["model"]), default=1)

    def steps(self) -> dict[int, int]:
        """Return the steps that each rank has made."""
        made = dict.fromkeys(range(self.world), 0)
        return made | {fact["rank"]: fact["number"] for fact in self.by_kind["step"]}

    def array(self, fact: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Return the tensor of a line in double precision."""
        kind, count = np.dtype(fact["stored"]), int(np.prod(fact["shape"]))
        with (self.folder / f"{fact['rank']}.bin").open("rb") as file:
            file.seek(fact["at"])
            return np.fromfile(file, kind, count).reshape(fact["shape"]).astype(np.float64)


def record(task: ProveTask, folder: Path) -> Recording:
    """Run a program until all its ranks have stepped often enough, and return what they noted.

    Raises ConfigError if it cannot be started, and ProgramError if it does not make its steps.
    """
    interpreter_of(task.command)
    recording, error = _try(task, folder)
    if error and not task.without_cuda and NAMES_CUDA.search(f"{error.what} {error.tail.splitlines()[-4:]}"):
        # It has this from the import of torch on, which a fork would have behind it.
        again = replace(task, without_cuda=True, start=processes.afresh)
        recording, error = _try(again, folder.with_name(f"{folder.name}-cpu"))
    if error:
        raise error
    return recording


def environment(task: ProveTask, folder: Path) -> dict[str, str]:
    """Make a folder for what a program notes, and return the environment in which it does."""
    folder.mkdir(exist_ok=True)
    modules = [Path(__file__).with_name(f"{name}.py") for name in ("rider", "parts", "no_cuda")]
    processes.put_on_path(folder / "path", Path(on_path.__file__), modules)
    what: dict[str, Any] = {"steps": task.steps, "own_data": task.own_data, "deadline": time.time() + task.limit_s}
    what |= {"folder": str(folder), "reference": str(task.reference) if task.reference else None}
    what["after_import"] = AFTER_IMPORT | (WITHOUT_CUDA if task.without_cuda else {})
    # Each rank has a core of its own at most, and all sums have one order.
    own = processes.own_environment(folder / "path") | {on_path.TASK: json.dumps(what)}
    return {"OMP_NUM_THREADS": "1"} | own | dict(task.environ)


def _try(task: ProveTask, folder: Path) -> tuple[Recording, processes.ProgramError | None]:
    environ = environment(task, folder)
    began, first = time.monotonic(), None
    with processes.running(task.command, environ, folder, start=task.start) as (process, tail, _):
        while not all_done(folder):
            status = process.poll()
            if first is None and any(folder.glob("done.*")):
                first = time.monotonic()
            behind = first is not None and time.monotonic() > first + max(BEHIND_S, first - began)
            if status is not None or behind or time.monotonic() > began + task.limit_s:
                break
            time.sleep(processes.LOOK_S)
    if (folder / "refused.json").exists():
        raise ConfigError(*json.loads((folder / "refused.json").read_text()))
    recording = Recording(folder, task.without_cuda)
    return recording, None if all_done(folder) else _why(recording, task, status, tail())


def all_done(folder: Path) -> bool:
    """Return whether all ranks have made their last step."""
    done = [*folder.glob("done.*")]
    return bool(done) and len(done) >= int(done[0].read_text())


def _why(recording: Recording, task: ProveTask, status: int | None, text: str) -> processes.ProgramError:
    """Return the error for a program whose ranks have not made their steps. text: what it printed."""
    said = RANK.sub("", TORCHRUN.split(text, 1)[0]).strip() or text
    tail = processes.last_lines(said)
    made = recording.steps()
    least, most = min(made.values()), max(made.values())
    steps = f"{least} of {task.steps} steps"
    what, fix = f"it ended after {steps}", f"give --steps {least}, or let it train longer"
    if status is None and least < most:
        slow = min(made, key=lambda rank: made[rank])
        what, fix = f"rank {slow} made {least} steps while another made {most}", "let all ranks make the same steps"
    elif status is None:
        stacks = sorted(recording.folder.glob("stacks.*"), key=lambda file: file.stat().st_size)
        waited = stacks[-1].read_text().split("\n\n")[-1].splitlines() if stacks else []
        what, fix = f"it made {steps} in {task.limit_s} s", "raise --time-limit, or see where it waits"
        tail = "\n".join([tail, *waited[: processes.TAIL_LINES]])
    elif status:
        what, fix = f"it failed after {steps} ({reason(said)[:200]})", "see its last lines"
    elif not any(recording.folder.glob("stacks.*")):
        what, fix = "it did not read PYTHONPATH", "start Python without -I, -E and -S"
    elif not recording.by_kind["loss"]:
        what, fix = "it ended without a backward pass", "name a program that trains with torch"
    elif not most:
        what, fix = "it ended without a step of an optimizer of torch", "derive yours from torch.optim.Optimizer"
    if recording.by_kind["reshaped"]:
        fix += f"; {RESHAPED}"
    return processes.ProgramError(what, fix, tail)
