"""What the time of a rank goes to in its traced steps: exclusive shares, whose sum is 1."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gptscale.common.measure.step_trace import COMPUTING, ELEMENTWISE, KINDS, TRANSFER, RankTrace, host_shares_of
from gptscale.foresight.verdict.replay import Factor, Replay, TracedPiece
from gptscale.results.render import SHARES

# Uses of a rank's time beside the kinds of computation.
NO_PROCESSOR, LATE_RANK, BUBBLE_SHARE, SLOWER = "no processor", "late rank", "bubble", "slower than calibrated"
# So much longer than calibrated, products say nothing.
SLOWER_MIN = 1.1
# Ranks that have a processor for a smaller share of their work make each other wait in exchanges.
STARVED = 0.9


def shares_of(replay: Replay, host: Mapping[str, float], pipeline: bool) -> dict[str, float]:
    """Return the shares of the slowest rank's time: of the one that waits least for others.

    host: the share of each computing part that is the host's, while it has a processor. A rank that is neither at work nor
    transferring waits for another: for a late rank, or in a pipeline for another stage.
    """
    of_ranks = (_shares_of_rank(replay, rank, host, pipeline) for rank in range(replay.n_ranks))
    return min(of_ranks, key=lambda shares: shares[LATE_RANK] + shares[BUBBLE_SHARE])


def waiting_for(replay: Replay, late: int) -> float:
    """Return the mean share of time in which the other ranks wait for one that is late."""
    total = sum(max(0.0, w.arrival - w.begin) for w in replay.waits.values() if w.rank != late)
    return min(1.0, total / (replay.seconds * max(1, replay.n_ranks - 1)))


def _shares_of_rank(replay: Replay, rank: int, host: Mapping[str, float], pipeline: bool) -> dict[str, float]:
    shares = dict.fromkeys(SHARES, 0.0)
    seconds: defaultdict[str, float] = defaultdict(float)
    for piece in replay.pieces:
        # Transfers that were hidden cost no time.
        if piece.rank == rank and not piece.hidden:
            seconds[piece.kind] += piece.seconds * piece.processor
            shares[NO_PROCESSOR] += piece.seconds * (1 - piece.processor) / replay.seconds
    for kind, s in seconds.items():
        part = s / replay.seconds
        if kind not in COMPUTING:
            shares[kind if kind in shares else "host"] += part
            continue
        shares["host"] += host[kind] * part
        work_s = replay.traces[rank].work_s.get(kind, {})
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


def without(kind: str) -> Factor:
    """Return the factors that remove all pieces of a kind."""
    return lambda piece: 0.0 if piece.kind == kind else 1.0


def without_host(host: Mapping[str, float]) -> Factor:
    """Return the factors that remove the host's work, whose share of each computing part is `host`."""
    shares = {"host": 1.0} | {part: host.get(part, 0.0) for part in COMPUTING}
    return lambda piece: 1.0 - shares.get(piece.kind, 0.0)


def with_one_micro_batch(fixed: Mapping[str, float], n: int) -> Factor:
    """Return the factors that do the work of a step's `n` micro-batches in one.

    fixed: the share of each computing part, and of transfers, that does not shrink with a micro-batch. It is left once.
    """
    return lambda piece: 1.0 - fixed.get(piece.kind, 0.0) if 0 <= piece.micro_batch < n - 1 else 1.0


def with_processors(replay: Replay, shares: Mapping[int, float] | None = None) -> Factor:
    """Return the factors that give ranks a processor whenever they compute.

    Transfers are done by threads too: they are as much faster, or as short as the shortest of their kind. shares: of these ranks
    alone, up to this share of the time.
    """
    most = dict.fromkeys(range(replay.n_ranks), 1.0) if shares is None else dict(shares)
    means = {rank: min(1.0, replay.processor_share(rank) / share) for rank, share in most.items()}

    def factor(piece: TracedPiece) -> float:
        if piece.kind == TRANSFER:
            mean = min((means[rank] for rank in piece.ranks if rank in means), default=1.0)
            return min(mean, piece.least_s / piece.seconds) if mean < STARVED and piece.seconds else mean
        share = most.get(piece.rank)
        return min(1.0, piece.processor / share) if share else 1.0

    return factor


def with_rank_as_others(replay: Replay, rank: int, ratio_min: float) -> Factor:
    """Return the factors that make a rank as fast as the median of the others.

    It gets as much of a processor as they have. If it then still has `ratio_min` times their work, it gets their seconds of
    each kind.
    """
    others = [other for other in range(replay.n_ranks) if other != rank]
    share = statistics.median(replay.processor_share(other) for other in others)
    processor = with_processors(replay, {rank: share})
    own, others_s = replay.own_s(rank, processor), [replay.own_s(other) for other in others]
    if sum(own.values()) < ratio_min * statistics.median(sum(seconds.values()) for seconds in others_s):
        return processor
    usual = {kind: statistics.median(seconds.get(kind, 0.0) for seconds in others_s) for kind in own}

    def factor(piece: TracedPiece) -> float:
        as_others = 1.0
        if piece.rank == rank and own.get(piece.kind, 0.0) > 0:
            as_others = min(1.0, usual[piece.kind] / own[piece.kind])
        return processor(piece) * as_others

    return factor
