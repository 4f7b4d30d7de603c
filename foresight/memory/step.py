"""What the closed forms reckon with: the shape of one micro-batch's step, and what a recipe needs beside it."""

from __future__ import annotations

from dataclasses import dataclass

from gptscale.common.settings.gpt_config import GPTConfig


@dataclass(frozen=True)
class Step:
    """A step of one micro-batch of `tokens`, where 0 leaves what does not depend on the batch.

    precision: fp32, bf16 or fp16. device_type: cpu or cuda. tp_size: ranks that cut matrices, heads, the vocabulary, and the
    sequence between layers. micro_batches: of an optimizer step.
    """

    gpt: GPTConfig
    tokens: int
    precision: str
    device_type: str
    tp_size: int = 1
    micro_batches: int = 1
    seq_len: int = 0

    @property
    def compute(self) -> int:
        """Return the bytes of a number in products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def table(self) -> int:
        """Return the parameters of a rank's part of the token table."""
        return self.gpt.padded_vocab_size * self.gpt.n_embd // self.tp_size

    @property
    def block(self) -> int:
        """Return the parameters of a rank's part of a block, whose norms and projections' biases stay whole."""
        h, tp_size = self.gpt.n_embd, self.tp_size
        return (12 * h * h + 7 * h) // tp_size + 6 * h

    @property
    def last_matrix(self) -> int:
        """Return the parameters of a rank's part of the MLP's second matrix, whose gradient is the first of a block."""
        return 4 * self.gpt.n_embd**2 // self.tp_size + self.gpt.n_embd

    def ranks_of_sequence(self, fixed: RecipeBytes) -> int:
        """Return how many ranks cut the sequence between layers."""
        return self.tp_size if fixed.cuts_sequence else 1

    @property
    def dropped(self) -> float:
        """Return the bytes per token that dropout keeps in a block: masks, and on a CPU attention in three matrices."""
        if not self.gpt.dropout:
            return 0.0
        if self.device_type == "cuda":
            return 2 * self.gpt.n_embd
        return 4 * (2 * self.gpt.n_embd + 3 * self.gpt.n_head * self.seq_len)


@dataclass(frozen=True)
class RecipeBytes:
    """The bytes that a recipe needs whatever the batch.

    device: all the time. gradients: on the device at the end of backward, or, with at_once, from its first block on. casts: of
    weights, while a forward lasts. working: during the backward of a block. build: at most, while the engine is built. residual,
    norm_input: bytes of a number in the residual stream, and of one that a LayerNorm keeps. head_gradient: bytes of a number in
    the gradient of the token table that the loss leaves. logits: bytes alive for each logit where the loss takes all rows at
    once; 0 where it goes block by block (common/model/loss.py). cuts_sequence: whether tensor ranks cut it between
    layers. held: gradients of earlier micro-batches while a forward lasts, if not `gradients`. left_behind: what the blocks leave
    when their backward is done, until that of all is.

    of a world: gathered: weights that are there from forward on, whole, beside a rank's own. last_gathered: what was gathered
    for the last block and stays until the loss is done. reduced: what is on its way to other ranks when a block's backward ends;
    lingering: what of it is still there during the next block's; block_end: what is there when that one has all its gradients;
    reduced_at_end: what is on its way when the gradients of the table and the rest are there. stepping: beside the gradients
    while the optimizer steps and new weights are gathered.
    """

    device: float
    gradients: float = 0.0
    at_once: bool = False
    casts: float = 0.0
    working: float = 0.0
    build: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    residual: int = 4
    norm_input: int = 4
    head_gradient: int = 4
    logits: int = 0
    cuts_sequence: bool = True
    gathered: float = 0.0
    reduced: float = 0.0
    held: float | None = None
    left_behind: float = 0.0
    lingering: float = 0.0
    block_end: float = 0.0
    last_gathered: float = 0.0
    reduced_at_end: float = 0.0
    stepping: float = 0.0
