"""What a cause costs each piece of traced steps: factors that a replay plays without it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from gptscale.common.measure.step_trace import COMPUTING, TRANSFER
from gptscale.foresight.verdict.player import Factor, TracedPiece
from gptscale.foresight.verdict.replay import Replay


def without(*kinds: str) -> Factor:
    """Return the factors that remove all pieces of some kinds."""
    return lambda piece: 0.0 if piece.kind in kinds else 1.0


def with_less_host(host: Mapping[str, float], removed: float = 1.0) -> Factor:
    """Return the factors that remove a part of the host's work, whose share of each computing part is `host`."""

    def factor(piece: TracedPiece) -> float:
        if piece.kind == "host":
            return 1.0 - removed
        return 1.0 - removed * host.get(piece.kind, 0.0) if piece.kind in COMPUTING else 1.0

    return factor


def with_one_micro_batch(replay: Replay, fixed: Mapping[str, float], n: int) -> Factor:
    """Return the factors that do the work of a step's `n` micro-batches in one.

    fixed: the share of each computing part, and of transfers, that does not shrink with a micro-batch. It is left once.
    """

    def factor(piece: TracedPiece) -> float:
        merged = 0 <= piece.micro_batch < n - 1
        return 1.0 - fixed.get(piece.kind, 0.0) if merged else 1.0

    return factor


def with_processors(replay: Replay, shares: Mapping[int, float] | None = None) -> Factor:
    """Return the factors that give ranks a processor whenever they compute.

    Transfers are done by threads too, and are as much faster. shares: of these ranks alone, up to this share of the time.
    """
    most = dict.fromkeys(range(replay.n_ranks), 1.0) if shares is None else dict(shares)
    means = {rank: min(1.0, replay.processor_share(rank) / share) for rank, share in most.items()}

    def factor(piece: TracedPiece) -> float:
        if piece.kind == TRANSFER:
            return min((means[rank] for rank in piece.ranks if rank in means), default=1.0)
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
