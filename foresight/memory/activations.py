"""What a step keeps for backward, and what is at work beside it, from the model's shape alone.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count what a block keeps for backward: 34 h bytes per token in 16 bits,
and 5 a T bytes of attention. Here attention keeps one number per head and token instead (Dao et al. 2022, arXiv 2205.14135),
there is no dropout (its masks are 2 h), the residual stream may be fp32, and the loss never holds all logits (model/loss.py).
This module imports nothing heavy.
"""

from __future__ import annotations

from gptscale.foresight.memory.step import RecipeBytes, Step

# of common/model/loss.py, which imports torch; a test holds them together
LOGITS_BYTES = {"cpu": 2**28, "cuda": 2**30}
# Bytes alive per logit of a block of rows, by device and by the bytes of a number in products. Gradients take the logits' place,
# on a CPU in fp32.
LOGIT_COPIES = {"cpu": {4: 4, 2: 6}, "cuda": {4: 4, 2: 2}}


def kept_per_token(step: Step, fixed: RecipeBytes, mode: str) -> float:
    """Return the bytes that one block keeps for backward, per token.

    With mode none these are the inputs of the two norms, of qkv, of the projection (attention's output), of fc, of GELU and of
    fc-out, and q, k and v. With full it is the block's input. With selective it is that, and the outputs of its four products and
    of attention.
    """
    h, c, heads, tp_size = step.gpt.n_embd, step.compute, step.gpt.n_head, step.tp_size
    between = step.ranks_of_sequence(fixed)
    # attention's log-sum-exp, and mean and deviation of two norms
    sums, statistics = 4 * heads, 2 * 2 * 4
    if mode == "full":
        return fixed.residual * h / between
    if mode == "selective":
        # A projection's output is a sum that other tensor ranks have parts of, so it is whole.
        stream = fixed.residual * h / between
        return stream + (c * h * (3 + 4) + c * _padded(step) + sums) / tp_size + c * h * (1 + 1)
    # Tensor ranks gather the sequence before qkv and fc, so that these inputs are whole.
    cut = step.dropped + c * h * (4 + 4) + c * _attention(step) + sums + statistics
    return 2 * fixed.norm_input * h / between + cut / tp_size + c * h * (1 + 1)


def working_per_token(step: Step, fixed: RecipeBytes, mode: str) -> float:
    """Return the bytes per token that the backward of one block needs beyond what is kept.

    They are what is computed again, and gradients under way.
    """
    h, c = step.gpt.n_embd, step.compute
    between = step.ranks_of_sequence(fixed)
    under_way = (fixed.residual * h + (c * h if fixed.residual != c else 0)) / between + 4 * c * h / step.tp_size
    if step.tp_size > 1:
        under_way += c * h
    if mode == "none":
        return under_way
    again = kept_per_token(step, fixed, "none")
    if fixed.norm_input == fixed.residual:
        # the first norm's input is the block's, which is there
        again -= fixed.residual * h / between
    if mode == "selective":
        # of padded heads q, k and v are computed again
        padded = _padded(step)
        again -= c * (4 * h + padded + (3 * h if padded == h else 0)) / step.tp_size
    return again + under_way


def loss_bytes(step: Step, fixed: RecipeBytes) -> float:
    """Return the bytes inside the loss: the head's input and gradient, the table's gradient, one block of rows."""
    gpt, c = step.gpt, step.compute
    columns = gpt.padded_vocab_size // step.tp_size
    if fixed.logits:
        # and the last norm's output, which the head's product keeps
        return (fixed.logits * columns + c * gpt.n_embd) * step.tokens
    cast = c if c != fixed.norm_input else 0
    # A table that was cast before, as the residual stream shows, is not cast again.
    table = (4 + (c if c != fixed.residual else 0)) * step.table
    # On CUDA a kernel overwrites the logits. Tensor ranks, who know only their columns, take an fp32 copy of them.
    has_copy = step.device_type == "cuda" and step.tp_size > 1 and c != 4
    copies = c + 4 if has_copy else LOGIT_COPIES[step.device_type][c]
    counted = 4 if step.device_type == "cpu" else c + 4 if has_copy else c
    most = max(1, LOGITS_BYTES[step.device_type] // (counted * columns))
    blocks = max(1, -(-step.tokens // most))
    rows: float = (2 * fixed.norm_input + cast) * gpt.n_embd * step.tokens
    if step.tp_size > 1:
        # the rank's own part of the sequence, before it is gathered
        rows += fixed.norm_input * gpt.n_embd * step.tokens / step.tp_size
    # logits, and the product that becomes the rows' gradient
    block = (copies * columns + (0 if has_copy else c * gpt.n_embd)) * step.tokens / blocks
    # The gradient of a table of 16 bits is cast in the end, when the logits are gone.
    return rows + table + max(block, float(c * step.table) if fixed.head_gradient != 4 else 0.0)


def _padded(step: Step) -> int:
    """Return the numbers in attention's output per token, where on CUDA heads are padded to a multiple of 8."""
    d = step.gpt.head_dim
    return step.gpt.n_head * (-(-d // 8) * 8 if step.device_type == "cuda" else d)


def _attention(step: Step) -> int:
    """Return the numbers that attention and the projection behind it keep per token.

    They are q, k, v and the output, which is kept twice if heads are padded.
    """
    padded, h = _padded(step), step.gpt.n_embd
    return 4 * padded + (h if padded != h else 0)
