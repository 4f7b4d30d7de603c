"""Start tiny ranks, forked ones and ones started afresh, which need no torch and print whole lines, as workers do."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from worlds import Started

from gptscale.common.process.program import Program

LAUNCH = """
import sys
from gptscale.common.process import ranks
from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import begin_warm_parent

rank, nproc, how = sys.argv[1:]
begin_warm_parent("cpu", [])
ranks.GRACE_S = 2.0
sys.exit(ranks.launch(Program(rank), int(nproc), fork=how == "forked"))
"""
RANK = """
import os, sys, time, signal
from gptscale.common.process.begin import whole_lines
whole_lines()
rank = int(os.environ["RANK"])
"""


@pytest.fixture(params=["forked", "afresh"])
def start(request, tmp_path):
    """Start a launcher of ranks that run a piece of code."""

    def start(code, nproc=2, **variables):
        (tmp_path / "launch.py").write_text(LAUNCH)
        (tmp_path / "rank.py").write_text(RANK + code)
        words = (str(tmp_path / "rank.py"), str(nproc), request.param)
        return Started(Program(str(tmp_path / "launch.py"), words), **variables)

    return start


def children(launcher):
    """Return the ranks' processes, and their warm parent's."""
    return psutil.Process(launcher.process.pid).children(recursive=True)


@pytest.mark.promise("X13 | a file `safetensors.py` in the current folder | no rank imports it, nor what it starts")
@pytest.mark.parametrize("how", ["forked", "afresh"])
def test_ranks_import_nothing_from_the_current_folder(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("safetensors", "networkx", "wandb", "numpy"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'a')")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "launch.py").write_text(LAUNCH)
    ended = Started(Program("own/launch.py", ("gptscale.recipes", "2", how))).ended()
    assert ended[0] == 2
    assert "unknown recipe ''" in ended[2]
    assert not (tmp_path / "planted").exists()


FORK = "from gptscale.common.process import warm_parent as w; p = w.WarmParent.fork(); p.run(w.Program('a.py'), {})"


@pytest.mark.promise("C20 | `ulimit -u` allows fewer processes than the ranks have | exit status 2, one line, no rank")
@pytest.mark.skipif(os.getuid() > 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_too_low_a_limit_of_processes_is_one_line():
    """The limit is no limit for root, so this is another user, who may read what root may."""
    rights = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    user = ["setpriv", f"--reuid={60_000 + os.getpid() % 5_000}", "--clear-groups", *rights, "prlimit"]
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": tempfile.gettempdir()}
    words = ["-Pm", "gptscale.launchers.cli", "run", "ddp", "--nproc", "2", "--device", "cpu"]
    ended = subprocess.run([*user, "--nproc=12", sys.executable, *words], **options, check=False)
    assert ended.returncode == 2
    assert re.fullmatch(r"gptscale: error: no process .* have \d+, and 12 are allowed\), .*ulimit -u.*\n", ended.stderr)
    ended = subprocess.run([*user, "--nproc=2", sys.executable, "-c", FORK], **options, check=False)
    assert ended.stderr.splitlines()[-1] == "BlockingIOError: [Errno 11] Resource temporarily unavailable"
    assert ended.stderr.count("Traceback") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_ranks_that_print_at_once_stay_whole(start, unbuffered):
    """The ranks wait for each other by the clock, so that they do print at once."""
    at = "time.sleep(-time.time() % 1)\n"
    lines = f"for _ in range(200): print(rank, {'x' * 50!r}, rank, file=sys."
    status, *streams = start(f"{at}{lines}stdout)\n{at}{lines}stderr)", 3, PYTHONUNBUFFERED=unbuffered).ended()
    assert status == 0
    for stream in streams:
        assert sorted(stream.splitlines()) == sorted([f"{r} {'x' * 50} {r}" for r in range(3)] * 200)


@pytest.mark.promise("X10")
def test_local_ranks_meet_without_a_port_and_no_other_user_opens_it(start):
    """A byte to the port of torch's store held every run for ever, and nobody has to prove anything to write there."""
    paths = 'os.environ["GPTSCALE_RENDEZVOUS"], os.environ["GPTSCALE_HEARTBEATS"]'
    code = f"[open(path, 'r+b') for path in ({paths})]; print({paths}, flush=True); time.sleep(600)"
    launcher = start(code)
    first, second = (launcher.stdout.readline().split() for _ in range(2))
    assert first == second
    processes = [psutil.Process(launcher.process.pid), *children(launcher)]
    assert [c for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []
    if os.geteuid() == 0:
        for path in first:
            ended = subprocess.run(["cat", path], user=65534, capture_output=True, text=True, check=False)
            assert "Permission denied" in ended.stderr
    launcher.process.send_signal(signal.SIGKILL)
    launcher.ended()


@pytest.mark.promise(
    "P18 | a crash at the same step, again and again | gptscale never starts a run again by itself; torchrun counts by "
    "`--max-restarts`"
)
@pytest.mark.parametrize("code", [1, 2, 6, 75])
def test_a_failed_rank_ends_the_others_with_its_status_and_is_started_once(start, code, tmp_path):
    """A crash at the same step again and again is for a scheduler to count: nothing here starts a run again by itself."""
    began, starts = time.monotonic(), tmp_path / "starts"
    fails = f"open({str(starts)!r}, 'a').write('x') and sys.exit({code})"
    assert start(f"{fails} if rank == 1 else time.sleep(600)").ended()[0] == code
    assert starts.read_text() == "x"
    assert time.monotonic() - began < 300


def test_a_killed_rank_is_named_even_if_the_others_hold_on(start):
    """Rank 0 ignores SIGTERM: it is killed after the grace."""
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)\n"
    launcher = start(code + "time.sleep(1); rank and os.kill(os.getpid(), 9); time.sleep(600)")
    status, _, err = launcher.ended()
    assert status == 7
    assert "rank 1 was killed by SIGKILL" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_reaches_the_ranks_and_their_status_comes_back(start, number):
    code = "stop = lambda *a: sys.exit(75); signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
    launcher = start(code + "print('up', flush=True); time.sleep(600)")
    assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    launcher.process.send_signal(number)
    assert launcher.ended()[0] == 75


@pytest.mark.promise("P9")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 7), (signal.SIGINT, 130)])
def test_a_request_to_stop_while_ranks_start_is_one_line(start, number, expected):
    """A terminal and some schedulers send the signal to the whole group, and the launcher passes it on once more."""
    code = "from gptscale.common.process.begin import begin_process; begin_process(); print('up', flush=True); time.sleep(600)"
    launcher = start(code)
    assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    # By the time that it has passed the signal on, it may have ended.
    ranks = launcher.ranks()
    launcher.process.send_signal(number)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    status, _, err = launcher.ended()
    assert status == expected
    assert len(err.splitlines()) == 1, err
    assert err.startswith((f"gptscale: error: ended by {number.name}, before it could save", "gptscale: error: rank "))


@pytest.mark.promise(
    "P11 | a second SIGTERM during the last save | one that comes within a second is the same request; a later one ends "
    "the run at once, and the checkpoint before is whole"
)
def test_one_request_that_comes_twice_is_one_and_a_later_one_ends_at_once(start):
    code = """
from gptscale.common.process import ending
ending.SAME_REQUEST_S = 2.0
with ending.StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop() and stop.exit_status == 75
    time.sleep(2.5)
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(3)
"""
    assert start(code, 1).ended()[0] == 7


@pytest.mark.promise("P14 | SIGKILL of the launcher | the ranks end with it")
def test_a_killed_launcher_takes_its_ranks_along(start):
    launcher = start("print('up', flush=True); time.sleep(600)")
    assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    below = children(launcher)
    assert len(below) >= 2
    launcher.process.send_signal(signal.SIGKILL)
    launcher.ended()
    assert psutil.wait_procs(below, timeout=400)[1] == []
