"""How many floating-point operations a token costs, by four definitions that must not be mixed.

A matrix with P elements costs a token 2P operations forward and 4P backward: 6 N_matmul over all of them (Kaplan et al. 2020,
arXiv 2001.08361). Attention's two products, scores and values, cost 2 x 2 h T forward per layer over a full T x T square and
twice that backward, 12 L h T; a causal model needs half of the square, 6 L h T.
"""

from __future__ import annotations

from gptscale.common.settings.gpt_config import GPTConfig


def model_flops_per_token(gpt: GPTConfig, seq_len: int) -> float:
    """What the model asks for, and what `mfu` counts: 6 N_matmul + 6 L h T.

    Unpadded sizes, the tied head once, causal attention, no recomputation: 9.8017e9 for `1.6b` at 1024.
    """
    return 6.0 * gpt.n_matmul_params + 6.0 * gpt.n_layer * gpt.n_embd * seq_len


def palm_flops_per_token(gpt: GPTConfig, seq_len: int) -> float:
    """PaLM's count (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), 6 N + 12 L h T.

    N is all parameters, and attention is not halved: 10.2894e9 for `1.6b`, 5 % above `model_flops_per_token`. What nanoGPT
    and picotron report.
    """
    return 6.0 * gpt.n_params + 12.0 * gpt.n_layer * gpt.n_embd * seq_len


def hardware_flops_per_token(gpt: GPTConfig, seq_len: int, activation_checkpointing: str = "none") -> float:
    """What is executed, for `hfu`: the model's count, the table's padding rows, and what backward computes again.

    `full` runs every block's forward again up to the last tensor that backward needs, which spares the block's last
    matrix, 4 h^2 of its 12 (torch's FlopCounterMode counts the same, tests/common/model/test_activation_checkpointing.py):
    2 x 8 L h^2 + 2 L h T more. `selective` keeps all products: nothing more.
    The causal half of attention is counted as in `mfu`; kernels that compute masked tiles do more, uncounted.
    """
    padding = 6.0 * (gpt.padded_vocab_size - gpt.vocab_size) * gpt.n_embd
    again = 0.0
    if activation_checkpointing == "full":
        again = 16.0 * gpt.n_layer * gpt.n_embd**2 + 2.0 * gpt.n_layer * gpt.n_embd * seq_len
    return model_flops_per_token(gpt, seq_len) + padding + again


def handout_n_params(gpt: GPTConfig) -> int:
    """Parameters as the exercise's `get_model_size` counts them: the tied head twice (1,638,022,400 for `1.6b`)."""
    return gpt.n_params + gpt.vocab_size * gpt.n_embd


def handout_flops_per_token(gpt: GPTConfig) -> float:
    """The exercise's formula: 8 per parameter as it counts them (it assumes full recomputation), no attention term.

    Reads 1.27 times PaLM's count for `1.6b`; kept so that old figures can be compared, never as utilisation.
    """
    return 8.0 * handout_n_params(gpt)
