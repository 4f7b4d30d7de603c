"""The parts of a step that `gptscale bench parts` measures, but for two in attention.py and mlp.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.model.activations import activation_function
from gptscale.common.model.gpt import GPT
from gptscale.common.model.loss import IGNORE, TRITON, linear_cross_entropy, rows_at_once, softmax_and_loss_in_fp32
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.settings.run_config import OptimizerState, RunConfig
from gptscale.launchers.bench.parts.attention import attention
from gptscale.launchers.bench.parts.mlp import mlp
from gptscale.launchers.bench.parts.ways import StepPart, StepShape, WayToCompute, differentiated, under_autocast

# of the optimizer's step, and the value of all its weights before it
LR, START = 1e-3, 0.02


def by_log_softmax(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return d loss / d logits (rows, columns) and the summed loss, in the fewest of torch's operations."""
    wide = logits.float()
    wide[:, vocab_size:] = -torch.inf
    counted, column = (targets != IGNORE).unsqueeze(1), targets.clamp_min(0).unsqueeze(1)
    log_probs = F.log_softmax(wide, dim=1)
    loss = -(log_probs.gather(1, column) * counted).sum()
    one_hot = torch.arange(logits.shape[1], device=logits.device) == column
    return ((log_probs.exp() - one_hot.float()) * counted).to(logits.dtype), loss


def softmax(shape: StepShape) -> StepPart:
    """Return the softmax: from the logits of one block of the head to their gradient and the loss."""
    gpt, size = shape.gpt, shape.dtype.itemsize
    columns = gpt.padded_vocab_size
    rows = rows_at_once(shape.rows, columns, size, shape.device.type)
    logits = shape.normal(rows, columns)
    targets = torch.randint(0, gpt.vocab_size, (rows,), device=shape.device)
    targets[::7] = IGNORE

    def in_fp32(x: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_and_loss_in_fp32(x.float(), targets, gpt.vocab_size)

    def by_torch(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        loss = F.cross_entropy(leaf[:, : gpt.vocab_size].float(), targets, ignore_index=IGNORE, reduction="sum")
        (grad,) = torch.autograd.grad(loss, leaf)
        return grad, loss.detach()

    log_softmax = partial(by_log_softmax, targets=targets, vocab_size=gpt.vocab_size)
    functions: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "in place, fp32": in_fp32,
        "log_softmax": log_softmax,
    }
    if shape.compiled:
        functions["log_softmax, compiled"] = torch.compile(log_softmax, fullgraph=True, dynamic=False)
    if shape.device.type == "cuda" and TRITON:
        functions.update(in_triton(targets, gpt.vocab_size))
    functions["F.cross_entropy"] = by_torch
    buffer = logits.clone()

    def way(name: str, function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> WayToCompute:
        return WayToCompute(name, lambda: function(buffer), result=lambda: function(buffer.copy_(logits)))

    ways = [way(name, function) for name, function in functions.items()]
    return StepPart(f"softmax of {rows} rows", 2.0 * rows * columns * size, 0.0, ways)


def in_triton(targets: Tensor, vocab_size: int) -> Iterator[tuple[str, Callable[[Tensor], tuple[Tensor, Tensor]]]]:
    """Yield the Triton kernel in several launch shapes, of which the first is the package's."""
    from gptscale.ops.cross_entropy_triton import BLOCK, WARPS, cross_entropy_

    def run(x: Tensor, block: int, warps: int) -> tuple[Tensor, Tensor]:
        return x, cross_entropy_(x, targets, vocab_size, IGNORE, block=block, warps=warps)

    for block, warps in dict.fromkeys([(BLOCK, WARPS), (8192, 32), (4096, 16), (4096, 8), (2048, 8)]):
        yield f"Triton, {block} by {warps} warps", partial(run, block=block, warps=warps)


def head(shape: StepShape) -> StepPart:
    """Return head and loss: three products, and what is between them."""
    gpt = shape.gpt
    x = shape.normal(shape.rows, gpt.n_embd, dtype=torch.float32).requires_grad_()
    weight = shape.normal(gpt.padded_vocab_size, gpt.n_embd, dtype=torch.float32).mul_(0.02).requires_grad_()
    targets = torch.randint(0, gpt.vocab_size, (shape.rows,), device=shape.device)

    def whole_logits(x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight)[:, : gpt.vocab_size]
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, gpt.vocab_size)

    def copying(x: Tensor, weight: Tensor) -> Tensor:
        def hook(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            return softmax_and_loss_in_fp32(logits.float(), *rest)

        return linear_cross_entropy(x, weight, targets, gpt.vocab_size, hook)

    functions = {"ours": ours, "ours, softmax in fp32": copying, "whole logits": whole_logits}
    if shape.compiled:
        functions["whole logits, compiled"] = torch.compile(whole_logits, fullgraph=True, dynamic=False)
    one = torch.ones((), device=shape.device)
    ways = [differentiated(name, under_autocast(shape, f), [x, weight], one) for name, f in functions.items()]
    flops = 6.0 * shape.rows * gpt.padded_vocab_size * gpt.n_embd
    return StepPart("head and loss", 0.0, flops, ways)


def gelu(shape: StepShape) -> StepPart:
    """Return the GELU between an MLP's two matrices."""
    x = shape.normal(shape.rows, 4 * shape.gpt.n_embd).requires_grad_()
    grad = shape.normal(*x.shape)
    functions = {"torch": activation_function("gelu_tanh"), "custom": activation_function("custom-tanh")}
    if shape.compiled:
        functions["torch, compiled"] = torch.compile(functions["torch"], fullgraph=True, dynamic=False)
    ways = [differentiated(name, f, [x], grad) for name, f in functions.items()]
    return StepPart("GELU", 5.0 * x.nbytes, 0.0, ways)


def norm(shape: StepShape) -> StepPart:
    """Return a residual sum and the LayerNorm behind it, cast for the next product.

    The residual stream is fp32, as autocast leaves it.
    """
    h = shape.gpt.n_embd
    stream = shape.normal(shape.rows, h, dtype=torch.float32).requires_grad_()
    branch = shape.normal(shape.rows, h).requires_grad_()
    weight, bias = (shape.normal(h, dtype=torch.float32).requires_grad_() for _ in range(2))
    grads = torch.randn_like(stream), torch.randn_like(branch)

    def add_and_norm(stream: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        summed = stream + branch
        return summed, F.layer_norm(summed.float(), (h,), weight, bias).to(branch.dtype)

    leaves = [stream, branch, weight, bias]
    ways = [differentiated("eager", add_and_norm, leaves, *grads)]
    if shape.compiled:
        compiled = torch.compile(add_and_norm, fullgraph=True, dynamic=False)
        ways.append(differentiated("compiled", compiled, leaves, *grads))
        if shape.dtype.itemsize == 2:
            # as if the residual stream were 16 bits wide, which is another model
            narrow = [stream.detach().to(shape.dtype).requires_grad_(), *leaves[1:]]
            ways.append(differentiated("16-bit stream, compiled", compiled, narrow, grads[0].to(shape.dtype), grads[1]))
    # forward: two read, two written; backward: two gradients and the sum read, two gradients written
    return StepPart("residual and LayerNorm", 3.0 * stream.nbytes + 2 * stream.nbytes + 4 * branch.nbytes, 0.0, ways)


def optimizer(shape: StepShape) -> StepPart:
    """Return AdamW's step on every parameter of the model, its norm and guard included, from the same gradients."""
    with torch.device("meta"):
        sizes = {name: p.shape for name, p in GPT(shape.gpt).named_parameters()}
    grads = {name: 0.01 * torch.randn(size, device=shape.device) for name, size in sizes.items()}
    loss = torch.ones((), device=shape.device)

    def way(state: OptimizerState) -> WayToCompute:
        weights = {name: nn.Parameter(torch.full(size, START, device=shape.device)) for name, size in sizes.items()}
        adamw = FusedOptimizer(weights, RunConfig(optimizer_state=state))

        def run() -> list[Tensor]:
            for name, p in weights.items():
                p.grad = grads[name]
            adamw.step(LR, loss)
            return [p.detach() for p in weights.values()]

        return WayToCompute(f"{state} moments", run, result=lambda: [p - START for p in run()])

    numel = sum(math.prod(size) for size in sizes.values())
    return StepPart("optimizer", 32.0 * numel, 0.0, [way(state) for state in get_args(OptimizerState)])


PARTS: dict[str, Callable[[StepShape], StepPart]] = {
    "attention": lambda shape: attention(shape, shape.gpt.n_head),
    "attention64": lambda shape: attention(shape, shape.gpt.n_embd // 64),
    "softmax": softmax,
    "head": head,
    "mlp": mlp,
    "gelu": gelu,
    "norm": norm,
    "optimizer": optimizer,
}
