"""Bytes of state, each memory once, by kind and place."""

from types import SimpleNamespace

import torch

from gptscale.common.measure.live_state import LiveState, StateTensor, StepMeter, held_by_torch, live_state, tensors_in

CPU = torch.device("cpu")


def test_each_memory_counts_once_and_has_the_kind_of_its_first_tensor():
    weights, bucket = torch.zeros(10), torch.zeros(64, dtype=torch.bfloat16)
    tensors = [
        StateTensor("weights", weights),
        # The optimizer steps the memory that the model computes with.
        StateTensor("optimizer", weights.view(2, 5)),
        StateTensor("gradients", bucket[:10]),
        StateTensor("gradients", bucket[10:20]),
        StateTensor("optimizer", torch.zeros(0)),
    ]
    assert live_state(tensors, CPU) == LiveState(weights=40, gradients=128)


def test_what_is_kept_on_the_host_is_apart_on_a_cpu_too():
    tensors = [StateTensor("weights", torch.zeros(1)), StateTensor("optimizer", torch.zeros(3), True)]
    state = live_state(tensors, CPU, disk=7)
    assert state == LiveState(weights=4, host=12, disk=7)
    assert state.total == 23
    # On the host is all that is not on the device of the run.
    assert live_state(tensors, torch.device("cuda", 0)) == LiveState(host=16)


def test_adamw_of_torch_has_its_step_too():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 4)).sum().backward()
    without = live_state(held_by_torch(model.parameters(), optimizer), CPU)
    assert without == LiveState(weights=80, gradients=80)
    optimizer.step()
    assert live_state(held_by_torch(model.parameters(), optimizer), CPU).optimizer == 2 * 80 + 2 * 4


def test_tensors_in_lists_and_dictionaries_but_not_in_objects():
    a, b, c = (torch.zeros(n) for n in (1, 2, 3))
    value = {"x": [a, (b, None)], "y": SimpleNamespace(grads=[c])}
    assert [len(t) for t in tensors_in(value)] == [1, 2]
    assert list(tensors_in([[[[[a]]]]])) == []


def test_the_time_of_every_call_of_step_is_summed_and_none_between_them():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    ticks = iter([1.0, 1.25, 10.0, 10.5])
    meter = StepMeter(optimizer, clock=lambda: next(ticks))
    assert meter.total_s == 0.0
    optimizer.step()
    optimizer.step()
    assert meter.total_s == 0.75
