"""Processes that have imported what programs import, 12 s for one with DeepSpeed: each is forked, and not started afresh."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import Process, WarmParent
from gptscale.foresight.fit.write import IMPORTS
from gptscale.foresight.mock_cuda.on_path import TASK

# The starter of a program, and the imports that programs share. A user's modules may start threads, which no fork has.
COMMAND = (sys.executable, "-m", "gptscale.foresight.fit.ranks")
SHARED = ("import torch", "from torch", "from transformers")
# An engine, and what it imports when it is first used. It changes what it finds: only its own programs get it.
ENGINES = {"deepspeed": ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"), "accelerate": ("accelerate",)}


class Parent:
    """A process with files of ours on its path, from which programs are forked that have the same there.

    environ: of any of them. folder: for a module that imports what they share. imports: lines of programs, beside IMPORTS.
    """

    def __init__(self, environ: Mapping[str, str], folder: Path, imports: Sequence[str]) -> None:
        lines = "\n".join((IMPORTS, *imports)).splitlines()
        (folder / "shared_imports.py").write_text("\n".join(line for line in lines if line.startswith(SHARED)))
        # Each program has a task of its own, with a folder.
        own = {TASK: json.dumps(json.loads(environ[TASK]) | {"folder": ""}), "PYTHONWARNINGS": "ignore"}
        self._environ = {**environ, **own, "PYTHONPATH": f"{folder}:{environ['PYTHONPATH']}"}
        self._parents, self._lock = dict[str, WarmParent](), threading.Lock()

    def start(self, command: Sequence[str], environ: Mapping[str, str], folder: Path | None, output: int) -> Process:
        """Fork a program as processes.afresh would start it, but in this process's own folder and without warnings."""
        count, file, *words = command[len(COMMAND) :]
        program = Program(COMMAND[-1], (count, str(Path(folder or "", file)), *words))
        engine = next((name for name in ENGINES if name in Path(folder or "", file).read_text()), "")
        with self._lock:
            if not self._parents:
                self._parents[""] = WarmParent.start(more=["shared_imports"], env=self._environ)
            if engine not in self._parents:
                self._parents[engine] = self._parents[""].with_imports(ENGINES[engine])
        return self._parents[engine].run(program, environ, output, output)

    def close(self) -> None:
        for name in sorted(self._parents, reverse=True):
            self._parents[name].close()
