"""The log of CUDA's allocator, made into addresses, bytes and owners."""

import torch

from gptscale.foresight.mock_cuda.counter import CudaCounter


def entry(action, addr=0, size=0, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream}


def test_an_event_belongs_to_the_owner_of_its_moment():
    counter = CudaCounter(torch.device("cuda", 0))
    counter._entries = [
        entry("segment_alloc", 4096, 2**21),
        entry("alloc", 4096, 512, 7),
        entry("alloc", 8192, 1024, 7),
        entry("free_requested", 4096, 512, 7),
        entry("free_completed", 4096, 512, 9),
    ]
    # Owner 3 from the second block on, owner 5 from the third.
    counter._owners += [(1, 3), (2, 5)]
    assert counter.events().tolist() == [[4096, 512, 0], [8192, 1024, 3], [4096, -512, 5]]
    assert counter.streams().tolist() == [7, 7, 9]


def test_of_two_owners_at_one_moment_the_later_counts():
    counter = CudaCounter(torch.device("cuda", 0))
    counter._entries = [entry("alloc", 4096, 512)]
    counter._owners += [(0, 3), (0, 5)]
    assert counter.events().tolist() == [[4096, 512, 5]]


def test_a_log_without_events_has_their_shape():
    assert CudaCounter(torch.device("cuda", 0)).events().shape == (0, 3)
