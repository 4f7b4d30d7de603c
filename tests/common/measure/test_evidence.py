"""Evidence is what further steps show. It leaves the process as it was."""

import time

import pytest
import torch
from made_traces import HEALTHY, Part, trace

from gptscale.common.measure import evidence
from gptscale.common.measure.contention import MachineTime
from gptscale.common.measure.evidence import RankEvidence, evidence_of, notes
from gptscale.common.measure.step_trace import STEPS
from gptscale.common.process.begin import right_threads
from gptscale.common.process.progress import progress

CPU = torch.device("cpu")


def compute(seconds):
    """Use a processor for so long, whoever else uses it."""
    progress.at("forward")
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
    progress.at("record")


@pytest.fixture
def threads(monkeypatch):
    """Let this process have the right number of threads, and give it back those that it had."""
    before = torch.get_num_threads()
    monkeypatch.setattr(evidence, "right_threads", torch.get_num_threads)
    yield monkeypatch
    torch.set_num_threads(before)


def test_further_steps_are_traced_with_the_waits_of_the_timed_steps(threads):
    taken: list[int] = []

    def step(i):
        taken.append(i)
        compute(0.002)

    own = evidence_of(3, step, CPU, [0.1, 0.3])
    assert (own.trace.rank, len(own.trace.ends), own.data_wait_s) == (3, STEPS, pytest.approx(0.2))
    assert taken == list(range(STEPS + 1))
    assert (own.right_threads_s, own.fixed, own.alloc_retries) == (None, {}, 0)


def test_with_a_wrong_number_of_threads_some_steps_have_the_right_one(threads):
    threads.setattr(evidence, "right_threads", lambda: 3)
    torch.set_num_threads(2)
    had: list[int] = []

    def step(i):
        had.append(torch.get_num_threads())
        compute(0.002)

    # Threads that wait for each other take time that does not shrink with the tokens: that is not measured then.
    own = evidence_of(0, step, CPU, [], short_step=lambda i: pytest.fail("a short step"))
    assert had == [2] * (STEPS + 1) + [3] * (STEPS + 1)
    assert own.right_threads_s >= 0.002
    assert torch.get_num_threads() == 2


def test_what_of_a_part_does_not_shrink_with_the_tokens(threads):
    """A step of 40 ms of which 16 are there for any number of tokens, so that a quarter of the tokens takes 22."""
    threads.setattr(evidence, "host_share", lambda trace, threads: 0.5)
    taken: list[int] = []

    def short_step(i):
        taken.append(i)
        compute(0.022)

    own = evidence_of(0, lambda i: compute(0.04), CPU, [], short_step=short_step)
    assert own.fixed["forward"] == pytest.approx(0.4, abs=0.1)
    # They go on behind the steps before, in turn with whole ones.
    assert taken == [STEPS + 1 + 2 * i for i in range(STEPS + 1)]


def test_processors_are_shared_between_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for ranks, threads in ((2, 4), (3, 2), (16, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert right_threads() == threads


def test_notes_say_what_the_meters_saw():
    retried = RankEvidence(trace(1, [Part(*part) for part in HEALTHY]), 0.0, None, alloc_retries=3)
    quiet = MachineTime("host", 10.0, {0: 1.0}, {0: 0.0}, 1.0, 0.0, 1)
    assert notes([retried], [quiet, None], offload_wait=0.25) == [
        "rank 1: the allocator freed its cache and tried again 3 times",
        "in the timed steps 25.0% of the time was a wait for state off the device",
    ]
