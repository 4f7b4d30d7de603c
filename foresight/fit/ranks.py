"""The ranks of a written program on this CPU, forked from a process that has imported what it imports."""

from __future__ import annotations

import ast
import faulthandler
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path

# What a program imports is imported once, if it is of these. The user's own modules may start threads, which no fork has.
LIBRARIES = {"accelerate", "deepspeed", "torch", "transformers"}
PORT_DIGITS = 5
# torch imports them when they are first used: in each rank, if they are not there yet.
LATE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")


def main(count: int, file: str, *words: str) -> int:
    """Run a program on so many ranks, and return the exit status of the first that fails."""
    for node in ast.parse(Path(file).read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = getattr(node, "module", None)
        if (module or (names or [""])[0]).split(".")[0] in LIBRARIES:
            for name in names:
                # Some modules of transformers are imported by the first use of a name.
                getattr(importlib.import_module(module), name) if module else importlib.import_module(name)
    for name in LATE:
        importlib.import_module(name)
    # At its end a rank would wait for the thread of this timer, which a fork does not have.
    faulthandler.cancel_dump_traceback_later()
    reader, writer = os.pipe()
    ranks: dict[int, int] = {}
    for rank in range(count):
        pid = os.fork()
        if not pid:
            port = os.read(reader, PORT_DIGITS).decode()
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ |= {name: str(number) for name, number in numbers.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            sys.argv[:], sys.path[0] = [file, *words], str(Path(file).parent)
            runpy.run_path(file, run_name="__main__")
            return 0
        ranks[pid] = rank
    return _wait(ranks, writer)


def _wait(ranks: dict[int, int], writer: int) -> int:
    """Hold the ranks' rendezvous until all have ended, or one has failed: then the others are ended."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, f"{store.port:0{PORT_DIGITS}}".encode() * len(ranks))
    while ranks:
        pid, ended = os.wait()
        ranks.pop(pid, None)
        if status := os.waitstatus_to_exitcode(ended):
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return abs(status)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
