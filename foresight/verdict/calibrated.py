"""A traced run beside the calibration of its machine: how long its products and exchanges should take."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptscale.common.measure.exchanges import MESSAGE, TracedExchange
from gptscale.common.measure.step_trace import PRODUCTS, RankTrace
from gptscale.common.settings.run import Run
from gptscale.foresight.calibrate.costs import cost_table
from gptscale.foresight.calibrate.file import CalibratedMachine, default_file, read
from gptscale.foresight.time.calibration import CostTable
from gptscale.foresight.time.data_sheets import GLOO, HERE, NCCL
from gptscale.foresight.time.operations import MessageShape, ProductShape
from gptscale.foresight.time.work import COMPUTE, Operation, StepWork
from gptscale.foresight.verdict.replay import Replay

# A calibrated time with a larger spread is not compared.
SPREAD_MAX = 0.1
# An exchange that takes so many times as long as calibrated is a fault of the machine.
SLOW_LINK = 1.5
# Bytes from which an exchange is told as a rate, and not in milliseconds.
RATE_MIN = 2**16
# A calibration's names, by how those of torch's functions begin.
KINDS_OF_EXCHANGES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    MESSAGE: "send",
}
Kind = tuple[str, int, int]


@dataclass(frozen=True)
class CalibratedRun:
    """What a calibration of this machine expects of a run.

    products_s: the mean seconds of a rank's products in a step, None if they are not known well. exchanges_s: the seconds of
    an exchange, by its kind, its bytes and the number of its ranks.
    """

    products_s: float | None = None
    exchanges_s: Mapping[Kind, float] = field(default_factory=dict)

    def times_slower(self, traces: Sequence[RankTrace], processor: Sequence[float]) -> float:
        """Return how many times as long the products of the profiled step took, at least 1.

        processor: for each rank, the share of that step in which it had a processor.
        """
        if not self.products_s:
            return 1.0
        traced_s = sum(
            share * work.get(PRODUCTS, 0.0)
            for trace, share in zip(traces, processor, strict=True)
            for work in trace.work_s.values()
        )
        return max(1.0, traced_s / len(traces) / self.products_s)

    def slow_exchange(self, replay: Replay, traces: Sequence[RankTrace]) -> str:
        """Return in words the kind of exchange that lost most to a slow link, empty if none is slow."""
        seconds: dict[Kind, list[float]] = defaultdict(list)
        for trace, segments, rank in zip(traces, replay.segments, range(len(traces)), strict=True):
            for mark in segments:
                if mark.waits and mark.exchange >= 0:
                    seconds[kind_of(trace.exchanges[mark.exchange])].append(replay.waits[rank, mark.begin].transfer_s)
        lost = {
            kind: sum(times) - len(times) * self.exchanges_s[kind]
            for kind, times in seconds.items()
            if kind in self.exchanges_s and statistics.median(times) > SLOW_LINK * self.exchanges_s[kind]
        }
        if not lost:
            return ""
        kind = max(lost, key=lambda kind: lost[kind])
        name, nbytes, _ = kind
        measured_s, calibrated_s = statistics.median(seconds[kind]), self.exchanges_s[kind]
        if nbytes >= RATE_MIN:
            return f"{name} {nbytes / measured_s / 1e9:.3g} GB/s, calibrated {nbytes / calibrated_s / 1e9:.3g}"
        return f"{name} of {nbytes:,} bytes {1e3 * measured_s:.3g} ms, calibrated {1e3 * calibrated_s:.3g}"


def kind_of(exchange: TracedExchange) -> Kind:
    """Return what a calibration files an exchange under."""
    name = next((name for k, name in KINDS_OF_EXCHANGES.items() if exchange.kind.startswith(k)), exchange.kind)
    return name, exchange.nbytes, len(exchange.ranks)


def calibrated_run(
    run: Run, traces: Sequence[RankTrace], machine: CalibratedMachine, file: Path | None = None
) -> CalibratedRun | None:
    """Return what the calibration in `file` (default: the package's own) expects, None if the machine was not measured."""
    file = file or default_file()
    if all(measured.machine != machine for measured in read(file)):
        return None
    link = GLOO if run.world.device.type == "cpu" else NCCL
    per_node = max(Counter(trace.host for trace in traces).values())
    messages = {
        kind: Operation(kind[0], MessageShape(kind[1], kind[2], min(kind[2], per_node), 1), link)
        for trace in traces
        for kind in map(kind_of, trace.exchanges)
        if kind[0] in KINDS_OF_EXCHANGES.values() and kind[1]
    }
    products = products_of(run)
    operations = {*products, *messages.values()}
    costs = cost_table(operations, HERE, link, file, precision=run.config.precision, machine=machine)
    exchanges_s = {
        kind: s for kind, operation in messages.items() if (s := _seconds(costs, {operation: 1.0})) is not None
    }
    all_ranks_s = _seconds(costs, products)
    return CalibratedRun(all_ranks_s / run.world.world_size if all_ranks_s else None, exchanges_s)


def products_of(run: Run) -> dict[Operation, float]:
    """Return how often all ranks together do each product in a step. A backward counts as two of the forward's."""
    gpt, tp = run.gpt, run.tp_size
    tokens, h = run.batch.micro_batch_size * run.seq_len, gpt.n_embd
    forwards = 2.0 if run.config.activation_checkpointing == "full" else 1.0
    times = run.batch.dp_size * tp * run.batch.grad_accum_steps
    shapes = [(h, 3 * h // tp), (h // tp, h), (h, 4 * h // tp), (4 * h // tp, h)]
    products = {
        Operation("product", ProductShape(tokens, inner, columns), HERE): times * run.gpt.n_layer * (forwards + 2)
        for inner, columns in shapes
    }
    head = Operation("product", ProductShape(tokens, h, gpt.padded_vocab_size // tp), HERE)
    return products | {head: products.get(head, 0.0) + times * 3.0}


def _seconds(costs: CostTable, work: Mapping[Operation, float]) -> float | None:
    """Return the seconds of a work, None if they are not known well."""
    step = StepWork()
    step.add("work", 0, COMPUTE, work)
    prediction = costs.predict(step)
    return prediction.seconds if prediction.spread <= SPREAD_MAX else None
