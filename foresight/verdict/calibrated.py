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
from gptscale.foresight.calibrate.costs import at, curves_of, nearest
from gptscale.foresight.calibrate.file import CalibratedMachine, default_file, read
from gptscale.foresight.calibrate.parts import products_of
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
    """What a calibration of this machine expects of a run, nothing if the machine was not measured.

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

    def slow_exchange(self, replay: Replay) -> str:
        """Return in words the kind of exchange that lost most to a slow link, empty if none is slow."""
        seconds: dict[Kind, list[float]] = defaultdict(list)
        for rank, trace in enumerate(replay.traces):
            for mark in replay.segments[rank]:
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


UNMEASURED = CalibratedRun()


def kind_of(exchange: TracedExchange) -> Kind:
    """Return what a calibration files an exchange under."""
    name = next((name for k, name in KINDS_OF_EXCHANGES.items() if exchange.kind.startswith(k)), exchange.kind)
    return name, exchange.nbytes, len(exchange.ranks)


def calibrated_run(
    run: Run, traces: Sequence[RankTrace], machine: CalibratedMachine, file: Path | None = None
) -> CalibratedRun:
    """Return what the calibration in `file` (default: the package's own) expects."""
    measured = nearest(read(file or default_file()), machine)
    if measured is None or measured.machine != machine:
        return UNMEASURED
    timed = measured.combined(run.config.precision)
    known = {operation: time for operation, time in timed.items() if time.spread <= SPREAD_MAX}
    per_node = max(Counter(trace.host for trace in traces).values())
    curves = curves_of({operation: time for operation, time in known.items() if operation.kind != "product"})
    exchanges_s = {}
    for kind in {kind_of(exchange) for trace in traces for exchange in trace.exchanges}:
        name, nbytes, ranks = kind
        curve = curves.get((name, (ranks, min(ranks, per_node))))
        if curve and nbytes:
            exchanges_s[kind] = at(curve, nbytes)
    # A backward counts as two of the forward's. Only what was measured in its own shape is compared.
    tokens = run.batch.micro_batch_size * run.rank_seq_len
    forwards = 2.0 if run.config.activation_checkpointing == "full" else 1.0
    products = products_of(run.gpt, tokens, run.tp_size)
    products_s = None
    if {operation for operation, _ in products} <= {*known}:
        *blocks, head = (count * known[operation].seconds for operation, count in products)
        products_s = ((forwards + 2) * sum(blocks) + 3.0 * head) * run.batch.grad_accum_steps / run.pp_size
    return CalibratedRun(products_s, exchanges_s)
