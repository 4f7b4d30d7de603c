"""The step of a run as its recipe runs it, by the layout that the recipe's row in the table names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gptscale.common.engines.colossal import checks as colossal
from gptscale.common.engines.pipeline.plan import SPLIT_BACKWARD, stage_indices, stage_sizes, stages_per_rank
from gptscale.foresight.calibrate.steps import step_here
from gptscale.foresight.plan.enumeration import Candidate
from gptscale.foresight.time.data_sheets import HERE
from gptscale.foresight.time.data_steps import DataStep, Exchange
from gptscale.foresight.time.schedules import BACKWARD, FORWARD
from gptscale.foresight.time.split import Machines, ModelShape, Split, StepWriter
from gptscale.foresight.time.steps import pipeline_step
from gptscale.foresight.time.work import Operation, StepWork, added, times
from gptscale.recipes import get

MIB = 2**20
# Elements of DeepSpeed's reduce bucket (recipes/zero.py).
BUCKET = 50_000_000
# Micro-batches that are written of a step of data ranks. Those beyond take as long as the last one of these adds.
WRITTEN = 3


def model_of(candidate: Candidate) -> ModelShape:
    """Return the shape of a run's model."""
    gpt = candidate.run.gpt
    return ModelShape(
        gpt.n_layer,
        gpt.n_embd,
        gpt.n_head,
        candidate.run.seq_len,
        gpt.padded_vocab_size,
        gpt.n_head,
        4 * gpt.n_embd,
        fused_attention=candidate.run.config.attention != "math",
    )


def steps_of(candidate: Candidate, machines: Machines) -> tuple[list[StepWork], int]:
    """Return the step, or two of it with one micro-batch less and more, and how many micro-batches are not written."""
    if machines.device == HERE:
        # On a processor layers are timed whole, as each recipe holds them.
        return [step_here(candidate.run, candidate.config)], 0
    if candidate.run.pp_size > 1:
        return [pipeline_step(model_of(candidate), _pipeline_split(candidate), machines)], 0
    n = candidate.run.batch.grad_accum_steps
    if n <= WRITTEN:
        return [_data(candidate, machines, n)], 0
    return [_data(candidate, machines, WRITTEN - 1), _data(candidate, machines, WRITTEN)], n - WRITTEN


def estimated_work(candidate: Candidate, machines: Machines) -> list[dict[Operation, float]]:
    """Return what each pipeline rank computes in a step, and more for the bubble. It orders candidates, it is no prediction."""
    run = candidate.run
    m, n = run.batch.grad_accum_steps, run.pp_size
    split = _pipeline_split(candidate) if n > 1 else _split(candidate, m)
    write = StepWriter(model_of(candidate), split, machines)
    stages = [added(write.stage_work(i, FORWARD), write.stage_work(i, BACKWARD)) for i in range(len(split.blocks))]
    halves = 3 if split.schedule in SPLIT_BACKWARD else 1
    bubble = (n - 1) / (m * split.stages_per_rank * halves)
    of_rank = [
        [stages[i] for i in stage_indices(split.schedule, rank, n, len(stages))] if n > 1 else stages
        for rank in range(n)
    ]
    return [times(m * (1 + bubble), added(*works)) for works in of_rank]


def n_items(candidate: Candidate) -> int:
    """Return about how many items the step of a candidate has."""
    run = candidate.run
    if run.pp_size == 1:
        return 5 * min(run.batch.grad_accum_steps, WRITTEN) * run.gpt.n_layer
    split = _pipeline_split(candidate)
    return 4 * run.batch.grad_accum_steps * len(split.blocks)


def _split(candidate: Candidate, micro_batches: int) -> Split:
    run = candidate.run
    mode = run.config.activation_checkpointing
    compute = 4 if run.config.precision == "fp32" else 2
    native = get(run.recipe).engine == "torch"
    return Split(
        run.batch.dp_size,
        run.tp_size,
        run.pp_size,
        run.batch.micro_batch_size,
        micro_batches,
        (run.gpt.n_layer,),
        recompute=mode == "full",
        recompute_elementwise=mode == "selective",
        sequence_parallel=native and run.tp_size > 1,
        gathered_sequence=native,
        p2p_waits=False,
        gradient_bytes=4 if get(run.recipe).memory not in ("plugin", "chunks") else compute,
        scattered_p2p=native,
        compute_bytes=compute,
        # Without data ranks our stages pass on the fp32 stream of autocast.
        sent_bytes=compute if not native or run.batch.dp_size > 1 else 4,
    )


def _pipeline_split(candidate: Candidate) -> Split:
    run, config = candidate.run, candidate.config
    if hasattr(config, "stages_per_rank"):
        per_rank, blocks = stages_per_rank(config), tuple(stage_sizes(run, config))  # type: ignore[arg-type]
        schedule: str = config.schedule  # type: ignore[attr-defined]
    else:
        # Its interleaved order is Megatron's.
        per_rank = config.chunks  # type: ignore[attr-defined]
        blocks = tuple(colossal.stage_sizes(run.gpt.n_layer, run.pp_size, per_rank))
        schedule = "1F1B" if per_rank == 1 else "Interleaved1F1B"
    cut = run.batch.dp_size > 1 and getattr(config, "data_parallel", "") == "fsdp"
    return dataclasses.replace(
        _split(candidate, run.batch.grad_accum_steps),
        blocks=blocks,
        schedule=schedule,
        stages_per_rank=per_rank,
        zero=3 if cut else 0,
        gathers=cut,
    )


def _data(candidate: Candidate, machines: Machines, micro_batches: int) -> StepWork:
    write = StepWriter(model_of(candidate), _split(candidate, micro_batches), machines)
    return DataStep(write, EXCHANGES[get(candidate.run.recipe).memory](candidate)).written()


def _replicas(candidate: Candidate) -> Exchange:
    dp = candidate.run.batch.dp_size
    bucket = getattr(candidate.config, "bucket_cap_mb", 25.0) * MIB
    return Exchange(dp, reduces="all-reduce" if dp > 1 else "", bucket=int(bucket))


def _rows(candidate: Candidate) -> Exchange:
    config, dp = candidate.config, candidate.run.batch.dp_size
    return Exchange(
        dp // getattr(config, "dp_replicate_size", 1),
        gathers=2 if getattr(config, "reshard_after_forward", True) else 1,
        reduces="reduce-scatter",
        every=getattr(config, "sync_every_micro_batch", True),
        cut_state=True,
        offload="cpu" if config.offload == "cpu" else "none",
        prefetch=getattr(config, "prefetch", 1),
    )


def _strategy(candidate: Candidate) -> Exchange:
    return _rows(candidate) if candidate.config.strategy == "fully_shard" else _replicas(candidate)  # type: ignore[attr-defined]


def _flat(candidate: Candidate) -> Exchange:
    """Return DeepSpeed's exchanges: stages 1 and 2 stop backward for an all-reduce of each bucket, stage 3 goes on beside it."""
    run, config, dp = candidate.run, candidate.config, candidate.run.batch.dp_size
    compute, stage = 4 if run.config.precision == "fp32" else 2, config.stage  # type: ignore[attr-defined]
    bucket = 4 * min(BUCKET, run.gpt.n_params // 8)
    offload = config.offload
    if stage == 3:
        return Exchange(
            dp,
            2,
            "reduce-scatter",
            every=True,
            bucket=bucket,
            cut_state=True,
            offload=offload,  # type: ignore[arg-type]
            stored_bytes=compute,
        )
    return Exchange(
        dp,
        reduces="all-reduce" if dp > 1 else "",
        every=stage == 2,
        overlaps=False,
        bucket=bucket,
        cut_state=True,
        weights_after=compute,
        offload=offload,  # type: ignore[arg-type]
    )


def _owners(candidate: Candidate) -> Exchange:
    """Return fairscale's exchange: a gradient goes to its owner, who sends the new weight to all."""
    size = 4 * candidate.config.reduce_buffer_size  # type: ignore[attr-defined]
    return Exchange(candidate.run.batch.dp_size, reduces="reduce-scatter", bucket=size, cut_state=True, weights_after=4)


def _mesh(candidate: Candidate) -> Exchange:
    if candidate.run.batch.dp_size > 1 and candidate.config.data_parallel == "fsdp":  # type: ignore[attr-defined]
        return _rows(candidate)
    return _replicas(candidate)


def _chunks(candidate: Candidate) -> Exchange:
    run, config, dp = candidate.run, candidate.config, candidate.run.batch.dp_size
    compute = 4 if run.config.precision == "fp32" else 2
    offload = "cpu" if config.offload == "cpu" else "none"
    if hasattr(config, "shard_param_frac"):
        gathers = 2 if config.shard_param_frac else 0
        return Exchange(dp, gathers, "reduce-scatter", True, cut_state=True, offload=offload, stored_bytes=compute)  # type: ignore[arg-type]
    kind = "all-reduce" if config.stage == 1 else "reduce-scatter"  # type: ignore[attr-defined]
    return Exchange(dp, 0, kind, config.stage == 2, cut_state=True, weights_after=compute, bucket=12 * MIB)  # type: ignore[attr-defined]


# By the names of recipes/__init__.py, `memory`.
EXCHANGES: dict[str, Callable[[Candidate], Exchange]] = {
    "replicas": _replicas,
    "rows": _rows,
    "strategy": _strategy,
    "flat": _flat,
    "owners": _owners,
    "matrices": _replicas,
    "mesh": _mesh,
    "plugin": _replicas,
    "chunks": _chunks,
    "stages": _replicas,
}
