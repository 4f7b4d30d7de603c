"""Start torchrun on a machine that joins others at an endpoint, for multinode.sh.

python -m gptscale.launchers.endpoint HOST PORT [words of torchrun]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gptscale.common.process.rendezvous import RendezvousError, reach

ANSWERS_S = 10.0


def main(host: str, port: int, words: Sequence[str]) -> None:
    """Run torchrun with these words, or say that another program has the port and end with 2."""
    try:
        # torch itself waits for minutes for a program that takes the connection and says nothing.
        reach(host, port, ANSWERS_S)
    except RendezvousError:
        error = f"another program than torchrun has {host}:{port}, in --endpoint, name a port that is free on {host}"
        print(f"gptscale: error: {error}", file=sys.stderr)
        sys.exit(2)
    from torch.distributed.run import main as torchrun

    torchrun(list(words))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
