"""What one training step of a model in stages does, as work on streams."""

from __future__ import annotations

from gptscale.foresight.time.operations import BYTES, StateShape
from gptscale.foresight.time.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, needs
from gptscale.foresight.time.split import Machines, ModelShape, Split, StepWriter
from gptscale.foresight.time.work import COMPUTE, GATHER, P2P, REDUCE, Item, StepWork, added, times


def pipeline_step(model: ModelShape, split: Split, machines: Machines) -> StepWork:
    """Return the step of a model whose stages, tensor ranks and data ranks are split as `split` says.

    With one stage it is a step of data and tensor parallelism.
    """
    write, step = StepWriter(model, split, machines), StepWork()
    n_stages, order = len(split.blocks), write.order()
    places: dict[tuple[str, int, int], int] = {}
    pending: list[tuple[int, tuple[str, int, int]]] = []
    rank_of = {stage: rank for rank, computations in order.items() for _, stage, _ in computations}
    messages = [write.message(rank_of[stage], rank_of[(stage + 1) % n_stages]) for stage in range(n_stages)]
    # A stage whose next is on the same rank, as at the foot of a V, sends nothing.
    stays = [rank_of[stage] == rank_of[(stage + 1) % n_stages] for stage in range(n_stages)]
    sends = [step.place_of({} if stay else message) for stay, message in zip(stays, messages, strict=True)]
    kinds = [(stage, kind) for stage in range(n_stages) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)]
    work = {(stage, kind): step.place_of(write.stage_work(stage, kind)) for stage, kind in kinds}
    last: dict[int, list[int]] = {}
    for rank, computations in order.items():
        gathered: dict[int, bool] = {}
        before: list[int] = []
        for kind, stage, m in computations:
            from_others = needs(kind, stage, m, n_stages)
            to_next, to_former = sends[stage], sends[stage - 1]
            incoming, outgoing = (to_former, to_next) if kind == FORWARD else (to_next, to_former)
            weights: tuple[int, ...] = ()
            if split.gathers and not gathered.get(stage):
                # It may begin while the computation before the last one still runs.
                work_of_gather = times(split.blocks[stage], write.gather_block())
                weights = (step.add(f"gather for {kind}{m}", rank, GATHER, work_of_gather, before[-2:-1]),)
            # Weights are let go after a forward, and kept after a backward for what follows it.
            gathered[stage] = kind != FORWARD
            if from_others and split.p2p_waits:
                pending.append((step.add(f"receive {kind}{m}", rank, COMPUTE, incoming), from_others[0]))
            name = f"{kind}{m} of stage {stage}"
            if split.overlaps_gradients and kind == BACKWARD and m == split.micro_batches - 1:
                first, place = _last_backward(step, write, name, rank, stage, weights)
            else:
                first = place = step.add(name, rank, COMPUTE, work[stage, kind], weights)
            before.append(place)
            if from_others and not split.p2p_waits:
                pending.append((first, from_others[0]))
            last[rank] = [place]
            if kind == WEIGHT:
                continue
            result = FORWARD if kind == FORWARD else BACKWARD
            leaves = stage < n_stages - 1 if kind == FORWARD else stage > 0
            places[result, stage, m] = place
            if leaves and split.p2p_waits:
                step.add(f"send {kind}{m}", rank, COMPUTE, outgoing)
            elif leaves:
                places[result, stage, m] = step.add(f"send {kind}{m}", rank, P2P, outgoing, (place,))
    for place, computation in pending:
        name, rank, stream, work_place, earlier = step.items[place]
        step.items[place] = Item(name, rank, stream, work_place, (*earlier, places[computation]))
    _finish(step, write, last, rank_of)
    return step


def _last_backward(
    step: StepWork, write: StepWriter, name: str, rank: int, stage: int, weights: tuple[int, ...]
) -> tuple[int, int]:
    """Append the last backward of a stage block by block, and beside it the reduction of each block's gradients.

    Returns the places of its first and its last computation.
    """
    split, n_bytes = write.split, write.split.gradient_bytes * write.model.block_parameters // write.split.tp
    reduced = {write.on_link(_reduction(split), n_bytes, split.dp, split.tp): 1.0}
    block = added(write.again(), write.block_work("backward"))
    first = place = step.add(f"{name}, head", rank, COMPUTE, write.stage_work(stage, BACKWARD, 0), weights)
    for i in range(split.blocks[stage]):
        place = step.add(f"{name}, block {i}", rank, COMPUTE, block)
        if split.dp > 1:
            step.add(f"gradients of block {i}", rank, REDUCE, reduced, (place,))
    return first, place


def _reduction(split: Split) -> str:
    return "gradient reduce-scatter" if split.zero else "gradient all-reduce"


def _finish(step: StepWork, write: StepWriter, last: dict[int, list[int]], rank_of: dict[int, int]) -> None:
    """Append what follows the last backward of each rank: reduced gradients, the optimizer, weights gathered again."""
    split, model = write.split, write.model
    n_stages = len(split.blocks)
    for rank, before in last.items():
        stages = [stage for stage in range(n_stages) if rank_of[stage] == rank]
        parameters = write.parameters(stages)
        if split.dp > 1:
            waiting = write.parameters(stages, blocks=not split.overlaps_gradients)
            reduced = write.on_link(_reduction(split), split.gradient_bytes * waiting, split.dp, split.tp)
            # Behind what its stream still reduces.
            before = [step.add("gradients", rank, REDUCE, {reduced: 1.0}, before)]
        if model.tied and rank_of[0] != rank_of[n_stages - 1] and (0 in stages or n_stages - 1 in stages):
            table = split.gradient_bytes * model.table_parameters / split.tp
            both = write.on_link("gradient all-reduce", table, 2, split.dp * split.tp * (split.pp - 1))
            before = [step.add("tied table", rank, COMPUTE, {both: 1.0}, before)]
        owned = max(1, parameters // split.dp) if split.zero else parameters
        update = {write.on_device("optimizer", StateShape(owned)): 1.0, write.on_device("host", ()): 1.0}
        before = [step.add("optimizer", rank, COMPUTE, update, before)]
        if split.zero and split.dp > 1 and not split.gathers:
            gathered = write.on_link("weight all-gather", BYTES * parameters, split.dp, split.tp)
            step.add("weights", rank, COMPUTE, {gathered: 1.0}, before)
