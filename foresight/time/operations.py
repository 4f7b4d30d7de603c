"""The kinds of operations: what each asks of a device or link, from its shape alone.

An amount is a number of floating-point operations, bytes, launches or messages. A rate is the seconds that one of them takes. The
sum of amounts times rates is the curve of a kind: what an operation of any size would take on a device with these rates.
Measurements correct it shape by shape (calibration.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gptscale.foresight.time.work import LAUNCHES, Operation

# bytes of a number in 16 bits
BYTES = 2
# Rates by name.
FLOP, ATTENTION, MEMORY, LAUNCH, OPTIMIZER = "flop", "attention", "memory", "launch", "optimizer"
# Work of the host once a step, and of torch's schedule for a micro-batch in one direction.
HOST, STAGE = "host", "stage"
# OUTER: a byte that leaves a node. MESSAGE: the first byte of a message in a node. HOP: that of one to another node.
INNER, OUTER, MESSAGE, HOP = "inner", "outer", "message", "hop"
# To start a collective takes as long as so many messages: NCCL's base latency and the launch of its kernel.
START = 8
# Bytes over a device's bus and to and from disk, and parameters that the host's processor steps.
TO_HOST, FROM_HOST, DISK_READ, DISK_WRITE, HOST_STEP = "to host", "from host", "disk read", "disk write", "host step"


class BlockShape(NamedTuple):
    """A transformer block for one micro-batch on one tensor rank. fused: attention keeps no matrix of scores."""

    tokens: int
    hidden: int
    feed_forward: int
    gated: int
    heads: int
    key_value_heads: int
    seq_len: int
    tp: int
    fused: int
    sequence_parallel: int


class HeadShape(NamedTuple):
    """The final product with the vocabulary and its loss, for one micro-batch on one tensor rank."""

    tokens: int
    hidden: int
    vocabulary: int
    tp: int


class MessageShape(NamedTuple):
    """A collective of `ranks`, or a message if they are 2, of which `per_node` are on a node.

    sharing: how many such groups use the links of a node at once.
    """

    bytes: int
    ranks: int
    per_node: int
    sharing: int


def message_shape(n_bytes: float, ranks: int, stride: int, per_node: int, jobs: int = 1) -> MessageShape:
    """Return the collective of each group of ranks that lie `stride` apart, on nodes of `per_node`.

    jobs: how many use the links between nodes, this one included.
    """
    own = min(ranks, -(-per_node // stride))
    # Inside a node every pair has a way of its own; those that leave it share its links.
    return MessageShape(int(n_bytes), ranks, own, 1 if own == ranks else jobs * max(1, per_node // own))


class AmountShape(NamedTuple):
    """Bytes that are copied, or parameters that the host steps, by each of the `sharing` ranks that use one disk or processor."""

    amount: int
    sharing: int = 1


class LaunchShape(NamedTuple):
    """How many kernels and collectives the host of one of `ranks` tensor ranks starts."""

    launches: int
    ranks: int = 1


class StateShape(NamedTuple):
    """What an optimizer step passes over: parameters of one rank."""

    parameters: int


class ProductShape(NamedTuple):
    """A matrix product: (rows, inner) by (inner, columns)."""

    rows: int
    inner: int
    columns: int


class AttentionShape(NamedTuple):
    """Causal attention of one micro-batch on one tensor rank, whose heads have `hidden` numbers together."""

    tokens: int
    hidden: int
    heads: int
    seq_len: int


class PassShape(NamedTuple):
    """A pass over the numbers of all tokens: a norm, an activation, a residual sum, a look-up of rows."""

    tokens: int
    columns: int


def _products(shape: BlockShape) -> list[tuple[float, float, float]]:
    """Return rows, inner size and columns of the block's four products."""
    s = shape
    query_key_value = s.hidden * (1 + 2 * s.key_value_heads / s.heads)
    return [
        (s.tokens, s.hidden, query_key_value / s.tp),
        (s.tokens, s.hidden / s.tp, s.hidden),
        (s.tokens, s.hidden, s.feed_forward * (1 + s.gated) / s.tp),
        (s.tokens, s.feed_forward / s.tp, s.hidden),
    ]


def _block_forward(shape: tuple[int, ...]) -> dict[str, float]:
    s = BlockShape(*shape)
    products = _products(s)
    traffic = sum(m * k + k * n + m * n for m, k, n in products)
    # Two layer norms and two residual sums read and write whole tokens, on each tensor rank unless they split the sequence.
    passes = 12 * s.tokens * s.hidden / (s.tp if s.sequence_parallel else 1)
    passes += s.tokens * (5 * s.hidden + (3 + s.gated) * s.feed_forward) / s.tp
    scores = 0 if s.fused else 5 * s.tokens * s.seq_len * s.heads / s.tp
    return {
        FLOP: sum(2 * m * k * n for m, k, n in products),
        ATTENTION: 4 * s.tokens * s.seq_len * s.hidden / s.tp / (2 if s.fused else 1),
        MEMORY: BYTES * (traffic + passes + scores),
    }


def _block_elementwise(shape: tuple[int, ...]) -> dict[str, float]:
    """Return what selective checkpointing computes again: norms, sums, biases and activations, and no product."""
    s = BlockShape(*shape)
    passes = 12 * s.tokens * s.hidden / (s.tp if s.sequence_parallel else 1)
    passes += s.tokens * (5 * s.hidden + (3 + s.gated) * s.feed_forward) / s.tp
    return {MEMORY: BYTES * passes}


def _head_forward(shape: tuple[int, ...]) -> dict[str, float]:
    s = HeadShape(*shape)
    columns = s.vocabulary / s.tp
    traffic = s.tokens * s.hidden + s.hidden * columns + s.tokens * columns
    return {FLOP: 2 * s.tokens * s.hidden * columns, MEMORY: BYTES * traffic + 4 * 4 * s.tokens * columns}


def _twice(forward: Callable[[tuple[int, ...]], dict[str, float]]) -> Callable[[tuple[int, ...]], dict[str, float]]:
    """Return the amounts of a backward, which computes two products for each one in forward."""
    return lambda shape: {rate: 2 * amount for rate, amount in forward(shape).items()}


def _ring(shape: tuple[int, ...], turns: int) -> dict[str, float]:
    """Return the amounts of a ring that goes round `turns` times: 2 for all-reduce, 1 for all-gather and reduce-scatter."""
    s = MessageShape(*shape)
    if s.ranks < 2:
        return {}
    sent = turns * s.bytes * (s.ranks - 1) / s.ranks
    if s.per_node >= s.ranks:
        return {INNER: sent, MESSAGE: START + turns * (s.ranks - 1)}
    # In a ring every turn of a rank waits for the links between nodes. An all-reduce takes a tree where that has fewer hops.
    return {INNER: sent, OUTER: sent * s.sharing, MESSAGE: START, HOP: s.ranks - 1}


def _send(shape: tuple[int, ...]) -> dict[str, float]:
    s = MessageShape(*shape)
    way = {INNER: s.bytes} if s.per_node > 1 else {OUTER: s.bytes * s.sharing, HOP: 1}
    return {**way, MESSAGE: START}


def _product(shape: tuple[int, ...]) -> dict[str, float]:
    s = ProductShape(*shape)
    traffic = s.rows * s.inner + s.inner * s.columns + s.rows * s.columns
    return {FLOP: 2 * s.rows * s.inner * s.columns, MEMORY: BYTES * traffic, LAUNCH: 1}


def _attention(shape: tuple[int, ...]) -> dict[str, float]:
    s = AttentionShape(*shape)
    return {ATTENTION: 2 * s.tokens * s.seq_len * s.hidden, MEMORY: BYTES * 4 * s.tokens * s.hidden, LAUNCH: 1}


def _pass(shape: tuple[int, ...]) -> dict[str, float]:
    s = PassShape(*shape)
    return {MEMORY: BYTES * 2 * s.tokens * s.columns, LAUNCH: 1}


# Amounts of each kind by the names of rates.
KINDS: Mapping[str, Callable[[tuple[int, ...]], dict[str, float]]] = {
    "block forward": _block_forward,
    "block backward": _twice(_block_forward),
    "head forward": _head_forward,
    "head backward": _twice(_head_forward),
    "block accumulation": _twice(_block_forward),
    "head accumulation": _twice(_head_forward),
    "all-reduce": lambda shape: _ring(shape, 2),
    "all-gather": lambda shape: _ring(shape, 1),
    "reduce-scatter": lambda shape: _ring(shape, 1),
    "gradient all-reduce": lambda shape: _ring(shape, 2),
    "gradient reduce-scatter": lambda shape: _ring(shape, 1),
    "weight all-gather": lambda shape: _ring(shape, 1),
    "send": _send,
    "optimizer": lambda shape: {OPTIMIZER: StateShape(*shape).parameters},
    "block elementwise": _block_elementwise,
    "copy to host": lambda shape: {TO_HOST: shape[0] * shape[1]},
    "copy from host": lambda shape: {FROM_HOST: shape[0] * shape[1]},
    "disk read": lambda shape: {DISK_READ: shape[0] * shape[1]},
    "disk write": lambda shape: {DISK_WRITE: shape[0] * shape[1]},
    "host optimizer": lambda shape: {HOST_STEP: shape[0] * shape[1]},
    "host": lambda shape: {HOST: 1},
    "stage": lambda shape: {STAGE: 1},
    LAUNCHES: lambda shape: {LAUNCH: LaunchShape(*shape).launches},
    "block optimizer": lambda shape: {OPTIMIZER: StateShape(*shape).parameters},
    "head optimizer": lambda shape: {OPTIMIZER: StateShape(*shape).parameters},
    "product": _product,
    "attention forward": _attention,
    "attention backward": _twice(_attention),
    "norm": _pass,
    "activation": _pass,
    "residual": _pass,
    "embedding": _pass,
}


def amounts(operation: Operation) -> dict[str, float]:
    """Return what an operation asks for, by the names of rates."""
    return KINDS[kind_of(operation)](operation.shape)


def kind_of(operation: Operation) -> str:
    """Return the kind without the recipe that holds the layer, such as `fsdp: block forward`."""
    return operation.kind.rpartition(": ")[2]


def coordinates(operation: Operation) -> tuple[float, ...]:
    """Return where a shape lies among the shapes of its kind: near ones run alike. The unit is a factor of e."""
    return tuple(math.log(max(n, 0.5)) for n in operation.shape)
