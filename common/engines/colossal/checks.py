"""What HybridParallelPlugin can split a GPT into, found out before a run starts; needs no Colossal-AI."""

from __future__ import annotations

from gptscale.common.errors import ConfigError
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run import Run


def tensor_sizes(gpt: GPTConfig) -> list[int]:
    """The numbers of tensor ranks that share heads and table evenly."""
    return [n for n in range(1, gpt.n_head + 1) if gpt.n_head % n == 0 and gpt.padded_vocab_size % n == 0]


def check_tensor(run: Run) -> None:
    """ConfigError unless tensor ranks share heads and table, and dropout can be recomputed."""
    gpt, tp_size = run.gpt, run.tp_size
    if tp_size not in tensor_sizes(gpt):
        fits = " or ".join(map(str, tensor_sizes(gpt)))
        raise ConfigError(
            f"{gpt.n_head} heads and a table of {gpt.padded_vocab_size} rows cannot be cut over {tp_size} tensor ranks",
            "in --tp-size",
            f"use {fits}",
        )
    if tp_size > 1 and gpt.dropout and run.config.activation_checkpointing != "none":
        raise ConfigError(
            "Colossal-AI's dropout on tensor ranks drops other elements when a block is recomputed",
            "in --activation-checkpointing",
            "use --dropout 0, or none",
        )


def check_pipeline(run: Run, schedule: str, chunks: int) -> None:
    """ConfigError unless blocks and micro-batches fit the stages, `chunks` runs of blocks on each."""
    stages, n_layer, made = run.pp_size, run.gpt.n_layer, run.batch.grad_accum_steps
    if stages == 1:
        return
    if n_layer < stages * chunks:
        most = n_layer // chunks
        mend = f"use at most {most}" if most > 1 else f"use --n-layer {stages * chunks} or more"
        of = f" of {chunks} chunks" if chunks > 1 else ""
        raise ConfigError(f"{n_layer} blocks are too few for {stages} stages{of}", "in --pp-size", mend)
    fits = fitting_micro_batches(schedule, stages, run.batch.sequences_per_rank)
    if not takes(schedule, stages, made):
        wants = f"a multiple of {stages}" if schedule == "interleaved" else f"{stages} or more"
        mend = f"use {' or '.join(map(str, fits[:4]))}" if fits else f"use {stages} and a batch that it divides"
        raise ConfigError(
            f"{schedule} on {stages} stages takes {wants} micro-batches, not {made}", "in --grad-accum-steps", mend
        )


def takes(schedule: str, stages: int, micro_batches: int) -> bool:
    """Whether Colossal-AI's schedule takes this many (pipeline/schedule/one_f_one_b.py, interleaved_pp.py: load_batch)."""
    return micro_batches % stages == 0 if schedule == "interleaved" else micro_batches >= stages


def fitting_micro_batches(schedule: str, stages: int, sequences: int) -> list[int]:
    """The numbers of micro-batches that divide a data rank's sequences and fit."""
    return [m for m in range(1, sequences + 1) if sequences % m == 0 and takes(schedule, stages, m)]


def default_micro_batches(schedule: str, stages: int, sequences: int) -> int | None:
    """Two per stage where they divide the sequences, else what is nearest to it; None without stages."""
    if stages == 1:
        return None
    fits = fitting_micro_batches(schedule, stages, sequences)
    return min(fits, key=lambda m: (abs(m - 2 * stages), m), default=stages)


def bubble_fraction(stages: int, chunks: int, micro_batches: int) -> float:
    """Idle share of a step with equal stages and free transfers: (p - 1) / (v m + p - 1). Narayanan et al. 2021, 2.2."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)
