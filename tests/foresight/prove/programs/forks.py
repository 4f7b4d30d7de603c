"""A server that forks the ranks of train.py, so that a program takes a second and not the import of torch and its engines.

Each line of its input is a JSON list: the folder for what is noted, that of the reference or null, ranks, and the words of the
program. It answers with the exit statuses of the ranks, -9 for those that were ended after their last step.
"""

import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

TASK = "GPTSCALE_SIMULATED_PROGRAM"
LIMIT_S = 120.0


def be_rank(rank, ranks, port, folder, reference, words):
    # The rider was hung into torch when that was imported. It gets another task.
    module = sys.modules["gptscale_rider"]
    module._rider.folder = Path(folder)
    module._rider.reference = module.Reference(Path(reference)) if reference else None
    os.environ[TASK] = json.dumps(json.loads(os.environ[TASK]) | {"folder": folder})
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(f"{folder}/log.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["train.py", *words]
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


def serve(folder, reference, ranks, words):
    Path(folder).mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            try:
                be_rank(rank, ranks, port, folder, reference, words)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            os._exit(3)
        pids.append(pid)
    deadline, left = time.monotonic() + LIMIT_S, {}
    while len(left) < ranks:
        done = len([*Path(folder).glob("done.*")]) == ranks
        if done or time.monotonic() > deadline or any(left.values()):
            for pid in {*pids} - {*left}:
                os.kill(pid, signal.SIGKILL)
                left[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for pid in {*pids} - {*left}:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return list(left.values())


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    # Engines print as they are imported.
    os.dup2(2, 1)
    import accelerate  # noqa: F401
    import deepspeed  # noqa: F401
    import lightning_fabric  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    for line in sys.stdin:
        answers.write(json.dumps(serve(*json.loads(line))) + "\n")
        answers.flush()
