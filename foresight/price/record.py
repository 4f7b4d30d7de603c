"""A recorded step: the work that a program gave its device, in the order in which the host asked for it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gptscale.foresight.mock_cuda.record import UNKNOWN

# Work that takes time on a stream, and what orders it.
TIMED = ("kernel", "product", "copy", "set", "collective")
ORDERS = ("record", "wait", "sync")
# Marks of a host's own work: bytes of its memory or of files, or a wait for files.
HOST_WORK = re.compile(r"(host) step (\d+)|(disk) (read|write|wait) (\d+)")
# Files are read and written in an order of their own.
DISK_STREAM = -1
ATTENTION = ("attention", "flash")
MESSAGES = ("send", "receive")


class Call(NamedTuple):
    """Something that the device was asked to do.

    time_s: when the host asked, on its monotonic clock.
    kind: kernel, product, copy, set, collective, record, wait, sync; capture and graph, of a CUDA graph; mark, which watch.py and
    boot.py write; or operation, which record.py writes.
    stream: its number, of which 0 is the default stream.
    sizes: of a product m, n, k and how many; of a collective its bytes, the ranks, this rank and the peer of a message; of a
    kernel its blocks, the threads of each and the bytes of shared memory; of a copy its bytes.
    """

    time_s: float
    kind: str
    stream: int
    name: str
    sizes: tuple[int, int, int, int]


def read_calls(path: Path) -> list[Call]:
    """Read the calls that a program under the mock has listed."""
    calls = []
    with path.open() as lines:
        for line in lines:
            time_s, kind, stream, name, *sizes = line.rstrip("\n").split("\t")
            a, b, c, d = (int(size) for size in sizes)
            calls.append(Call(float(time_s), kind, int(stream, 16), name, (a, b, c, d)))
    return calls


@dataclass(frozen=True)
class Work:
    """Something on a stream.

    kind: of TIMED or ORDERS; host: what the host computes; disk: a file that is read or written.
    at: when the host asked for it, as a share of the time in which it asks for the step. name: of the operation of torch that it
    belongs to, or its own. nbytes: that it reads and writes; of a copy those that are copied; of a collective those of the whole
    tensor; None where nobody knows. sizes: m, n, k and how many products; of a message this rank and its peer, as their group
    counts. event: that is recorded or waited for. ranks, on_node: of a collective's group, and of them on this machine (0: not
    known). peer: the rank that is sent to or received from. part: the number of the part of the step (mock_cuda/watch.py).
    """

    at: float
    kind: str
    stream: int
    name: str
    flops: float = 0.0
    nbytes: float | None = None
    precision: str = ""
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)
    event: int = 0
    ranks: int = 1
    on_node: int = 0
    peer: int | None = None
    part: int = 0
    threads: int = 0

    @property
    def is_attention(self) -> bool:
        """Return whether it multiplies queries, keys and values in one kernel."""
        return self.flops > 0 and any(word in self.name for word in ATTENTION)


def recorded_step(calls: Sequence[Call]) -> list[Work] | None:
    """Return the work of the last step, or None if it did not end."""
    calls = [*_launched(calls)]
    marks = {call.name: i for i, call in enumerate(calls) if call.kind == "mark"}
    if not {"step begins", "step ends"} <= {*marks}:
        return None
    begin = calls[marks["step begins"]].time_s
    length = calls[marks["step ends"]].time_s - begin
    work: list[Work] = []
    # the places of what each operation that is not over has started
    under_way: list[list[int]] = []
    peer: int | None = None
    for call in calls[marks["step begins"] + 1 : marks["step ends"]]:
        if call.kind == "operation" and not call.name:
            under_way.append([])
        elif call.kind == "operation" and under_way:
            _end(under_way.pop(), call, work)
        elif call.kind == "mark" and (words := HOST_WORK.fullmatch(call.name)):
            work.append(_host_work(words, (call.time_s - begin) / length))
        elif call.kind == "mark":
            peer = int(call.name.partition(" ")[2]) if call.name.startswith(("to ", "from ")) else peer
        elif call.kind in (*TIMED, *ORDERS):
            if under_way:
                under_way[-1].append(len(work))
            work.append(_work(call, (call.time_s - begin) / length, peer))
    return work


def _launched(calls: Sequence[Call]) -> Iterator[Call]:
    """Yield the calls, and in the place of each launch of a CUDA graph what that has captured."""
    graphs = dict[int, tuple[int, list[Call]]]()
    captured: list[Call] | None = None
    for call in calls:
        if call.kind == "capture" and call.name == "begins":
            captured = []
        elif call.kind == "capture":
            # Work of this stream runs on the one of the launch.
            graphs[call.sizes[0]], captured = (call.stream, captured or []), None
        elif call.kind == "graph":
            stream, work = graphs[call.sizes[0]]
            for each in work:
                yield each._replace(time_s=call.time_s, stream=call.stream if each.stream == stream else each.stream)
        elif captured is None:
            yield call
        else:
            captured.append(call)


def _work(call: Call, at: float, peer: int | None) -> Work:
    a, b, c, d = call.sizes
    if call.kind == "product":
        return Work(at, call.kind, call.stream, call.name, 2.0 * a * b * c * d, sizes=call.sizes)
    if call.kind == "collective":
        facts: dict[str, Any] = {"peer": peer, "sizes": (c, d, 0, 0)} if call.name in MESSAGES else {}
        return Work(at, call.kind, call.stream, call.name, nbytes=a, ranks=b, **facts)
    if call.kind in ("copy", "set"):
        return Work(at, call.kind, call.stream, call.name, nbytes=a)
    if call.kind in ORDERS:
        return Work(at, call.kind, call.stream, call.name, event=a)
    return Work(at, call.kind, call.stream, call.name, threads=a * b)


def _host_work(words: re.Match[str], at: float) -> Work:
    if words[1]:
        return Work(at, "host", 0, "optimizer", nbytes=float(words[2]))
    if words[4] == "wait":
        return Work(at, "sync", DISK_STREAM, "stream")
    return Work(at, "disk", DISK_STREAM, words[4], nbytes=float(words[5]))


def _end(started: list[int], end: Call, work: list[Work]) -> None:
    """Give what an operation computes and touches to the work that it has started."""
    name, _, precision = end.name.rpartition(" ")
    flops, nbytes, on_node, part = end.sizes
    products = [i for i in started if work[i].kind == "product"]
    kernels = [i for i in started if work[i].kind == "kernel"]
    # A bias or a sum of parts, in kernels of their own, is small beside the product.
    carriers = products or kernels
    for i in started:
        facts: dict[str, Any] = {"part": part, "precision": precision}
        if work[i].kind == "collective":
            facts |= {"on_node": on_node}
        elif work[i].kind in ("product", "kernel"):
            known = None if nbytes >= UNKNOWN else nbytes / max(1, len(carriers))
            facts |= {"name": name, "nbytes": known if i in carriers else 0.0}
        if i in kernels and not products:
            facts["flops"] = flops / len(kernels)
        work[i] = dataclasses.replace(work[i], **facts)


def summary(work: Sequence[Work]) -> dict[str, Any]:
    """Return the counts of a step: kernels by operation, collectives by kind and size, copied bytes by direction."""
    started = Counter(each.kind for each in work)
    kernels = Counter(each.name for each in work if each.kind == "kernel")
    collectives = Counter((w.name, int(w.nbytes or 0), w.ranks) for w in work if w.kind == "collective")
    copied = Counter[str]()
    for each in work:
        if each.kind == "copy":
            copied[each.name] += int(each.nbytes or 0)
    return {
        "launches": started["kernel"] + started["product"] + started["collective"],
        "product_flops": int(sum(each.flops for each in work if each.kind == "product")),
        "kernels": dict(kernels.most_common()),
        "collectives": [
            {"name": name, "nbytes": nbytes, "ranks": ranks, "count": count}
            for (name, nbytes, ranks), count in collectives.most_common()
        ],
        "copied": dict(copied),
    }
