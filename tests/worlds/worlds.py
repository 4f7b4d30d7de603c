"""Run the gptscale command, and world scripts as ranks, forked from one warm parent of the whole test process."""

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from table_rows import rows as rows

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch
from gptscale.common.process.task import run_captured
from gptscale.common.process.warm_parent import Process, start_process
from gptscale.recipes import RECIPES, WORKER_IMPORTS, get

WORLDS = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# tyro imports typeguard when it parses options. A user's launcher has done that before it forks ranks.
IMPORTS = (*WORKER_IMPORTS, "gptscale.launchers.run.start", "typeguard", "gptscale.common.data.library")


def imports_of(words: tuple[Any, ...], environment: str) -> tuple[str, ...]:
    """Return what the warm parent imports once for all programs like this one: also the engines of the recipes named."""
    if environment:
        return (*IMPORTS, *get("colossal_tensor").imports)
    rows = [RECIPES[name] for word in map(str, words) for name in word.replace(",", " ").split() if name in RECIPES]
    engines = (row.engine_imports for row in rows if not row.environment)
    return tuple(dict.fromkeys([*IMPORTS, *chain(*engines)]))


def overridden(words: tuple[Any, ...]) -> tuple[str, ...]:
    """Return words in which an option, and its value, stand where they are given last: a test changes what others share."""
    groups: list[list[str]] = []
    for word in map(str, words):
        if word.startswith("--") or not groups:
            groups = [group for group in groups if group[0].partition("=")[0] != word.partition("=")[0]]
            groups.append([])
        groups[-1].append(word)
    return tuple(word for group in groups for word in group)


def command(*words: Any, environment: str = "", module: str = "gptscale.launchers.cli") -> Program:
    """Return the program that `gptscale words` is, in an environment beside this one if `environment` names it.

    module: another one, such as that of a bench.
    """
    return Program(module, overridden(words), environment, imports_of(words, environment))


def gptscale(
    *words: Any, timeout: float = 800, environment: str = "", module: str = "gptscale.launchers.cli", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `gptscale words`, or another module with them, and return how it ended and what it printed."""
    program = command(*words, environment=environment, module=module)
    return run_captured(program, timeout=timeout, environ={**os.environ, **ENVIRONMENT, **variables})


def ok(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gptscale words`, which must end well."""
    ended = gptscale(*words, **options)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended


def ranks(script: str, nproc: int, *words: Any, environment: str = "", status: int = 0) -> None:
    """Run one of the world_*.py beside this file as ranks, which must end with `status`."""
    program = Program(str(WORLDS / script), overridden(words), environment, imports_of(words, environment))
    assert launch(program, nproc, environment=ENVIRONMENT) == status


def steps(run: Path) -> Any:
    """Return the steps that a run has logged, as a pandas frame by step."""
    return pd.read_csv(run / "steps.csv", float_precision="round_trip").set_index("step")


def deviation(found: Any, expected: Any, *columns: str) -> float:
    """Return the largest relative deviation of the steps of a run from those of another, in some columns."""
    return max(((found[column] - expected[column]).abs() / expected[column]).max() for column in columns)


def state(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the tensors of a checkpoint that verifies, and its counters."""
    reader = Reader(checkpoint).verify()
    return {name: reader.read(name) for name in reader.shapes}, reader.manifest["counters"]


# Many tests compare with the same saved run, and reading it takes as long as the test's own checkpoint.
saved_state = functools.lru_cache(16)(state)


def assert_same_state(ours: Path, saved: Path) -> None:
    """Assert that two checkpoints have the same tensors, bit for bit, and the same counters."""
    (a, counters), (b, saved_counters) = state(ours), saved_state(saved)
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]
    assert counters == saved_counters


class Started:
    """A program that runs while the test goes on. Its output is read from `stdout` and `stderr`."""

    def __init__(self, program: Program, **variables: str) -> None:
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        environ = {**os.environ, **ENVIRONMENT, **variables}
        self.process: Process = start_process(program, environ, stdout=its_out, stderr=its_err)
        os.close(its_out)
        os.close(its_err)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    def ended(self, timeout: float = 300) -> tuple[int, str, str]:
        """Wait for the end, and return the status and the rest of stdout and of stderr, each up to a pipe's size."""
        status = self.process.wait(timeout)
        with self.stdout, self.stderr:
            return status, self.stdout.read(), self.stderr.read()

    def wait_for(self, condition: Callable[[], object], timeout: float = 300) -> None:
        """Wait until `condition` holds. Fail if the program ends before, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.ended()
            assert time.monotonic() < deadline, "nothing came of it"
            time.sleep(0.05)

    def listening(self) -> list[str]:
        """Return the addresses that it and all below it listen on, from /proc/net/tcp and tcp6, one for each socket."""
        process, connections = psutil.Process(self.process.pid), []
        for each in [process, *process.children(recursive=True)]:
            # git, say, ends meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                connections += each.net_connections("inet")
        return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks that it has forked, in their order."""
        names = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            # It may end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                names[process] = process.name()
        return sorted((p for p, n in names.items() if n.startswith("rank ")), key=lambda p: int(names[p].split()[1]))
