"""What a process of a run does before anything else.

More of it is tested in tests/launchers/run/test_worker.py.
"""

import getpass
import os
import pwd
import threading

import pytest
import torch
import torch.distributed as dist

from gptscale.common.process.begin import share_cores, wait_for_free_cores
from gptscale.common.process.environments import name_user
from gptscale.common.process.world import agree_any


def test_the_main_thread_replaces_torchs_pool_of_threads(monkeypatch):
    """Otherwise threads of autograd race for it after a fork, and the rank aborts (3 of 500 runs with torch 2.11)."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share_cores()
    assert asked == [torch.get_num_threads()]


def test_a_woken_thread_waits_for_a_free_core():
    """The policy changes for this thread and for threads that it starts, and for no other."""
    found = []

    def look():
        found.append(os.sched_getscheduler(0))

    def rank():
        wait_for_free_cores()
        look()
        gloo = threading.Thread(target=look)
        gloo.start()
        gloo.join()

    before = os.sched_getscheduler(0)
    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH] * 2
    assert os.sched_getscheduler(0) == before


@pytest.mark.promise(
    "C19 | a user without a name, an environment of 300 KB, a host whose name is no text | the run goes on"
)
@pytest.mark.parametrize("error", [KeyError, OSError])
def test_a_user_without_a_name_gets_one(monkeypatch, error):
    """Python 3.13 raises the other error."""

    def getpwuid(uid):
        raise error(uid)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
    name_user()
    assert getpass.getuser() == f"uid-{os.getuid()}"


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_one_rank_that_says_yes_is_enough(monkeypatch, own, other):
    def all_reduce(votes, op):
        assert op == dist.ReduceOp.MAX
        votes.clamp_(min=float(other))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    said = agree_any(own)
    monkeypatch.undo()
    assert said is (own or other)
