"""What the time of a rank goes to in its traced steps: exclusive shares, whose sum is 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gptscale.common.measure.step_trace import COMPUTING, ELEMENTWISE, KINDS, TRANSFER, RankTrace, host_shares_of
from gptscale.foresight.verdict.player import COMPUTE
from gptscale.foresight.verdict.replay import Replay

# Uses of a rank's time beside the kinds of computation.
NO_PROCESSOR, LATE_RANK, BUBBLE_SHARE, SLOWER = "no processor", "late rank", "bubble", "slower than calibrated"
SHARES = ("data", "host", TRANSFER, LATE_RANK, BUBBLE_SHARE, "disk", "bus", "allocator", NO_PROCESSOR, SLOWER)
# So much longer than calibrated, products say nothing.
SLOWER_MIN = 1.1


def shares_of(
    replay: Replay, traces: Sequence[RankTrace], host: Mapping[str, float], pipeline: bool
) -> dict[str, float]:
    """Return the shares of the slowest rank's time: of the one that waits least for others.

    host: the share of each computing part that is the host's, while it has a processor. A rank that is neither at work nor
    transferring waits for another: for a late rank, or in a pipeline for another stage.
    """
    return min(
        (_shares_of_rank(replay, traces[rank], rank, host, pipeline) for rank in range(replay.n_ranks)), key=waiting
    )


def waiting(shares: Mapping[str, float]) -> float:
    """Return the share in which a rank waits for others to come."""
    return shares[LATE_RANK] + shares[BUBBLE_SHARE]


def waiting_for(replay: Replay, late: int) -> float:
    """Return the mean share of time in which the other ranks wait for one that is late."""
    total = sum(max(0.0, w.arrival - w.begin) for w in replay.waits.values() if w.rank != late)
    return min(1.0, total / (replay.seconds * max(1, replay.n_ranks - 1)))


def _shares_of_rank(
    replay: Replay, trace: RankTrace, rank: int, host: Mapping[str, float], pipeline: bool
) -> dict[str, float]:
    shares = dict.fromkeys((*SHARES, *KINDS), 0.0)
    seconds: defaultdict[str, float] = defaultdict(float)
    for piece in replay.pieces:
        # Transfers that were hidden cost no time.
        if piece.rank == rank and piece.stream == COMPUTE:
            seconds[piece.kind] += piece.seconds * piece.processor
            shares[NO_PROCESSOR] += piece.seconds * (1 - piece.processor) / replay.seconds
    for kind, s in seconds.items():
        part = s / replay.seconds
        if kind not in COMPUTING:
            shares[kind if kind in shares else "host"] += part
            continue
        shares["host"] += host[kind] * part
        work_s = trace.work_s.get(kind, {})
        all_work_s = sum(work_s.values())
        for name in KINDS:
            shares[name] += (
                (1 - host[kind]) * part * (work_s[name] / all_work_s if all_work_s else float(name == ELEMENTWISE))
            )
    shares[BUBBLE_SHARE if pipeline else LATE_RANK] += max(0.0, 1 - sum(shares.values()))
    return shares


def slowed(shares: Mapping[str, float], times: float) -> dict[str, float]:
    """Return the shares with what computation takes longer than calibrated as a share of its own, if that is told for sure."""
    if times < SLOWER_MIN:
        return dict(shares)
    usual = {kind: shares[kind] / times for kind in KINDS}
    return {**shares, **usual, SLOWER: sum(shares[kind] for kind in KINDS) - sum(usual.values())}


def host_shares(traces: Sequence[RankTrace], *, threads: bool) -> dict[str, float]:
    """Return the share of each computing part that is the host: what remains when the work of its operations is taken away.

    It is that of the rank which has least, since a host that limits limits all. threads: whether the marks tell how long a
    thread had a processor. Only that time counts then, and a profiled step that was disturbed only tells how many operations
    there were.
    """
    of_ranks = [host_shares_of(trace, threads) for trace in traces]
    return {part: min(shares[part] for shares in of_ranks) for part in COMPUTING}
