"""What a simulated program leaves of its memory: addresses, bytes and owners."""

import torch

from gptscale.foresight.mock_cuda.watch import Owners


def entry(action, addr=0, size=0):
    return {"action": action, "addr": addr, "size": size}


def test_an_event_belongs_to_the_owner_of_its_moment(monkeypatch):
    owners = Owners()
    blocks = [
        entry("segment_alloc", 4096, 2**21),
        entry("alloc", 4096, 512),
        entry("alloc", 8192, 1024),
        entry("free_requested", 4096, 512),
        entry("free_completed", 4096, 512),
    ]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [blocks]})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    # Owner 3 from the second block on. Of two at one moment the later counts.
    owners._changes += [(1, 2), (1, 3), (2, 5)]
    assert list(owners.events()) == [4096, 512, 0, 8192, 1024, 3, 4096, -512, 5]


def test_a_module_is_known_by_its_name_without_wrappers():
    owners = Owners()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    owners._enter_module(torch.nn.ModuleDict({"module": model}), ())
    owners._enter_module(model[1], ())
    assert owners.places == [("build", ""), ("forward", ""), ("forward", "ModuleDict"), ("forward", "1")]
    owners.enter("backward")
    owners.leave()
    assert [part for _, part in owners.marks] == ["forward", "backward", "forward"]
    assert owners.steps == [0]
