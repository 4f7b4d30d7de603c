"""The ranks of a written program on this CPU, or its one rank under the mock, forked from a process with its libraries."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path

from gptscale.common.process.fork_server import die_with_parent, is_fresh
from gptscale.foresight.mock_cuda import on_path

PORT_DIGITS = 5


def main(count: int, file: str, *words: str) -> int:
    """Run a program on so many ranks, and return the exit status of the first that fails."""
    if is_fresh() and on_path.TASK in os.environ:
        # Files of ours came with torch, before the fork. Now they learn whose process this is.
        on_path.take_task()
        for name in ("watch", "rider"):
            if module := sys.modules.get(f"gptscale_{name}"):
                getattr(module, name).take(json.loads(os.environ[on_path.TASK]))
    if count == 1:
        return _run(file, words)
    reader, writer = os.pipe()
    ranks: dict[int, int] = {}
    for rank in range(count):
        pid = os.fork()
        if not pid:
            die_with_parent()
            port = os.read(reader, PORT_DIGITS).decode()
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ |= {name: str(number) for name, number in numbers.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            return _run(file, words)
        ranks[pid] = rank
    return _wait(ranks, writer)


def _run(file: str, words: tuple[str, ...]) -> int:
    sys.argv[:], sys.path[0] = [file, *words], str(Path(file).parent)
    try:
        runpy.run_path(file, run_name="__main__")
    except Exception:
        # Whoever watches the program hears of it there.
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


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
