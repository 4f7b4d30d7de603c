"""A look at a user's model and batch, in a process of its own, since a user's module may do anything."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.settings.user_code import user_function
from gptscale.foresight.fit.subject import Subject

SOURCE_MOST = 2**20
# How many samples are tried, and the words that call a model with its batch.
SAMPLES = 2
# By how much a loss differs from another of the same values, and from one of other values.
ROUNDING, UNEQUAL = 1e-6, 1e-4
BATCH_WORDS = ["o.micro_batch_size", "step * (o.global_batch_size // o.micro_batch_size) + number"]


def _imports(*functions: Sequence[str]) -> str:
    """Return the lines that import the functions, each a module and a name, as `build`, `batch` and `loss`."""
    imports = defaultdict(list)
    for (module, name), as_name in zip(filter(None, functions), ("build", "batch", "loss"), strict=False):
        imports[module].append(name if name == as_name else f"{name} as {as_name}")
    return "\n".join(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items()))


def _call_words(model: Any, inputs: Any, kind: str, has_loss: bool) -> list[str]:
    """Return what of a batch a model may be called with, the most first. If there is a loss, the rest is for that."""
    forward = inspect.signature(model.forward)
    if kind == "tensor":
        return ["inputs"]
    if isinstance(inputs, dict):
        any_name = any(each.kind is each.VAR_KEYWORD for each in forward.parameters.values())
        known = inputs if any_name or not has_loss else [name for name in inputs if name in forward.parameters]
        return ["**inputs" if len(known) == len(inputs) else ", ".join(f'{name}=inputs["{name}"]' for name in known)]

    def takes(count: int) -> bool:
        try:
            inspect.signature(model.forward).bind(*range(count))
        except TypeError:
            return False
        return True

    most = len(inputs)
    counts = [n for n in range(most, 0, -1) if takes(n)] if has_loss else []
    return [{most: "*inputs", most - 1: "*inputs[:-1]"}.get(n, f"*inputs[:{n}]") for n in counts or [most]]


@contextmanager
def refused(what: str, where: str, fix: str) -> Iterator[None]:
    """Raise ConfigError where the user's code fails or exits, with its reason."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} ({type(error).__name__}: {error})"[:300], where, fix) from None


def look(build: str, batch: str, loss: str, small: str, whole_batch: str = "") -> Subject:
    """Build a small model, compute a loss of it, and return what programs need to know.

    small: another one that is small. whole_batch: the batch of the whole one, if it is not that of the small one.
    """
    # Read when torch is imported. What is compiled computes the same.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    import torch
    from torch.utils._pytree import tree_leaves

    from gptscale.common.model.tensor_plan import plan_of_transformers
    from gptscale.foresight.fit.twin import blocks_of, moved, on_meta, two_blocks, widen
    from gptscale.foresight.mock_cuda import on_path
    from gptscale.foresight.mock_cuda.experts import Decisions
    from gptscale.foresight.prove import no_cuda

    # Flex attention with gradients on a CPU, as in a proof.
    sys.modules["gptscale_no_cuda"] = no_cuda
    on_path.AFTER_IMPORT["torch.nn.attention.flex_attention"] = ["no_cuda.plain_flex_attention"]
    sys.meta_path.insert(0, on_path.ImportWatch())
    where, opened = build.partition(":")[0], set[Path]()
    sys.addaudithook(lambda event, of: opened.add(Path(of[0])) if event == "open" and type(of[0]) is str else None)
    make, module, name = user_function(build, "the model")
    tried, *of_small = user_function(small, "--small") if small else (make, module, name)
    deal, *of_batch = user_function(batch or f"{where}:batch", "--batch")
    judge, *of_loss = user_function(loss, "--loss") if loss else (None,)
    if isinstance(make, torch.nn.Module):
        raise ConfigError(f"{name} is a module", f"in {where}", "name a function that returns it")
    with refused(f"{name}() fails", f"in {where}", "let it run on a CPU"), on_meta():
        whole = make()
    if not isinstance(whole, torch.nn.Module):
        raise ConfigError(f"{name}() returns {type(whole).__name__}", f"in {where}", "let it return a torch.nn.Module")
    sizes = [p.numel() for p in whole.parameters()]
    if not sizes:
        raise ConfigError(f"{name}() has no weights", f"in {where}", "let it return a model that learns")
    words = BATCH_WORDS[: 1 + (len(inspect.signature(deal).parameters) > 1)]

    def dealt(size: int) -> Any:
        torch.manual_seed(0)
        return deal(*[size, 0][: len(words)])

    def tensors(values: Any) -> list[Any]:
        return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]

    with refused("the batch fails", "in --batch", "let it take a number of samples"):
        inputs, again, more = (dealt(size) for size in (SAMPLES, SAMPLES, 2 * SAMPLES))
    kinds = {"dict": Mapping, "list": list | tuple, "tensor": object if hasattr(inputs, "to") else ()}
    kind = next((kind for kind, of_kind in kinds.items() if isinstance(inputs, of_kind)), "")
    if not (kind and inputs is not None):
        fix = "return a tensor, a list or a dictionary of tensors"
        raise ConfigError(f"the batch is a {type(inputs).__name__}", "in --batch", fix)
    shapes = [[each.shape for each in tensors(values)] for values in (inputs, more)]
    if not all(torch.equal(*pair) for pair in zip(tensors(inputs), tensors(again), strict=False)):
        fix = "draw by torch's generator, or take the number of the micro-batch as a second parameter"
        raise ConfigError("two calls with one seed of torch give unlike samples", "in --batch", fix)
    if shapes[0] and shapes[0] == shapes[1]:
        what = f"{SAMPLES} and {2 * SAMPLES} samples have the same shapes"
        raise ConfigError(what, "in --batch", "let it return as many samples as it is asked for")
    # As a program has it: a named tuple is a list there.
    inputs = {**inputs} if kind == "dict" else moved(inputs)
    if kind != "tensor" and not all(hasattr(each, "to") for each in (inputs.values() if kind == "dict" else inputs)):
        kind = "nested"
    calls, blocks = _call_words(whole, inputs, kind, judge is not None), blocks_of(whole)
    failure: Exception | None = None
    # The first two blocks of each list may be no model, and a value for the loss no option of the model.
    for is_shallow, call_words in product(sorted({bool(blocks), False}, reverse=True), calls):
        try:
            twin = two_blocks(tried, blocks if is_shallow else [])
            loss_words = _loss_words(twin, inputs, call_words, judge)
            break
        except Exception as error:
            failure = failure or error
    else:
        if isinstance(failure, ConfigError):
            raise failure
        what = f"the model does not take the batch ({type(failure).__name__}: {failure})"[:300]
        raise ConfigError(what, f"in {where}", "let them fit each other, on a CPU")
    n_small = sum(p.numel() for p in twin.parameters())
    words_of_loss = loss_words.replace("outputs", f"model({call_words})")

    def loss_of(inputs: Any, seed: int = 0) -> float:
        torch.manual_seed(seed)
        return float(eval(words_of_loss, {"model": twin, "inputs": inputs, "loss": judge}).detach())

    with Decisions() as decisions:
        loss_of(inputs)
    renewed, is_mean = _renewed(twin, lambda: loss_of(inputs)), _is_mean(twin, loss_of, moved(inputs), moved(more))
    # A batch norm takes no single value.
    least = SAMPLES
    with suppress(Exception):
        least = SAMPLES if math.isnan(loss_of(moved(dealt(1)))) else 1
    idle = tuple(name for name, p in twin.named_parameters() if p.requires_grad and p.grad is None)
    deal_whole = user_function(whole_batch, "--batch")[0] if whole_batch else deal
    of_whole = moved(deal_whole(*[SAMPLES, 0][: len(words)])) if small else None
    chain, no_chain = _chain_of(twin, whole, inputs, of_whole, call_words, blocks)
    has_scalars = False
    if not all(p.dim() for p in twin.parameters()):
        with suppress(Exception):
            widen(twin)
            _loss_words(twin, inputs, call_words, judge)
            has_scalars = True
    folder = Path(where).parent if where.endswith(".py") else Path()
    modules = {Path(getattr(m, "__file__", None) or "/") for m in [*sys.modules.values()]}
    own = sorted(path for path in modules | {path for path in opened if path.suffix != ".pyc"} if _is_in(path, folder))
    return Subject(
        (),
        _imports([module, name], of_batch, of_loss),
        _imports(of_small, of_batch, of_loss),
        f"a model of its class, {n_small / 1e6:,.2f}M weights",
        n_small,
        Path(where).name,
        hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest(),
        ", ".join(words),
        kind,
        call_words,
        loss_words,
        (*blocks, "")[0],
        tuple(blocks[1:]),
        is_shallow and n_small != sum(sizes),
        _is_bf16(twin, inputs, call_words),
        any(_is_float(each) for each in _called(lambda *args, **named: [*args, *named.values()], inputs, call_words)),
        any(isinstance(module, torch.nn.RNNBase) for module in whole.modules()),
        has_scalars,
        decisions.found,
        idle,
        least,
        is_mean,
        renewed,
        sum(sizes),
        max(sizes),
        plan_of_transformers(whole),
        chain,
        no_chain,
    )


def _renewed(model: Any, loss_of: Callable[[], float]) -> str:
    """Return what a forward renews and reads, if it gives another loss for the same samples and seed, else ""."""
    before = copy.deepcopy(model.state_dict())
    first, second = loss_of(), loss_of()
    if abs(second - first) <= ROUNDING * abs(first):
        return ""
    changed = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    # Those of batch norms are not read while a model is trained.
    read = [name for name in changed if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    others = f" and {len(read) - 1} more" * (len(read) > 1)
    return (
        f"renews {read[0]}{others}, and reads it" if read else "draws or keeps numbers outside of torch and its state"
    )


def _is_mean(model: Any, loss_of: Callable[..., float], inputs: Any, more: Any) -> bool:
    """Return whether the loss of four samples is the mean of those of two and two. It is taken for one if nobody can tell."""
    from torch.utils._pytree import tree_map

    def half(start: int, few: Any, many: Any) -> Any:
        is_of_samples = hasattr(many, "shape") and (len(few), len(many)) == (SAMPLES, 2 * SAMPLES)
        return many[start : start + SAMPLES] if is_of_samples else many

    try:
        model.eval()
        whole, again = loss_of(more), loss_of(more, seed=1)
        halves = [loss_of(tree_map(partial(half, start), inputs, more)) for start in (0, SAMPLES)]
    except Exception:
        return True
    finally:
        model.train()
    return whole != again or abs(sum(halves) / 2 - whole) <= UNEQUAL * abs(whole)


def _chain_of(
    twin: Any, whole: Any, inputs: Any, of_whole: Any, call_words: str, blocks: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """Return where stages cut a model, or why they cannot. of_whole: a batch of the whole one, if that is wider than its twin."""
    from torch.utils._pytree import tree_map

    from gptscale.common.model.chain import NoChainError, chain_of

    try:
        found = chain_of(twin, lambda: _called(twin, inputs, call_words), (*blocks, "")[0])
        found |= {"small": found["hidden"], "count": len(whole.get_submodule(found["blocks"]))}
        if of_whole is not None:
            of_whole = tree_map(lambda value: value.to("meta") if hasattr(value, "to") else value, of_whole)
            whole.to("meta")
            found["hidden"] = _hidden_of(whole, lambda: _called(whole, of_whole, call_words), found["blocks"])
    except NoChainError as error:
        return {}, str(error)
    return found, ""


def _hidden_of(model: Any, call: Callable[[], Any], path: str) -> list[int]:
    """Return the shape that a sample has between the blocks of a model on the meta device. Raises NoChainError."""
    from gptscale.common.model.chain import NoChainError

    found, why = list[int](), "it calls no block"

    def begun(module: Any, args: Any) -> None:
        found.extend(args[0].shape[1:])
        raise NoChainError("")

    model.get_submodule(f"{path}.0").register_forward_pre_hook(begun)
    try:
        call()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if not found:
        raise NoChainError(f"what its blocks take has no known shape ({why})"[:200])
    return found


def _is_in(path: Path, folder: Path) -> bool:
    is_own = folder.absolute() in path.absolute().parents and "site-packages" not in path.parts
    return is_own and path.is_file() and path.stat().st_size <= SOURCE_MOST


def _loss_words(model: Any, inputs: Any, call_words: str, judge: Callable[..., Any] | None) -> str:
    """Compute a loss and its gradients, and return the words for it. Raises ConfigError if there is none."""
    import torch

    model.train()
    outputs = _called(model, inputs, call_words)
    words_of_loss = ["outputs", "outputs.loss", 'outputs["loss"]', "outputs[0]", "outputs[-1]"]
    if judge is not None:
        with refused("the loss fails", "in --loss", "let it take the model's outputs and the batch"):
            outputs, words_of_loss = judge(outputs, inputs), ["loss(outputs, inputs)"]
    for words in words_of_loss:
        try:
            value = outputs if judge is not None else eval(words, {"outputs": outputs})
        except (AttributeError, KeyError, IndexError, TypeError):
            continue
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad:
            if not value.isfinite():
                raise ConfigError(f"the loss is {value:g}", "with small random weights", "let it be finite")
            value.backward()
            return words
    kind = type(outputs).__name__
    if isinstance(outputs, torch.Tensor):
        kind = f"tensor of shape {tuple(outputs.shape)}" + " without a gradient" * (not outputs.requires_grad)
    who, where = ("the model", "in the model, without --loss") if judge is None else ("the function", "in --loss")
    raise ConfigError(f"{who} returns a {kind}", where, "let the loss be a tensor without dimensions, with a gradient")


def _called(function: Callable[..., Any], inputs: Any, call_words: str) -> Any:
    """Return what a function returns that is called as the model is."""
    return eval(f"function({call_words})", {"function": function, "inputs": inputs})


def _is_float(value: Any) -> bool:
    return bool(getattr(value, "is_floating_point", bool)())


def _is_bf16(model: Any, inputs: Any, call_words: str) -> bool:
    """Return whether a model can be called with its weights and its floating inputs in bf16. Its buffers stay as they are."""
    import torch

    for p in model.parameters():
        p.data = p.data.bfloat16() if p.is_floating_point() else p.data

    def call(*args: Any, **named: Any) -> None:
        values = [value.bfloat16() if _is_float(value) else value for value in (*args, *named.values())]
        model(*values[: len(args)], **dict(zip(named, values[len(args) :], strict=True)))

    try:
        with torch.no_grad():
            _called(call, inputs, call_words)
    except RuntimeError:
        return False
    return True


def main(*words: str) -> None:
    """Print a subject, or the error, in a line of JSON."""
    try:
        print(json.dumps(asdict(look(*words))))
    except ConfigError as error:
        print(json.dumps({"error": [error.what, error.where, error.fix]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
