"""Whether a program elsewhere can reach what a run opens. What each run listens on, test_worlds.py shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from machines import machines

ENDLESS = "run ddp --nproc 2 --n-layer 2 --n-embd 32 --seq-len 16 --data synthetic --steps 1000000".split()


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
        words = [*ENDLESS, "--no-tensorboard", "--device", "cpu", "--out", tmp_path]
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
