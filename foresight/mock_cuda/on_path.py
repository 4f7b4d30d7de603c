"""The start of a program of others, simulated or proved: Python reads this file, as sitecustomize.py, before all else.

It runs the sitecustomize of the user, if there is one. When the program has imported a module of its task's table, it gives that
to the files of ours that lie beside it. It imports nothing that the program might not have.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

# The task of a program, as JSON, which its starter writes.
TASK = "GPTSCALE_SIMULATED_PROGRAM"
# The functions that are called as soon as the program has imported a module. Its starter's task says them.
AFTER_IMPORT: dict[str, list[str]] = {}


def no_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to connect to another machine: nothing is downloaded, uploaded or waited for."""
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = str(arguments[1][0])
        if not host.startswith("127.") and host not in ("::1", "localhost", ""):
            raise ConnectionRefusedError(f"a program under gptscale has no network, and asks for {host}")


class ImportWatch(MetaPathFinder):
    """It finds a module as Python would, and calls the functions of its table after the module has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not (functions := AFTER_IMPORT.pop(name, [])):
            return None
        spec = importlib.util.find_spec(name)
        # Some only ask where a module is, as transformers for torch, and import it later.
        AFTER_IMPORT[name] = functions
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: Any) -> None:
            run(module)
            for file, function in (words.split(".") for words in AFTER_IMPORT.pop(name, [])):
                getattr(importlib.import_module(f"gptscale_{file}"), function)(module)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


def take_task() -> None:
    """Write this process's stacks at the deadline of its task, if it still runs. A fork has no such timer."""
    task = json.loads(os.environ[TASK])
    if os.path.isdir(task["folder"]):
        stacks = open(os.path.join(task["folder"], f"stacks.{os.getpid()}"), "w")  # noqa: SIM115
        faulthandler.dump_traceback_later(max(0.01, task["deadline"] - time.time()), file=stacks)


def start() -> None:
    """Begin to watch this interpreter, and run the sitecustomize of the user."""
    here = os.path.dirname(os.path.abspath(__file__))
    AFTER_IMPORT.update(json.loads(os.environ[TASK])["after_import"])
    take_task()
    sys.addaudithook(no_network)
    sys.meta_path.insert(0, ImportWatch())
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours
    sys.path.append(here)


if __name__ == "sitecustomize":
    start()
