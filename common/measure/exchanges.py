"""What a process exchanges with others while its steps are traced: when each exchange begins, and which one a wait is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives

from gptscale.common.process.progress import progress

# Python's ways to begin a collective, and those of DTensor.
COLLECTIVES = (
    "all_reduce all_gather_into_tensor reduce_scatter_tensor all_gather reduce_scatter broadcast reduce all_to_all "
    "all_to_all_single"
)
FUNCTIONAL = "all_reduce all_gather_tensor reduce_scatter_tensor all_to_all_single broadcast"
MESSAGE = "send"


class TracedExchange(NamedTuple):
    """An exchange as one of its ranks began it.

    ranks: all that take part, of a message the sender and the receiver. number: how many of this kind these ranks began before.
    The same exchange has the same kind, ranks and number in all of them. nbytes: the larger of what goes in and what comes out.
    """

    kind: str
    ranks: tuple[int, ...]
    number: int
    nbytes: int
    begun: float

    @property
    def name(self) -> tuple[str, tuple[int, ...], int]:
        """Return what is equal in all ranks."""
        return self.kind, self.ranks, self.number


class ExchangeLog:
    """The exchanges that this process begins while `watching`, in order."""

    def __init__(self) -> None:
        self.exchanges: list[TracedExchange] = []
        self._counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        # The places of those that are not over, by their handle or by where their result lies.
        self._of_work: dict[int, int] = {}
        self._of_result: dict[int, int] = {}
        self._inside = -1

    def begin(self, kind: str, ranks: Sequence[int], nbytes: int) -> int:
        """Take note of an exchange that begins now, and return its place."""
        progress.split()
        key = kind, tuple(ranks)
        self.exchanges.append(TracedExchange(*key, self._counts[key], nbytes, progress.since))
        self._counts[key] += 1
        return len(self.exchanges) - 1

    @contextmanager
    def watching(self) -> Iterator[list[TracedExchange]]:
        """Note every exchange that Python begins, and at each wait which one it is for, until the end."""
        with ExitStack() as stack:
            for name in COLLECTIVES.split():
                _replace(stack, dist, name, partial(self._collective, name))
            _replace(stack, dist, "batch_isend_irecv", self._messages)
            for name in FUNCTIONAL.split():
                _replace(stack, _functional_collectives, name, partial(self._functional, name))
            _replace(stack, dist.Work, "wait", self._wait)
            _replace(stack, _functional_collectives, "wait_tensor", self._wait_tensor)
            yield self.exchanges

    @contextmanager
    def _beginning(self, kind: str, group: Any, values: Any) -> Iterator[int]:
        """Note an exchange of a group, and yield its place. What waits before the end of the block, waits for it."""
        self._inside = self.begin(kind, dist.get_process_group_ranks(group), _nbytes(values))
        try:
            yield self._inside
        finally:
            self._inside = -1

    def _collective(self, kind: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        # torch 2.5 knows the ranks of the default group by its name only.
        groups = (a for a in arguments if isinstance(a, dist.ProcessGroup))
        group = options.get("group") or next(groups, dist.group.WORLD)
        with self._beginning(kind, group, (*arguments, *options.values())) as place:
            work = call(*arguments, **options)
        if work is not None:
            self._of_work[id(work)] = place
        return work

    def _messages(self, call: Callable[..., Any], operations: Sequence[dist.P2POp]) -> Any:
        places = []
        for operation in operations:
            pair = [dist.get_rank(), operation.peer]
            pair = pair if operation.op is dist.isend else pair[::-1]
            places.append(self.begin(MESSAGE, pair, operation.tensor.nbytes))
        works = call(operations)
        # Where a backend joins them, there is one handle for all.
        self._of_work.update(zip(map(id, works), places, strict=False))
        return works

    def _functional(self, kind: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        arguments_by_name = signature(call).bind(*arguments, **options).arguments
        name = _functional_collectives._resolve_group_name(arguments_by_name["group"], arguments_by_name.get("tag", ""))
        group = dist.distributed_c10d._resolve_process_group(name)
        with self._beginning(kind, group, arguments) as place:
            result = call(*arguments, **options)
        if isinstance(result, _functional_collectives.AsyncCollectiveTensor):
            self._of_result[result.elem.data_ptr()] = place
        return result

    def _wait(self, call: Callable[..., Any], work: dist.Work, *arguments: Any, **options: Any) -> Any:
        return self._waiting(self._of_work.pop(id(work), self._inside), call, work, *arguments, **options)

    def _wait_tensor(self, call: Callable[..., Any], tensor: Tensor) -> Any:
        return self._waiting(self._of_result.pop(tensor.data_ptr(), self._inside), call, tensor)

    def _waiting(self, place: int, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        progress.split()
        progress.exchange = place
        try:
            return call(*arguments, **options)
        finally:
            progress.exchange = -1


def _replace(stack: ExitStack, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let `replacement`, which takes the original first, stand for a function until the stack ends."""
    if not hasattr(owner, name):
        return
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*arguments: Any, **options: Any) -> Any:
        return replacement(original, *arguments, **options)

    setattr(owner, name, replaced)
    stack.callback(setattr, owner, name, original)


def _nbytes(values: Any) -> int:
    """Return the bytes of the largest tensor, or list of tensors, among arguments."""
    if isinstance(values, Tensor):
        return values.nbytes
    if not isinstance(values, list | tuple):
        return 0
    sizes = [_nbytes(value) for value in values]
    return (sum if isinstance(values, list) else max)(sizes) if sizes else 0
