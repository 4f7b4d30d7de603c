"""The loss function of a pipeline's schedule."""

import torch

from gptscale.common.engines.pipeline.engine import PipelineLoss


def test_adding_up_the_loss_leaves_the_factor_of_the_gradients_alone():
    loss, targets = PipelineLoss(torch.device("cpu")), torch.zeros(1)
    assert loss(torch.tensor(3.0), targets) == 0.0
    assert (loss.total, loss.grad_factor) == (3.0, 0.0)
    loss.grad_factor = torch.tensor(0.5)
    assert loss(torch.tensor(4.0), targets) == 2.0
    assert (loss.total, loss.grad_factor) == (7.0, 0.5)
