"""What a process of a run does before anything else; more of it is in tests/launchers/run/test_worker.py."""

import os
import threading

import torch

from gptscale.common.process.begin import share_cores, take_turns


def test_a_forked_rank_gets_its_pool_of_threads_before_any_other_thread_can_ask_for_it(monkeypatch):
    """Threads of autograd that ask at once abort in torch 2.11, about once in 200 runs of a busy machine."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share_cores()
    assert asked == [torch.get_num_threads()]


def test_a_thread_that_takes_turns_takes_no_core_from_another_when_it_wakes():
    """Only its own policy changes, and those of the threads that it starts."""
    found = []

    def look():
        found.append(os.sched_getscheduler(0))

    def rank():
        take_turns()
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
