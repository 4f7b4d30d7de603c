"""The launcher with tiny ranks, which need no torch and print whole lines, as workers do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = "import sys; from gptscale.common.process.ranks import launch; sys.exit(launch([sys.executable, '-c', sys.argv[1]], int(sys.argv[2])))"
RANK = "import os, sys, time, signal; from gptscale.common.process.begin import whole_lines; whole_lines(); rank = int(os.environ['RANK']);"


def start(code, nproc=2):
    command = [sys.executable, "-c", LAUNCH, RANK + code, str(nproc)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(code, nproc=2, timeout=40):
    launcher = start(code, nproc)
    out, err = launcher.communicate(timeout=timeout)
    return launcher.returncode, out, err


def children(pid):
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, timeout=10, check=False
    )
    return [int(p) for p in found.stdout.split()]


def gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_ranks_know_their_place():
    status, out, _ = ended('sys.stdout.write(f\'{rank} {os.environ["WORLD_SIZE"]} {os.environ["LOCAL_RANK"]}\\n\')', 3)
    assert status == 0
    assert sorted(out.splitlines()) == [f"{r} 3 {r}" for r in range(3)]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_ranks_that_print_at_once_stay_whole(monkeypatch, unbuffered):
    """The ranks wait for each other by the clock, so that they do print at once."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    at = "time.sleep(-time.time() % 1);"
    for name in ("stdout", "stderr"):
        lines = f"[print(rank, {'x' * 500!r}, rank, file=sys.{name}) for _ in range(200)]"
        status, *streams = ended(at + lines, 3)
        found = streams[name == "stderr"].splitlines()
        assert status == 0
        assert sorted(found) == sorted([f"{r} {'x' * 500} {r}" for r in range(3)] * 200)


def test_all_listeners_are_on_the_loopback():
    code = "import socket; s = socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))); print(s.getpeername()[0])"
    status, out, _ = ended(code, 1)
    assert (status, out.strip()) == (0, "127.0.0.1")


@pytest.mark.parametrize("code", [1, 2, 6, 75])
def test_the_status_of_a_failed_rank_is_kept_and_the_others_end(code):
    began = time.monotonic()
    status, _, _ = ended(f"sys.exit({code}) if rank == 1 else time.sleep(60)")
    assert status == code
    assert time.monotonic() - began < 20


def test_a_killed_rank_is_named_even_if_the_others_hold_on():
    """Rank 0 ignores SIGTERM: it is killed after the grace, within 10 s in all."""
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1); rank and os.kill(os.getpid(), 9); time.sleep(60)"
    began = time.monotonic()
    status, _, err = ended(code)
    assert status == 7
    assert "rank 1 was killed by SIGKILL" in err
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_reaches_the_ranks_and_their_status_comes_back(number):
    code = "stop = lambda *a: sys.exit(75); signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop); print('up', flush=True); time.sleep(60)"
    launcher = start(code)
    assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    launcher.send_signal(number)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 75


def test_a_killed_launcher_takes_its_ranks_along():
    launcher = start("print('up', flush=True); time.sleep(60)")
    assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    ranks = children(launcher.pid)
    assert len(ranks) == 2
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=10)
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
