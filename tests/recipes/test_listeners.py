"""What a run opens to the network: nothing off the loopback, whatever the recipe."""

import signal

import psutil
import pytest
from worlds import Started, command

from gptscale.launchers.run.preflight import why_not_here
from gptscale.recipes import RECIPES

TINY = ["--model", "tiny", "--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 16, "--data", "synthetic"]
ENDLESS = ["--steps", 10**6, "--no-tensorboard", "--log-every", 1]
RUNS = {
    name: ["run", name, "--nproc", 4 if name == "hybrid_3d" else min(2, 1 + len(row.axes)), *TINY, *ENDLESS]
    for name, row in RECIPES.items()
}
RUNS["hybrid_3d"] += ["--tp-size", 2]
RUNS["lenet"] = ["lenet", "train", "--nproc", 2, "--epochs", 10**4, "--device", "cpu", "--no-tensorboard"]
RUNS["bench"] = ["bench", "engines", "--recipes", "ddp", "--rounds", 1000, "--n-embd", 32]


def listening(program):
    """Return the addresses that the program and all below it listen on, from /proc/net/tcp and tcp6, one for each socket."""
    process = psutil.Process(program.process.pid)
    connections = [c for p in [process, *process.children(recursive=True)] for c in p.net_connections("inet")]
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("run", RUNS)
def test_nothing_listens_off_the_loopback(run, tmp_path):
    if run in RECIPES and (reason := why_not_here(run)):
        pytest.skip(reason)
    words = RUNS[run] if run == "bench" else [*RUNS[run], "--out", tmp_path]
    started = Started(command(*words))
    if run == "bench":  # says nothing before its end
        started.wait_for(lambda: len(listening(started)) >= 3)
    else:
        line = started.stdout.readline()
        while line and not line.startswith(("step ", "epoch ")):
            line = started.stdout.readline()
        assert line, started.ended()
    addresses = listening(started)
    started.process.send_signal(signal.SIGKILL)
    started.ended()
    assert set(addresses) <= {"127.0.0.1", "::1"}
    # The launcher's rendezvous, and gloo's own listener of each rank.
    assert len(addresses) >= (1 if run in RECIPES and not RECIPES[run].axes else 3)
