"""How tensor ranks cut a model of one's own: by transformers' plan, by a file, or where it is safe. One process proves it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from gptscale.common.errors import ConfigError
from gptscale.common.model.build import aliases
from gptscale.common.model.own import PREFIX, OwnModel
from gptscale.common.model.twin import TOLERANCE, deviation, tokens_of, twin_of
from gptscale.common.settings.own_config import OwnConfig
from gptscale.common.settings.user_file import read_json

# The ways in which a module is cut over tensor ranks, by the words of transformers: what makes torch's style.
STYLES: dict[str, partial[Any]] = {
    "colwise": partial(ColwiseParallel),
    "rowwise": partial(RowwiseParallel),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    # A norm of each head, on (batch, sequence, heads, size): it sees the heads of its rank.
    "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
}
OF_ENDS = ("embedding_rowwise", "colwise_gather_output")
# The dimension of a product's weight that a style cuts.
CUT = {"colwise": 0, "rowwise": 1, "colwise_gather_output": 0, "embedding_rowwise": 0}
PLAN_MOST = 2**20


def plan_of_transformers(model: Any) -> dict[str, str]:
    """Return how a model says that tensor ranks cut it (tp_plan), where torch has a style for that."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    # One product of a pair does not stay whole alone.
    unknown = {name.rpartition(".")[0] for name, style in plan.items() if style not in STYLES}
    plan = {name: style for name, style in plan.items() if not {name, name.rpartition(".")[0]} & unknown}
    ends: list[Any] = [getattr(model, f"get_{name}_embeddings", lambda: None)() for name in ("input", "output")]
    if all(ends) and ends[0].weight is ends[1].weight:
        # A matrix with two uses stays whole.
        plan = {name: style for name, style in plan.items() if style not in OF_ENDS}
    return plan if {*plan.values()} - {*OF_ENDS} else {}


def tensor_plan(config: OwnConfig, size: int, file: Path | None) -> dict[str, str]:
    """Return how `size` tensor ranks cut each module of a model, by its name. Raises ConfigError for what would not be right.

    file: a plan as JSON, in the words of transformers. Without one it is the model's own, or else inferred.
    """
    found = _plan_or_refusal(config, size, file)
    if isinstance(found, ConfigError):
        raise found
    return found


@cache
def _plan_or_refusal(config: OwnConfig, size: int, file: Path | None) -> dict[str, str] | ConfigError:
    """Return how ranks cut a model, or why they cannot. Either is kept, so that no plan is proved twice."""
    try:
        return _proved(config, size, file)
    except ConfigError as error:
        return error


def _proved(config: OwnConfig, size: int, file: Path | None) -> dict[str, str]:
    model, where = config.look(), "in --tp-plan"
    if file is not None:
        plan = read_json(
            file, PLAN_MOST, lambda why: ConfigError(f"{file} is no plan: {why}", where, "name a JSON file")
        )
        if not isinstance(plan, dict) or not plan or not {*map(str, plan.values())} <= STYLES.keys():
            fix = f"let it be a dictionary of names of modules to {', '.join(STYLES)}"
            raise ConfigError(f"{file} is no plan", where, fix)
    else:
        plan, where = plan_of_transformers(model.own), "in --tp-size"
    names = [name.removeprefix(PREFIX) for name, _ in model.named_modules()]
    exact = {f"{PREFIX}{name}": style for key, style in plan.items() for name in names if fnmatch(name, key)}
    if file is None:
        if not exact:
            return inferred(model, size)
        # An end that cannot be cut stays whole.
        exact = {n: how for n, how in exact.items() if how not in OF_ENDS or not why_no_cut(model, n, how, size)}
    elif lost := [key for key in plan if not any(fnmatch(name, key) for name in names)]:
        what = f"{file} names {lost[0]}, which is no module of {config.source}"
        raise ConfigError(what, where, "name modules that it has")
    if why := why_wrong(model, exact, size):
        why, fix = reason_and_fix(model, size, why)
        raise ConfigError(f"{config.source} cannot be cut so over {size} ranks: {why}"[:300], where, fix)
    return exact


def reason_and_fix(model: OwnModel, size: int, why: str) -> tuple[str, str]:
    """Return why a plan is not right, and what to do. Heads that ranks do not divide are told in place of torch's error."""
    theirs = getattr(model.own, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        if isinstance(heads := getattr(theirs, name, None), int) and heads % size:
            return f"{name} {heads} is not divisible by {size}", "use a tp_size that divides it"
    return why, "use another --tp-size, or name a plan that is right (--tp-plan FILE)"


def why_no_cut(model: OwnModel, name: str, style: str, size: int) -> str:
    """Return why the weight of a module cannot be cut, or "" if it can."""
    module: Any = model.get_submodule(name)
    kind = nn.Embedding if style == "embedding_rowwise" else nn.Linear
    if style not in CUT:
        return ""
    # A subclass may do anything with its weight.
    if type(module) is not kind:
        return f"{name} is a {type(module).__name__}, and {style} cuts a nn.{kind.__name__}"
    if any(f"{name}.weight" in pair for pair in aliases(model)):
        return f"{name} shares its weight with another module"
    if getattr(module, "padding_idx", None) is not None:
        return f"{name} has a row without gradients (padding_idx)"
    # torch gathers outputs of any number.
    if style != "colwise_gather_output" and (n := module.weight.shape[CUT[style]]) % size:
        return f"{size} does not divide the {n} {'inputs' if CUT[style] else 'rows'} of {name}"
    return ""


def why_wrong(model: OwnModel, plan: Mapping[str, str], size: int) -> str:
    """Return why a plan does not compute what one process computes, or "" if it does."""
    if why := next(filter(None, (why_no_cut(model, name, style, size) for name, style in plan.items())), ""):
        return why
    twin = twin_of(model, plan)
    plan = {name: style for name, style in plan.items() if name in dict(twin.named_modules())}
    try:
        worst, at = off_by(twin, plan, size)
    except Exception as error:
        return f"it fails with {type(error).__name__}: {error}".replace("\n", " ")
    return "" if worst <= TOLERANCE else f"{at} deviates by {worst:.1e} from one process"


def off_by(model: OwnModel, plan: Mapping[str, str], size: int) -> tuple[float, str]:
    """Return by how much a step of all ranks deviates from that of one process at most, and where.

    One process takes them all. Each rank goes on with the sums that ranks would exchange, which are those of the whole step. If
    all parts add up to them, and their gradients to those of the whole, the plan computes what one process computes.
    """
    whole, sums, calls = dict[str, Tensor](), defaultdict[str, Any](int), Counter[str]()
    cut: Callable[..., Any] = lambda p, dim=0: p  # noqa: E731
    # The gradient of what each rank has whole comes once from each.
    times = dict.fromkeys(model.parameters(), size)

    def note(key: str, value: Tensor) -> Tensor:
        sums[key] = sums[key] + value.detach()
        return whole.get(key, value)

    def key_of(name: str) -> str:
        calls[name] += 1
        return f"{name} (call {calls[name]})"

    def colwise(name: str, module: nn.Linear, x: Tensor) -> Tensor:
        x, key = x.view_as(x), key_of(name)
        if x.requires_grad:
            x.register_hook(partial(note, key))
        return F.linear(x, cut(module.weight), cut(module.bias))

    def rowwise(name: str, module: nn.Linear, x: Tensor) -> Tensor:
        product = F.linear(x, cut(module.weight, 1))
        product = product + (note(key_of(name), product) - product).detach()
        return product if module.bias is None else product + module.bias

    for name, style in plan.items():
        module: Any = model.get_submodule(name)
        if style in (forwards := {"colwise": colwise, "rowwise": rowwise}):
            module.forward = partial(forwards[style], name, module)
        if style not in OF_ENDS:
            times |= dict.fromkeys([module.weight] if style == "rowwise" else module.parameters(), 1)
    model(*tokens_of(model)).backward()
    grads: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.grad is not None}
    whole |= sums | {name: p.grad * times[p] for name, p in grads.items()}
    sums.clear()
    model.zero_grad()
    for rank in range(size):
        calls.clear()
        cut = lambda p, dim=0, rank=rank: None if p is None else p.chunk(size, dim)[rank]  # noqa: E731
        model(*tokens_of(model)).backward()
    return deviation(sums | {name: p.grad for name, p in grads.items()}, whole)


def inferred(model: OwnModel, size: int) -> dict[str, str]:
    """Return how ranks may cut products whose outputs only one other product reads. Raises ConfigError if there are none."""
    twin, begins = twin_of(model, {}), dict[Any, str]()
    pairs: dict[str, set[str]] = {}

    def look(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        in_block = next(prefix for prefix in twin.prefixes if name.startswith(prefix))
        found = sources(args[0].grad_fn, begins)
        if found and all(each.startswith(in_block) for each in found):
            pairs[name.removeprefix(in_block)] = {each.removeprefix(in_block) for each in found}
        begins[output.grad_fn] = name

    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(twin.prefixes):
            module.register_forward_hook(partial(look, name))
    twin(*tokens_of(twin))
    plan, names = dict[str, str](), dict(model.named_modules())
    for last, firsts in pairs.items():
        pair = dict.fromkeys(sorted(firsts), "colwise") | {last: "rowwise"}
        exact = {f"{p}{name}": how for p in model.prefixes for name, how in pair.items() if f"{p}{name}" in names}
        if not plan.keys() & exact.keys() and not why_wrong(model, exact, size):
            plan |= exact
    if not plan:
        what = f"no two products of {model.source} can be cut over {size} ranks, with nothing between that mixes them"
        raise ConfigError(what, "in --tp-size", "name what can be cut (--tp-plan FILE), or use fsdp")
    return plan


def sources(node: Any, begins: Mapping[Any, str]) -> set[str]:
    """Return the products that a number is made of, or nothing if another weight has a part in it. begins: by their nodes."""
    seen, waiting, found = set[Any](), [node], set[str]()
    while waiting:
        node = waiting.pop()
        if node in begins:
            found.add(begins[node])
        elif hasattr(node, "variable"):
            return set()
        elif node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return found
