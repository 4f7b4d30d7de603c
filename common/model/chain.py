"""Where the forward of a model can be cut into stages: at a list of blocks that pass one tensor on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn


class NoChainError(Exception):
    """A model cannot be cut into stages. Its text says why."""


class Walk:
    """What one forward does. seen: inputs and outputs of the blocks so far. when: at what times other modules are called."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks, self.seen = blocks, list[Tensor]()
        self.when: dict[str, set[str]] = {}
        self.outputs: dict[str, Any] = {}

    def enter(self, module: nn.Module, args: Any, options: Any) -> None:
        place, given = len(self.seen) // 2, args[0] if args else None
        if not isinstance(given, Tensor) or place >= len(self.blocks) or module is not self.blocks[place]:
            raise NoChainError("its blocks are not called once, one after another, with a tensor")
        if self.seen and given is not self.seen[-1]:
            raise NoChainError("what its blocks pass on is changed between them")
        if any(value.requires_grad for value in (*args[1:], *options.values()) if isinstance(value, Tensor)):
            raise NoChainError("its blocks take a second value that has a gradient")
        self.seen.append(given)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or output.shape != self.seen[0].shape:
            raise NoChainError("a block gives another shape than it takes")
        self.seen.append(output)

    def note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note when another module is called."""
        when = "before" if not self.seen else "after" if len(self.seen) == 2 * len(self.blocks) else "between"
        self.when.setdefault(name, set()).add(when)
        self.outputs[name] = output


def chain_of(model: nn.Module, call: Callable[[], Any], block: str) -> dict[str, Any]:
    """Return what a program with stages needs to know of a model whose weights have gradients, from one call of it.

    blocks: the path of the list. before, after: the paths of the modules with weights that stand before the first block and
    behind the last. tied: the two names of a weight that both have, if there is one. hidden: the shape that a sample has between
    blocks. Raises NoChainError.
    """
    path, blocks = _list_of(model, block)
    above = {name: m for name, m in model.named_modules() if not name or f"{path}.".startswith(f"{name}.")}
    direct = [weight for name, m in above.items() for weight, _ in m.named_parameters(name, recurse=False)]
    if direct:
        raise NoChainError(f"{direct[0]} is in no module that stands before or behind its blocks")
    children = {
        f"{name}.{child}".strip("."): m
        for name, up in above.items()
        if name != path
        for child, m in up.named_children()
    }
    beside = {name: m for name, m in children.items() if name not in above and any(True for _ in m.parameters())}
    walk = Walk(blocks)
    with ExitStack() as hooks:
        for module in blocks:
            hooks.callback(module.register_forward_pre_hook(walk.enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(walk.leave).remove)
        for name, module in beside.items():
            hooks.callback(module.register_forward_hook(partial(walk.note, name)).remove)
        call()
    if len(walk.seen) != 2 * len(blocks):
        raise NoChainError("not all of its blocks are called")
    before = [name for name in beside if walk.when.get(name) == {"before"}]
    # Modules that no loss needs are kept where the loss is.
    idle = [name for name, m in beside.items() if name not in walk.when and all(p.grad is None for p in m.parameters())]
    after = [name for name in beside if walk.when.get(name) == {"after"}] + idle
    if odd := beside.keys() - {*before, *after}:
        raise NoChainError(f"{min(odd)} is used before and behind its blocks, or without being called")
    for name in before:
        if getattr(walk.outputs[name], "shape", ())[-1:] != walk.seen[0].shape[-1:]:
            raise NoChainError(f"{name} gives another shape than its blocks take")
    ends = {"before": before, "after": after, "tied": _tied(model, before, after)}
    return {"blocks": path, **ends, "hidden": [*walk.seen[0].shape[1:]]}


class Sent(Exception):  # noqa: N818 (it is no error)
    """The end of a stage that is not the last, with what it sends to the next."""


def keep_stage(model: nn.Module, chain: Mapping[str, Any], blocks: range, is_last: bool) -> None:
    """Empty the modules of other stages: those before give `model.received`, the first one behind ends the forward with Sent."""

    def receive(*_: Any, **__: Any) -> Any:
        return model.received

    def send(hidden: Tensor, *_: Any, **__: Any) -> None:
        raise Sent(hidden)

    listed = [*model.get_submodule(chain["blocks"]).children()]
    before = [model.get_submodule(name) for name in chain["before"]] * (blocks.start > 0) + listed[: blocks.start]
    behind = listed[blocks.stop :] + [model.get_submodule(name) for name in chain["after"]] * (not is_last)
    for other, forward in [(m, receive) for m in before] + [(m, send) for m in behind]:
        other._modules, other._parameters, other._buffers, other.forward = {}, {}, {}, forward
        other.__class__ = nn.Identity


def _list_of(model: nn.Module, block: str) -> tuple[str, list[nn.Module]]:
    lists = {
        name: [*m.children()]
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList | nn.Sequential) and any(type(child).__name__ == block for child in m.children())
    }
    if len(lists) != 1 or any(type(child).__name__ != block for each in lists.values() for child in each):
        raise NoChainError("its blocks are not one list")
    return next(iter(lists.items()))


def _tied(model: nn.Module, before: list[str], after: list[str]) -> list[str]:
    """Return the names of a weight before and behind the blocks. Raises NoChainError for any other that is shared."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    shared = [each for each in names.values() if len(each) > 1]

    def is_in(name: str, modules: list[str]) -> bool:
        return any(f"{name}.".startswith(f"{module}.") for module in modules)

    for each in shared:
        if not (len(each) == 2 and is_in(each[0], before) and is_in(each[1], after)) or len(shared) > 1:
            raise NoChainError(f"{each[0]} is used in more than one place")
    return shared[0] if shared else []
