"""What a classifier minimises: the cross entropy of its softmax, made of a logarithm that cannot overflow."""

from __future__ import annotations

import torch

from gptscale.ops.minigrad.tensor import Array, Op, Tensor


class LogSumExp(Op):
    """`log(sum(exp(a)))` over the last axis, which stays at length 1; its derivative is the softmax of `a`.

    The largest element is taken out first: without it exp overflows float32 from 89 on.
    """

    def compute(self, a: Array) -> Array:
        largest = a.amax(-1, keepdim=True)
        return (a - largest).exp().sum(-1, keepdim=True).log() + largest

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        (a,) = node.inputs
        return (out_grad * (a - node).exp(),)


def softmax_cross_entropy(logits: Tensor, labels: Array) -> Tensor:
    """The mean over the batch of `-log softmax(logits)[label]`, in nats.

    logits: (batch, classes). labels: (batch,), whole numbers from 0.
    """
    classes = torch.arange(logits.shape[-1], device=labels.device)
    one_hot = Tensor((labels[:, None] == classes).to(logits.array.dtype))
    of_sample = LogSumExp()(logits) - (logits * one_hot).sum(-1, keepdim=True)
    return of_sample.mean()
