"""The seconds inside an optimizer's step."""

import torch

from gptscale.common.measure.offload import StepMeter


def test_the_time_of_every_call_of_step_is_summed_and_none_between_them():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    ticks = iter([1.0, 1.25, 10.0, 10.5])
    meter = StepMeter(optimizer, clock=lambda: next(ticks))
    assert meter.total_s == 0.0
    optimizer.step()
    optimizer.step()
    assert meter.total_s == 0.75
