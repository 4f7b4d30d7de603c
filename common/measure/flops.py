"""The number of floating-point operations per token, by four definitions that must not be mixed.

A matrix with P elements costs 2P operations per token in forward and 4P in backward, in all 6 N_matmul for a model (Kaplan et al.
2020, arXiv 2001.08361). The two products of attention, scores and values, cost 2 x 2 h T per layer in forward over a full T x T
square, and twice that in backward, in all 12 L h T. A causal model needs half of the square, 6 L h T.

L is the number of layers, h the width of the queries of all heads, which is the hidden size in most models, T the length of a
sequence and N the number of parameters.
"""

from __future__ import annotations

from gptscale.common.settings.shape import ModelConfig


def model_flops_per_token(gpt: ModelConfig, seq_len: int) -> float:
    """Return the operations that the model itself needs, which `mfu` counts: 6 N_matmul + 6 L h T.

    Sizes are unpadded, a tied head counts once, attention is causal, and nothing is recomputed. 9.8017e9 for `1.6b` at 1024.
    """
    return 6.0 * gpt.n_matmul_params + 6.0 * gpt.n_layer * gpt.attention_width * seq_len


def palm_flops_per_token(gpt: ModelConfig, seq_len: int) -> float:
    """Return the operations by the definition of PaLM, 6 N + 12 L h T.

    Chowdhery et al. 2022, arXiv 2204.02311, appendix B. N counts all parameters, and attention is not halved. 10.2894e9 for
    `1.6b` at 1024, 5 % above `model_flops_per_token`. nanoGPT and picotron report this definition.
    """
    return 6.0 * gpt.n_params + 12.0 * gpt.n_layer * gpt.attention_width * seq_len


def hardware_flops_per_token(gpt: ModelConfig, seq_len: int, activation_checkpointing: str = "none") -> float:
    """Return the operations that are executed, which `hfu` counts.

    To the count of `model_flops_per_token` come the padding rows of the token table and what backward computes again. `full` runs
    the forward of every block again up to the last tensor that backward needs. That leaves out the last matrix of the block, in
    GPT-2 4 h^2 of 12 h^2, where it adds 2 x 8 L h^2 + 2 L h T. FlopCounterMode of torch counts the same
    (tests/common/model/test_build.py). `selective` keeps all products and adds nothing. Only the causal half
    of attention is counted, as in `mfu`. What kernels compute beyond it in masked tiles is not counted.
    """
    padding = 6.0 * (gpt.padded_vocab_size - gpt.vocab_size) * gpt.n_embd
    recomputed = 0.0
    if activation_checkpointing == "full":
        recomputed = 2.0 * gpt.n_layer * (sum(gpt.block_matrices[:-1]) + gpt.attention_width * seq_len)
    return model_flops_per_token(gpt, seq_len) + padding + recomputed


def handout_n_params(gpt: ModelConfig) -> int:
    """Return the number of parameters as `get_model_size` of the university exercise counts them.

    It counts a tied head twice: 1,638,022,400 for `1.6b`. Only the column handout_tflops uses it (docs/guides/metrics.md).
    """
    return gpt.n_params + gpt.is_tied * gpt.vocab_size * gpt.n_embd


def handout_flops_per_token(gpt: ModelConfig) -> float:
    """Return the operations by the formula of the university exercise, 8 for each of `handout_n_params`.

    The formula assumes full recomputation and leaves attention out. It gives 1.27 times the count of PaLM for `1.6b`. It
    serves to compare old figures, never as utilisation.
    """
    return 8.0 * handout_n_params(gpt)
