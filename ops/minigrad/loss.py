"""The loss of a classifier: the cross entropy of its softmax, by a logarithm of a sum that cannot overflow."""

from __future__ import annotations

import torch

from gptscale.ops.minigrad.tensor import Array, Op, Tensor


class LogSumExp(Op):
    """`log(sum(exp(a)))` over the last axis, which stays with length 1.

    Its derivative is the softmax of `a`. The largest element is subtracted first, because exp overflows float32 from 89 on.
    """

    def compute(self, a: Array) -> Array:
        largest = a.amax(-1, keepdim=True)
        return (a - largest).exp().sum(-1, keepdim=True).log() + largest

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        (a,) = node.inputs
        return (out_grad * (a - node).exp(),)


def softmax_cross_entropy(logits: Tensor, labels: Array) -> Tensor:
    """Return the mean over the batch of `-log softmax(logits)[label]`, in nats.

    logits: (batch, classes). labels: (batch,), whole numbers from 0.
    """
    classes = torch.arange(logits.shape[-1], device=labels.device)
    one_hot = Tensor((labels[:, None] == classes).to(logits.array.dtype))
    of_sample = LogSumExp()(logits) - (logits * one_hot).sum(-1, keepdim=True)
    return of_sample.mean()
