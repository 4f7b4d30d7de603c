"""Start torchrun on a machine that joins others at an endpoint, for multinode.sh.

python -m gptscale.launchers.endpoint HOST PORT [words of torchrun]
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

ANSWERS_S = 10.0
LEVEL = "TORCH_CPP_LOG_LEVEL"


def has_store(host: str, port: int, limit_s: float) -> bool:
    """Return whether a store of torch answers at a port within `limit_s` seconds.

    torch itself waits for minutes for a program that takes the connection and says nothing.
    """
    from torch.distributed import TCPStore

    answered = threading.Event()

    def ask() -> None:
        # All errors of torch's stores are RuntimeErrors.
        with suppress(RuntimeError):
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answered.is_set()


def main(host: str, port: int, words: Sequence[str]) -> None:
    """Run torchrun with these words, or say that another program has the port and end with 2."""
    # torch would write a page of frames for each attempt. It reads this when it is loaded. The ranks get it as it was.
    level = os.environ.get(LEVEL)
    os.environ.setdefault(LEVEL, "ERROR")
    is_there = has_store(host, port, ANSWERS_S)
    if level is None:
        del os.environ[LEVEL]
    if not is_there:
        error = f"another program than torchrun has {host}:{port}, in --endpoint, name a port that is free on {host}"
        print(f"gptscale: error: {error}", file=sys.stderr, flush=True)
        # The thread that asked may still wait.
        os._exit(2)
    from torch.distributed.run import main as torchrun

    torchrun(list(words))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
