"""The arithmetic of a pipeline: its schedules, what each of them requires, and how stages share the blocks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from gptscale.common.errors import ConfigError

if TYPE_CHECKING:
    from gptscale.common.settings.run import Run
    from gptscale.common.settings.shape import ModelConfig

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
# Schedules with one stage per process.
ONE_STAGE = ("GPipe", "1F1B")
# Schedules with two stages per process: one on the way down the V, one on the way up.
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Schedules that run the two halves of a backward, for the input and for the weights, at different times.
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class PipelineOptions(Protocol):
    """The options of a recipe with stages."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def stages_per_rank(self) -> int: ...
    @property
    def layers_per_stage(self) -> str: ...


def stages_per_rank(options: PipelineOptions) -> int:
    """Return the number of stages of one process."""
    return options.stages_per_rank or (1 if options.schedule in ONE_STAGE else 2)


def stage_indices(schedule: str, pp_rank: int, pp_size: int, n_stages: int) -> list[int]:
    """Return the stages that a process computes: every pp_size-th, or one on each leg of a V."""
    if schedule in V_SHAPED:
        return [pp_rank, 2 * pp_size - 1 - pp_rank]
    return list(range(pp_rank, n_stages, pp_size))


def fits(schedule: str, n_microbatches: int, pp_size: int, n_stages: int) -> bool:
    """Return whether torch's schedule takes this many micro-batches."""
    # The interleaved schedules work in equal rounds of at least pp_size micro-batches.
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return n_microbatches >= pp_size and n_microbatches % (n_microbatches // pp_size) == 0
    if schedule in ("1F1B", "DualPipeV"):
        return n_microbatches >= n_stages
    return n_microbatches >= (pp_size if schedule == "ZBVZeroBubble" else 1)


def micro_batches(options: PipelineOptions, sequences: int, pp_size: int) -> int | None:
    """Return how many micro-batches to make of a data rank's sequences.

    It is the number nearest to two per stage that divides the sequences and fits the schedule, or one per stage if none does.
    On one process it is None, which leaves the choice to the batch arithmetic.
    """
    if pp_size == 1:
        return None
    n_stages = pp_size * stages_per_rank(options)
    usable = [m for m in range(1, sequences + 1) if sequences % m == 0 and fits(options.schedule, m, pp_size, n_stages)]
    return min(usable, key=lambda m: (abs(m - 2 * n_stages), m), default=n_stages)


def head_cost(gpt: ModelConfig, seq_len: int) -> float:
    """Return the work of the head in units of a block's work.

    Work is the number of multiplications for one token; causal attention counts half.
    """
    block = sum(gpt.block_matrices) + seq_len * gpt.attention_width
    return gpt.padded_vocab_size * gpt.n_embd / block


def balanced(n_layer: int, n_stages: int, head: float) -> list[int]:
    """Return the number of blocks of each stage, so that the heaviest stage is as light as possible.

    head: the extra work of the last stage, in blocks. Every stage has a block, except that the last may be the head alone.
    Of several shares that are equally good, this is the one with the most blocks in the last stage.
    """
    if n_stages == 1:
        return [n_layer]
    others = n_stages - 1

    def heaviest(in_last: int) -> tuple[float, int]:
        return max(-(-(n_layer - in_last) // others), in_last + head), -in_last

    in_last = min(range(n_layer - others + 1), key=heaviest)
    each, extra = divmod(n_layer - in_last, others)
    return [each + 1] * extra + [each] * (others - extra) + [in_last]


def stage_sizes(run: Run, options: PipelineOptions) -> list[int]:
    """Return the blocks of each stage from --layers-per-stage: `balanced`, or numbers with commas between."""
    n_stages = run.pp_size * stages_per_rank(options)
    best = balanced(run.gpt.n_layer, n_stages, head_cost(run.gpt, run.seq_len))
    layers, where = options.layers_per_stage, "in --layers-per-stage"
    if layers == "balanced":
        return best
    example = ",".join(map(str, best))
    try:
        sizes = [int(word) for word in layers.split(",")]
    except ValueError:
        what = f"{layers!r} is no list of numbers"
        raise ConfigError(what, where, f"use balanced, or for example {example}") from None
    if len(sizes) != n_stages or sum(sizes) != run.gpt.n_layer or min(sizes[:-1], default=1) < 1 or sizes[-1] < 0:
        what = f"{layers} does not share {run.gpt.n_layer} blocks among {n_stages} stages"
        raise ConfigError(what, where, f"use for example {example}")
    return sizes


def check_stages(run: Run, options: PipelineOptions) -> None:
    """Raise ConfigError unless layers, stages, processes and micro-batches fit each other and the schedule."""
    pp_size, schedule, stages = run.pp_size, options.schedule, stages_per_rank(options)
    if stages < 1 or (schedule in ONE_STAGE and stages != 1) or (schedule in V_SHAPED and stages != 2):
        right = 1 if schedule in ONE_STAGE else 2
        what = f"{schedule} has {right} stage{'s' if right > 1 else ''} per process, not {stages}"
        raise ConfigError(what, "in --stages-per-rank", f"use {right}, or another --schedule")
    n_stages, n_layer = pp_size * stages, run.gpt.n_layer
    if n_layer < max(1, n_stages - 1):
        most = (n_layer + 1) // stages
        what = f"{n_layer} blocks are too few for {n_stages} stages ({pp_size} processes x {stages})"
        fix = f"use at most {most}" if most else f"use --n-layer {n_stages - 1} or more"
        raise ConfigError(what, "in --pp-size", fix)
    stage_sizes(run, options)
    if run.config.is_own:
        import_module("gptscale.common.engines.pipeline.chain_stage").check_chain(run.gpt, schedule)
    n_microbatches, sequences = run.batch.grad_accum_steps, run.batch.sequences_per_rank
    if not fits(schedule, n_microbatches, pp_size, n_stages):
        fitting = [m for m in range(1, 8 * n_stages + 1) if fits(schedule, m, pp_size, n_stages)]
        advised = [m for m in fitting if sequences % m == 0] or [m for m in fitting if m % pp_size == 0]
        what = f"{schedule} with {n_stages} stages on {pp_size} processes does not take {n_microbatches} micro-batches"
        raise ConfigError(what, "in --grad-accum-steps", f"use {' or '.join(map(str, advised[:2]))}, or schedule GPipe")


def describe_stages(run: Run, options: PipelineOptions) -> list[str]:
    """Return the lines that describe the stages: the blocks of each, the balance of their work, and the schedule."""
    sizes, head = stage_sizes(run, options), head_cost(run.gpt, run.seq_len)
    work = [float(size) for size in sizes]
    work[-1] += head
    shares = " | ".join(f"{size}" for size in sizes[:-1]) + f" | {sizes[-1]} + head"
    even = sum(work) / len(work)
    return [
        f"stages   {shares} blocks (head = {head:.2f} blocks; the heaviest stage has {max(work) / even:.2f} x the mean)",
        f"schedule {options.schedule}, {run.batch.grad_accum_steps} micro-batches of {run.batch.micro_batch_size}",
    ]
