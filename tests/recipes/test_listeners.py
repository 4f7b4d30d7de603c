"""What a run opens to the network: nothing off the loopback, whatever the recipe."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from machines import machines
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
RUNS["bench"] = ["--recipes", "ddp", "--rounds", 1000, "--n-embd", 32, "--allow-busy"]


def listening(program):
    """Return the addresses that the program and all below it listen on, from /proc/net/tcp and tcp6, one for each socket."""
    process, connections = psutil.Process(program.process.pid), []
    for each in [process, *process.children(recursive=True)]:
        # git, say, ends meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            connections += each.net_connections("inet")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.mark.promise(
    "X10 | a rendezvous open to others, one byte to it, or junk in it | local ranks have no port; gloo's connections "
    "listen on the loopback alone; of torchrun's own port rank 0 warns; junk is an error in one line"
)
@pytest.mark.parametrize("run", RUNS)
def test_nothing_listens_off_the_loopback(run, tmp_path):
    if run in RECIPES and (reason := why_not_here(run)):
        pytest.skip(reason)
    words = RUNS[run] if run == "bench" else [*RUNS[run], "--out", tmp_path]
    started = Started(command(*words, module="benchmarks.engines" if run == "bench" else "gptscale.launchers.cli"))
    found = []
    if run == "bench":
        # The bench says nothing before its end, and each of its rounds has ranks of its own.
        started.wait_for(lambda: found.append(listening(started)) or len(found[-1]) >= 2)
    else:
        line = started.stdout.readline()
        while line and not line.startswith(("step ", "epoch ")):
            line = started.stdout.readline()
        assert line, started.ended()
        found.append(listening(started))
    started.process.send_signal(signal.SIGKILL)
    started.ended()
    assert set(found[-1]) <= {"127.0.0.1", "::1"}
    # Gloo's own listener of each rank.
    assert len(found[-1]) >= (0 if run in RECIPES and not RECIPES[run].axes else 2)


@pytest.mark.promise("X11 | a TensorBoard that serves to others | not here: no command starts a server")
def test_no_command_serves_anything():
    """The only sockets of the package are the ranks' rendezvous and a server of programs, which has a file for an address."""
    package = Path(__file__).parents[2]
    # A call's arguments are bound to their names by the same word.
    arguments = re.compile(r"signature\([\w.]+\)\.bind\(")
    opens = re.compile(r"create_server|\.bind\(|\.listen\(|serve_forever|HTTPServer|bind_all|tensorboard\.program")
    rooms = "common foresight launchers lenet ops recipes results".split()
    files = [path for room in rooms for path in (package / room).rglob("*.py")]
    found = {str(path.relative_to(package)) for path in files if opens.search(arguments.sub("", path.read_text()))}
    assert found <= {"common/process/rendezvous.py"}


@pytest.mark.promise("X10")
@pytest.mark.slow
def test_a_run_cannot_be_reached_from_another_network(tmp_path):
    """The rendezvous takes whatever is sent to it, so that nobody elsewhere may send."""
    with machines(tmp_path, "here", "elsewhere") as made:
        here, elsewhere = made.values()

        def reaches(port):
            return elsewhere.run("bash", "-c", f"exec 3<>/dev/tcp/{here.address}/{port}").returncode == 0

        serve = "import socket; s = socket.create_server(('', 7)); print(flush=True); s.accept()"
        with here.begin(sys.executable, "-c", serve, log=subprocess.PIPE) as server:
            server.stdout.readline()
            assert reaches(7)
        words = [*RUNS["ddp"], "--device", "cpu", "--out", tmp_path]
        run = here.begin(sys.executable, "-m", "gptscale.launchers.cli", *words, log=subprocess.PIPE)
        assert any(line.startswith(b"step ") for line in run.stdout)
        # psutil knows the sockets of this network alone. State 0A is that of a listener.
        tables = [Path(f"/proc/{run.pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        sockets = [line.split() for lines in tables for line in lines]
        ports = {int(address.split(":")[1], 16) for _, address, _, state, *_ in sockets if state == "0A"}
        assert len(ports) >= 2
        assert not [port for port in ports if reaches(port)]
        run.stdout.close()
    # All that runs on a machine ends with it.
    run.wait(400)
