"""What one step asks of the device: kernels, products, collectives and copies."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

DEMANGLE_TIMEOUT_S = 60
# Text around the part of a kernel's name that says what it does.
NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|c10::|\(.*$")


class Call(NamedTuple):
    """Something that the device was asked to do.

    time_s: when the host asked, on its monotonic clock.
    kind: kernel, product, copy, set, collective, graph, record, wait, or mark, which foresight/mock_cuda/watch.py wrote.
    stream: its number, of which 0 is the default stream.
    sizes: of a product m, n, k and how many; of a collective its bytes, the ranks and this rank; of a kernel its blocks, the
    threads of each and the bytes of shared memory; of a copy its bytes.
    """

    time_s: float
    kind: str
    stream: int
    name: str
    sizes: tuple[int, int, int, int]


@dataclass(frozen=True)
class Product:
    """A matrix product of (m, k) by (k, n), `batch` of them at once, asked `count` times in a step."""

    m: int
    n: int
    k: int
    batch: int
    count: int


@dataclass(frozen=True)
class Collective:
    """A collective of `ranks` ranks on a stream of its own, asked `count` times in a step.

    nbytes: of the whole tensor; what a ring sends follows from it and from `ranks`.
    """

    name: str
    nbytes: int
    ranks: int
    stream: int
    count: int


@dataclass(frozen=True)
class StepCalls:
    """One step, after the first.

    kernels: how often each is launched, by name. copied: bytes by direction.
    """

    kernels: dict[str, int]
    products: list[Product]
    collectives: list[Collective]
    copied: dict[str, int]

    @property
    def launches(self) -> int:
        """Return how many pieces of work a step gives the device."""
        products, collectives = sum(p.count for p in self.products), sum(c.count for c in self.collectives)
        return sum(self.kernels.values()) + products + collectives

    @property
    def product_flops(self) -> int:
        """Return the floating-point operations of the products, two for each multiplication."""
        return sum(2 * p.m * p.n * p.k * p.batch * p.count for p in self.products)

    def as_json(self) -> dict[str, Any]:
        """Return all of it in JSON's types."""
        return {"launches": self.launches, "product_flops": self.product_flops, **asdict(self)}


def read_calls(path: Path) -> list[Call]:
    """Read the calls that a program under the mock has listed."""
    calls = []
    with path.open() as lines:
        for line in lines:
            time_s, kind, stream, name, *sizes = line.rstrip("\n").split("\t")
            a, b, c, d = (int(size) for size in sizes)
            calls.append(Call(float(time_s), kind, int(stream, 16), name, (a, b, c, d)))
    return calls


def last_step(calls: Sequence[Call]) -> StepCalls | None:
    """Return what was asked between the marks of the last step, or None if it did not end."""
    marks = {call.name: i for i, call in enumerate(calls) if call.kind == "mark"}
    if not {"step begins", "step ends"} <= {*marks}:
        return None
    of_step = calls[marks["step begins"] + 1 : marks["step ends"]]
    streams = {stream: number for number, stream in enumerate(dict.fromkeys(call.stream for call in of_step))}
    products = Counter(call.sizes for call in of_step if call.kind == "product")
    collectives = Counter(
        (c.name, c.sizes[0], c.sizes[1], streams[c.stream]) for c in of_step if c.kind == "collective"
    )
    copied: Counter[str] = Counter()
    for call in of_step:
        if call.kind == "copy":
            copied[call.name] += call.sizes[0]
    kernels = Counter(readable(call.name for call in of_step if call.kind == "kernel"))
    return StepCalls(
        dict(kernels.most_common()),
        [Product(*sizes, count) for sizes, count in products.most_common()],
        [Collective(*facts, count) for facts, count in collectives.most_common()],
        dict(copied),
    )


def readable(names: Iterable[str]) -> list[str]:
    """Return kernels' names without what a C++ compiler made of them, as far as c++filt is here."""
    mangled = list(names)
    filt = shutil.which("c++filt")
    if filt is None or not mangled:
        return mangled
    once = sorted(set(mangled))
    output = subprocess.run(
        [filt], input="\n".join(once), capture_output=True, text=True, timeout=DEMANGLE_TIMEOUT_S, check=False
    )
    plain = dict(zip(once, output.stdout.splitlines(), strict=False))
    return [_short(plain.get(name, name)) for name in mangled]


def _short(name: str) -> str:
    """Return what a kernel does, without its namespaces and arguments."""
    inner = re.search(r"(\w+_kernel_cuda|\w*[Ff]unctor\w*|\w+Op)\b", name)
    outer = NOISE.sub("", name).split("<")[0].split("(")[0]
    return f"{outer}: {inner[1]}" if inner and inner[1] not in outer else outer
