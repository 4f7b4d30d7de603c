"""Checks before a run of how Colossal-AI's HybridParallelPlugin can split a GPT, which need no Colossal-AI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptscale.common.errors import ConfigError

if TYPE_CHECKING:
    from gptscale.common.settings.run import Run
    from gptscale.common.settings.shape import ModelConfig


def tensor_sizes(gpt: ModelConfig) -> list[int]:
    """Return the numbers of tensor ranks that share heads and table evenly."""
    return [n for n in range(1, gpt.n_head + 1) if gpt.n_head % n == 0 and gpt.padded_vocab_size % n == 0]


def check_tensor(run: Run) -> None:
    """Raise ConfigError unless tensor ranks share heads and table evenly, and dropout can be recomputed."""
    gpt, tp_size = run.gpt, run.tp_size
    if tp_size not in tensor_sizes(gpt):
        fits = " or ".join(map(str, tensor_sizes(gpt)))
        what = (
            f"{gpt.n_head} heads and a table of {gpt.padded_vocab_size} rows cannot be cut over {tp_size} tensor ranks"
        )
        raise ConfigError(what, "in --tp-size", f"use {fits}")
    if tp_size > 1 and gpt.dropout and run.config.activation_checkpointing != "none":
        what = "Colossal-AI's dropout on tensor ranks drops other elements when a block is recomputed"
        raise ConfigError(what, "in --activation-checkpointing", "use --dropout 0, or none")


def check_pipeline(run: Run, schedule: str, chunks: int) -> None:
    """Raise ConfigError unless blocks and micro-batches fit the stages, which have `chunks` runs of blocks each."""
    stages, n_layer, micro_batches = run.pp_size, run.gpt.n_layer, run.batch.grad_accum_steps
    if stages == 1:
        return
    if n_layer < stages * chunks:
        most = n_layer // chunks
        fix = f"use at most {most}" if most > 1 else f"use --n-layer {stages * chunks} or more"
        of = f" of {chunks} chunks" if chunks > 1 else ""
        raise ConfigError(f"{n_layer} blocks are too few for {stages} stages{of}", "in --pp-size", fix)
    fits = fitting_micro_batches(schedule, stages, run.batch.sequences_per_rank)
    if not takes(schedule, stages, micro_batches):
        wants = f"a multiple of {stages}" if schedule == "interleaved" else f"{stages} or more"
        fix = f"use {' or '.join(map(str, fits[:4]))}" if fits else f"use {stages} and a batch that it divides"
        what = f"{schedule} on {stages} stages takes {wants} micro-batches, not {micro_batches}"
        raise ConfigError(what, "in --grad-accum-steps", fix)


def stage_sizes(n_layer: int, stages: int, chunks: int) -> list[int]:
    """Return how many blocks each run of blocks has, in the model's order.

    Stage s computes every `stages`-th run, from s on. Blocks that are over go to the runs in the middle, as in Colossal-AI 0.5.0,
    pipeline/stage_manager.py, distribute_layers.
    """
    runs = stages * chunks
    even, over = divmod(n_layer, runs)
    first = runs // 2 - over // 2
    return [even + (first <= i < first + over) for i in range(runs)]


def takes(schedule: str, stages: int, micro_batches: int) -> bool:
    """Return whether Colossal-AI's schedule takes this many micro-batches."""
    # pipeline/schedule/one_f_one_b.py and interleaved_pp.py, load_batch
    return micro_batches % stages == 0 if schedule == "interleaved" else micro_batches >= stages


def fitting_micro_batches(schedule: str, stages: int, sequences: int) -> list[int]:
    """Return the numbers of micro-batches that divide a data rank's sequences and that the schedule takes."""
    return [m for m in range(1, sequences + 1) if sequences % m == 0 and takes(schedule, stages, m)]


def default_micro_batches(schedule: str, stages: int, sequences: int) -> int | None:
    """Return the number of micro-batches that fits and is nearest to two per stage, or None without stages."""
    if stages == 1:
        return None
    fits = fitting_micro_batches(schedule, stages, sequences)
    return min(fits, key=lambda m: (abs(m - 2 * stages), m), default=stages)


def bubble_fraction(stages: int, chunks: int, micro_batches: int) -> float:
    """Return the idle share of a step with equal stages and free transfers.

    It is (p - 1) / (v m + p - 1) for p stages, v chunks and m micro-batches: Narayanan et al. 2021, section 2.2.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)
