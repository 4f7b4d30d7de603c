"""The MLP for `gptscale bench parts`: two matrices and the GELU between them or inside the products' epilogues."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.common.model.activations import activation_function
from gptscale.launchers.bench.parts.ways import StepPart, StepShape, differentiated
from gptscale.ops.mlp import mlp as in_epilogues


def gelu_between(activation: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """Return the MLP's output with its activation between the products, as the model has it."""
    fc_weight, fc_bias, proj_weight, proj_bias = weights
    return F.linear(activation(F.linear(x, fc_weight, fc_bias)), proj_weight, proj_bias)


def mlp(shape: StepShape) -> StepPart:
    """Return the MLP, from the norm's output to the residual sum's input."""
    h, rows = shape.gpt.n_embd, shape.rows
    x = shape.normal(rows, h)
    weights = [shape.normal(*size).mul_(0.02) for size in ((4 * h, h), (4 * h,), (h, 4 * h), (h,))]
    leaves = [t.requires_grad_() for t in (x, *weights)]
    functions: dict[str, Callable[..., Tensor]] = {
        "torch": partial(gelu_between, activation_function("gelu_tanh")),
        "custom": partial(gelu_between, activation_function("custom-tanh")),
    }
    if shape.compiled:
        functions["compiled"] = torch.compile(functions["torch"], fullgraph=True, dynamic=False)
    if shape.device.type == "cuda" and shape.dtype.itemsize == 2:
        functions["in epilogues"] = in_epilogues
        if shape.compiled:
            # Triton's products take a GELU into their epilogues, if they win the search.
            mode = "max-autotune-no-cudagraphs"
            functions["autotuned"] = torch.compile(functions["torch"], fullgraph=True, dynamic=False, mode=mode)
    grad = shape.normal(rows, h)
    ways = [differentiated(name, f, leaves, grad) for name, f in functions.items()]
    return StepPart("MLP", 0.0, 6.0 * rows * 8 * h * h, ways)
