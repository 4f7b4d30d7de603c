"""transformers' GPT2LMHeadModel and torch's plain AdamW behind this package's seam, as the exercise trains them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptscale.common.engines.colossal.weights import TensorLayout, fill, named_parameters
from gptscale.common.model.hf_gpt2 import hf_config
from gptscale.common.model.loss import IGNORE
from gptscale.common.optim.fused import decay_groups
from gptscale.common.optim.library import LibraryOptimizer, torch_optimizer
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import ModelConfig


class HandoutModel(nn.Module):
    """transformers' model, whose forward(inputs, targets) returns the summed loss of a micro-batch.

    loss: the exercise's own, the mean over the targets that it makes of the inputs. None: a loss of the targets that are given,
    with as many rows in the token table as every other recipe has.
    """

    def __init__(self, gpt: ModelConfig, run: Run, loss: Callable[[Any, Tensor], Tensor] | None) -> None:
        from transformers import GPT2LMHeadModel

        super().__init__()
        self.vocab_size, self.loss = gpt.vocab_size, loss
        self.hf: Any = GPT2LMHeadModel(hf_config(gpt, gpt.vocab_size if loss else gpt.padded_vocab_size))
        if run.config.activation_checkpointing == "full":
            # By the name of transformers 5, or that of version 4.
            enable = getattr(self.hf, "activation_checkpointing_enable", self.hf.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
            self.hf.config.use_cache = False

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss over the targets that count, ()."""
        if self.loss:
            return self.loss(self.hf, inputs) * (targets != IGNORE).sum()
        mask, cache = torch.ones_like(inputs), self.hf.config.use_cache
        logits = self.hf(input_ids=inputs, attention_mask=mask, use_cache=cache)[0]
        rows = logits[..., : self.vocab_size].flatten(0, 1)
        return functional.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE, reduction="sum")


class PlainOptimizer(LibraryOptimizer):
    """The Stepper over torch's AdamW as it is without options, one kernel after another."""

    def __init__(self, model: HandoutModel, run: Run) -> None:
        parameters = named_parameters(model.hf, run.gpt)
        kind, options = torch_optimizer(run.config)
        options.pop("fused", None)
        plain = kind(decay_groups(parameters.values(), run.config.weight_decay), **options)
        clip = partial(torch.nn.utils.clip_grad_norm_, list(parameters.values()))
        super().__init__(plain, plain, parameters, run.config, clip=clip, boxes=TensorLayout(run.gpt).boxes)
        # It counts its steps on the host, unlike the fused one.
        for state in plain.state.values():
            state["step"] = state["step"].cpu()
        fill(self.state(), run.gpt, run.config.seed)
