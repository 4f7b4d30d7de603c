"""A few lines on how long a step lasts at least. They say which runs are worth a simulation, and are never the answer."""

from __future__ import annotations

from gptscale.common.engines.pipeline.plan import SPLIT_BACKWARD
from gptscale.common.measure.flops import hardware_flops_per_token
from gptscale.foresight.memory.bound import Places
from gptscale.foresight.plan.enumeration import Candidate
from gptscale.foresight.price.cost import Costs
from gptscale.foresight.price.record import Work
from gptscale.recipes import get

# How data ranks hold the weights: these gather them for every micro-batch. Others exchange gradients once a step.
GATHERS = ("rows", "chunks")
# Products that selective checkpointing spares have kernels around them, which it does not.
SELECTIVE = 1.05
# Passes over the activations take about as long, on top of products.
PASSES = 1.15


def estimated_seconds(candidate: Candidate, places: Places, costs: Costs) -> float:
    """Return how long a step lasts at least: what is computed, and what nothing of it can hide.

    places: the bound of its memory.
    """
    run, config = candidate.run, candidate.config
    batch, gpt, tp, pp = run.batch, run.gpt, run.tp_size, run.pp_size
    mode, size = run.config.activation_checkpointing, 4 if run.config.precision == "fp32" else 2
    precision = "tf32" if size == 4 else run.config.precision
    tokens, n = batch.micro_batch_size * run.seq_len, batch.grad_accum_steps
    sizes = (tokens, 4 * gpt.n_embd // tp, gpt.n_embd, 1)
    flops = 2.0 * tokens * sizes[1] * gpt.n_embd
    # How fast a product of these sizes is stands for all.
    rate = flops / costs.seconds(Work(0.0, "product", 0, "mm", flops, 0.0, precision, sizes))
    each = tokens * hardware_flops_per_token(gpt, run.seq_len, mode) / tp / pp / rate * PASSES
    each *= SELECTIVE if mode == "selective" else 1.0
    if tp > 1:
        # Twice in forward and twice in backward, and twice more where a forward is computed again.
        turns = (6 if mode == "full" else 4) * gpt.n_layer / pp
        nbytes = tokens * gpt.n_embd * size
        each += turns * costs.seconds(Work(0.0, "collective", 0, "all-reduce", nbytes=nbytes, ranks=tp, on_node=tp))
    held, dp = gpt.n_params / tp / pp, batch.dp_size
    nodes = max(1, run.world.world_size // costs.per_node)
    on_node = max(1, min(dp, costs.per_node // tp // (pp if nodes == 1 else 1)))

    def exchange(name: str, nbytes: float) -> float:
        return costs.seconds(Work(0.0, "collective", 0, name, nbytes=nbytes, ranks=dp, on_node=on_node))

    once = 0.0
    cut = getattr(config, "data_parallel", getattr(config, "strategy", "")) in ("fsdp", "fully_shard")
    if dp > 1 and (cut or get(run.recipe).memory in GATHERS or getattr(config, "stage", 0) == 3):
        gathers = 2 if getattr(config, "reshard_after_forward", True) else 1
        each = max(each, gathers * exchange("all-gather", size * held) + exchange("reduce-scatter", 4 * held))
    elif dp > 1:
        # All but the last backward has nothing to hide it.
        once = max(0.0, exchange("all-reduce", 4 * held) - 2 / 3 * each)
    if config.offload != "none":
        once += costs.seconds(Work(0.0, "host", 0, "optimizer", nbytes=30.0 * held / max(1, dp)))
        once += 2 * costs.seconds(Work(0.0, "copy", 0, "host to device", nbytes=size * held / max(1, dp)))
    if places.disk:
        once += sum(costs.seconds(Work(0.0, "disk", 0, way, nbytes=places.disk)) for way in ("read", "write"))
    stages = getattr(config, "stages_per_rank", 0) or getattr(config, "chunks", 0) or 1
    bubble = (pp - 1) / stages / (3 if getattr(config, "schedule", "") in SPLIT_BACKWARD else 1)
    return (n + bubble) * each + once
