"""A server that forks the ranks of a program, so that each takes a second, and not the import of torch and its engines.

    python benchmarks/foresight/prove_ranks.py PROGRAM [PATH]

Each line of its input is a JSON list: the folder for what is noted, that of the reference or null, ranks, and the words of the
program. It answers with the exit statuses of the ranks, -9 for those that were ended after their last step. It runs on the
path of `gptscale prove` (foresight/prove/program.py), and imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

TASK = "GPTSCALE_SIMULATED_PROGRAM"
LIMIT_S = 120.0


def be_rank(program: str, environ: dict[str, str], folder: str, reference: str | None, words: list[str]) -> None:
    """Be one rank of a program. What rides in torch since its import gets another task."""
    module: Any = sys.modules["gptscale_rider"]
    task = json.loads(os.environ[TASK]) | {"folder": folder, "reference": reference}
    module.rider.take(task)
    os.environ.update(environ | {TASK: json.dumps(task)})
    log = os.open(f"{folder}/log.{environ.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv = [program, *words]
    runpy.run_path(program, run_name="__main__")


def serve(program: str, folder: str, reference: str | None, ranks: int, words: list[str]) -> list[int]:
    """Run all ranks of a program until they are through or one fails, and return their exit statuses."""
    Path(folder).mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(free.getsockname()[1])
    pids = []
    for rank in map(str, range(ranks)):
        if not (pid := os.fork()):
            try:
                own = world | {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
                be_rank(program, own, folder, reference, words)
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                sys.stderr.flush()
            os._exit(3)
        pids.append(pid)
    deadline, left = time.monotonic() + LIMIT_S, dict[int, int]()
    while len(left) < ranks:
        if len([*Path(folder).glob("done.*")]) == ranks or time.monotonic() > deadline or any(left.values()):
            for pid in {*pids} - {*left}:
                os.kill(pid, signal.SIGKILL)
        for pid in {*pids} - {*left}:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return list(left.values())


def main(program: str, path: str = "") -> None:
    """Import what is slow to import, and serve. path: of what a program imports beside libraries."""
    sys.path[:0] = filter(None, [path])
    answers = os.fdopen(os.dup(1), "w")
    # Engines print as they are imported.
    os.dup2(2, 1)
    for name in (
        "accelerate",
        "deepspeed",
        "pytorch_lightning",
        "transformers",
        "torch._dynamo",
        "torch.distributed.fsdp",
    ):
        __import__(name)
    __import__("torch.distributed.tensor.parallel")
    for line in sys.stdin:
        answers.write(json.dumps(serve(program, *json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
