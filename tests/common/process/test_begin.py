"""What a process of a run does before anything else; more of it is in tests/launchers/run/test_worker.py."""

import os
import threading

from gptscale.common.process.begin import take_turns


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
