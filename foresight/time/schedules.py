"""The order in which the ranks of a pipeline compute, and what each computation waits for.

`common/measure/bubble.order_of` gives the same for any of torch's schedule objects. These need no torch and no process group.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

# A computation is (kind, stage, micro-batch) with these kinds, as in common/measure/bubble.py.
FORWARD, BACKWARD = "F", "B"
# The halves of a backward: for the input, which the stage before waits for, and for the weights.
INPUT, WEIGHT = "I", "W"
Order = dict[int, list[tuple[str, int, int]]]


def gpipe(n_stages: int, n_micro_batches: int) -> Order:
    """Return all forwards, then all backwards."""
    kinds = (FORWARD, BACKWARD)
    return {stage: [(kind, stage, m) for kind in kinds for m in range(n_micro_batches)] for stage in range(n_stages)}


def one_forward_one_backward(n_stages: int, n_micro_batches: int) -> Order:
    """Return the order in which a stage has at most as many micro-batches in flight as there are stages from it on."""
    order: Order = {}
    for stage in range(n_stages):
        ahead = min(n_micro_batches, n_stages - stage - 1)
        forwards = [(FORWARD, stage, m) for m in range(n_micro_batches)]
        backwards = [(BACKWARD, stage, m) for m in range(n_micro_batches)]
        pairs = zip(forwards[ahead:], backwards, strict=False)
        steady = [computation for pair in pairs for computation in pair]
        order[stage] = forwards[:ahead] + steady + backwards[n_micro_batches - ahead :]
    return order


def interleaved(n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> Order:
    """Return Megatron's interleaved order: rounds of `n_ranks` micro-batches through each of a rank's stages in turn.

    The number of micro-batches is a multiple of the number of ranks.
    """
    if n_micro_batches % n_ranks:
        raise ValueError(f"{n_micro_batches} micro-batches are no multiple of {n_ranks} ranks")
    n_stages, total = n_ranks * stages_per_rank, n_micro_batches * stages_per_rank

    def nth(kind: str, rank: int, n: int) -> tuple[str, int, int]:
        round_, within = divmod(n, n_stages)
        chunk, micro_batch = divmod(within, n_ranks)
        chunk = chunk if kind == FORWARD else stages_per_rank - 1 - chunk
        return kind, chunk * n_ranks + rank, round_ * n_ranks + micro_batch

    order: Order = {}
    for rank in range(n_ranks):
        ahead = min(total, 2 * (n_ranks - rank - 1) + (stages_per_rank - 1) * n_ranks)
        order[rank] = [nth(FORWARD, rank, n) for n in range(ahead)]
        for n in range(total):
            order[rank] += [nth(FORWARD, rank, ahead + n)] if ahead + n < total else []
            order[rank].append(nth(BACKWARD, rank, n))
    return order


@lru_cache(maxsize=256)
def _torch_order(schedule: str, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> Order:
    """Return the order by torch's own schedule, which is asked for its arithmetic alone: no stages, no process group."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    from gptscale.common.measure.bubble import order_of

    kind: Any = get_schedule_class(schedule)
    instance = object.__new__(kind)
    rounds = max(1, n_micro_batches // n_ranks)
    n_stages = n_ranks * stages_per_rank
    facts: dict[str, Any] = {
        "pp_group_size": n_ranks,
        "n_local_stages": stages_per_rank,
        "rank": 0,
        "_n_microbatches": n_micro_batches,
    }
    facts |= {"number_of_rounds": rounds, "microbatches_per_round": n_micro_batches // rounds}
    facts |= {"num_stages": n_stages, "_num_stages": n_stages, "_stages": [None] * stages_per_rank}
    vars(instance).update(facts)
    orders = {rank: instance._calculate_single_rank_operations(rank) for rank in range(n_ranks)}
    return order_of(SimpleNamespace(pipeline_order=orders), n_stages, n_micro_batches)


def order_of_schedule(schedule: str, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> Order:
    """Return the order of a schedule by its name, as `--schedule` has it. Raises KeyError for one that is not here."""
    if schedule == "Interleaved1F1B" and stages_per_rank > 1 and n_micro_batches % n_ranks == 0:
        return interleaved(n_ranks, stages_per_rank, n_micro_batches)
    if schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        return _torch_order(schedule, n_ranks, stages_per_rank, n_micro_batches)
    return {"GPipe": gpipe, "1F1B": one_forward_one_backward}[schedule](n_ranks, n_micro_batches)


def needs(kind: str, stage: int, micro_batch: int, n_stages: int) -> list[tuple[str, int, int]]:
    """Return the computations of other stages that one waits for. A half of a backward for the input counts as the backward."""
    if kind == WEIGHT:
        return []
    if kind == FORWARD:
        return [(FORWARD, stage - 1, micro_batch)] if stage else []
    return [(BACKWARD, stage + 1, micro_batch)] if stage + 1 < n_stages else []
