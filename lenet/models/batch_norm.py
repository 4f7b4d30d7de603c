"""Batch normalisation with the statistics of the batch on all ranks, on any device.

torch's own SyncBatchNorm refuses CPU tensors. This one needs only an all-reduce that backward can pass through. With it two
gloo processes compute what one process computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks.

    Every rank uses the same result, so the gradient of each rank's input is the sum of the gradients of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class SyncedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d over the global batch, of which every rank has an equal share.

    In evaluation, or with one process, it is BatchNorm2d. The variance is computed about the global mean, in a second
    all-reduce. The difference of two large sums would lose the digits that parity with one process needs.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        # Under autocast the input may be bf16, which is too coarse to sum in.
        x = input.float()
        n = x.numel() // x.shape[1] * dist.get_world_size()
        mean = _SumOverRanks.apply(x.sum((0, 2, 3))) / n
        centred = x - mean.view(1, -1, 1, 1)
        variance = _SumOverRanks.apply(centred.square().sum((0, 2, 3))) / n
        with torch.no_grad():
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
            self.running_mean.lerp_(mean, self.momentum)  # type: ignore[union-attr, arg-type, call-overload]
            self.running_var.lerp_(variance * (n / (n - 1)), self.momentum)  # type: ignore[union-attr, arg-type, call-overload]
        scale = self.weight * torch.rsqrt(variance + self.eps)
        result: Tensor = centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)
        return result.to(input.dtype)


def synced(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm2d of `model` by one over all ranks and return the model.

    On CUDA this is torch's SyncBatchNorm, elsewhere SyncedBatchNorm2d.
    """
    if any(p.is_cuda for p in model.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.BatchNorm2d:
                replacement = SyncedBatchNorm2d(child.num_features, child.eps, child.momentum)
                replacement.load_state_dict(child.state_dict())
                setattr(module, name, replacement)
    return model
