"""The part of a GPT that one of several tensor ranks computes, without the others and without what they send each other.

Between its matrices a rank has its part of the sequence, as under sequence parallelism. A copy takes the place of what it would
gather, and a cut that of what it would scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptscale.common.model.gpt import GPT, Block
from gptscale.common.settings.shape import ModelConfig as GPTConfig


def cut_gpt(gpt: GPTConfig, tp: int, device: torch.device) -> GPT:
    """Return the model of one of `tp` ranks, with random weights. Ids are those of its part of the vocabulary."""
    with device:
        model = CutGPT(gpt, tp)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


class CutGPT(GPT):
    """A GPT whose matrices are those of one tensor rank."""

    def __init__(self, gpt: GPTConfig, tp: int) -> None:
        super().__init__(gpt)
        self.tp, h = tp, gpt.n_embd
        self.wte = nn.Embedding(gpt.padded_vocab_size // tp, h)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attn.qkv, block.attn.proj = nn.Linear(h, 3 * h // tp), nn.Linear(h // tp, h)
            block.mlp.fc, block.mlp.proj = nn.Linear(h, 4 * h // tp), nn.Linear(4 * h // tp, h)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the summed loss over this rank's part of the vocabulary."""
        assert targets is not None
        rows = self.wte.num_embeddings
        x = self._part(self.embed(inputs % rows))
        for block in self.blocks:
            assert isinstance(block, Block)
            x = x + self._part(block.attn(self._whole(block.ln_1(x))))
            x = x + self._part(block.mlp(self._whole(block.ln_2(x))))
        loss: Tensor = self.loss(self._whole(self.ln_f(x)), self.wte.weight, targets % min(rows, self.loss.vocab_size))
        return loss

    def _whole(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.tp, 1)

    def _part(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // self.tp]
