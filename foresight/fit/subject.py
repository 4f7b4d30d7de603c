"""The model and the batch that a user brings, as the programs of `gptscale fit` have them.

A process of its own looks at them (main), since a user's module may do anything.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.process.task import reason
from gptscale.common.settings.families import MODELS
from gptscale.foresight.fit.splits import STYLES

LIMIT_S = 300
# How many samples are tried, and the words that call a model with its batch.
SAMPLES = 2
BATCH_WORDS = ["o.micro_batch_size", "step * (o.global_batch_size // o.micro_batch_size) + number"]


@dataclass(frozen=True)
class Subject:
    """A user's model and batch.

    imports, definitions: the text by which a program has `build`, `batch` and, where loss_words names it, `loss`. small: the same
    text of a small model for proofs, which small_words describes. title: the model, in a few words. sources: a hash of the files
    that it is made of. batch_words: the words for `batch`, which may take the number of the micro-batch, too. kind: of a batch,
    "dict", "list" or "tensor". loss_words: the loss by `outputs` and `inputs`. block: the class that is repeated, "" for none.
    is_shallow: whether two blocks of each list are a model, too. n_params, largest_weight: elements. plan: how tensor ranks cut
    modules, by the words of transformers, empty for none.
    """

    imports: tuple[str, ...]
    definitions: str
    small: str
    small_words: str
    title: str
    sources: str
    batch_words: str
    kind: str
    loss_words: str
    block: str
    is_shallow: bool
    n_params: int
    largest_weight: int
    plan: Mapping[str, str]


def subject_of(model: str, batch: str, loss: str, seq_len: int | None, folder: Path) -> Subject:
    """Look at what a user names: FILE.py:NAME, package.module:NAME, hf:CONFIG or a preset.

    folder: for files of models that are text. Raises ConfigError if no program can be made of it.
    """
    if model.startswith("hf:") or model in MODELS:
        from gptscale.foresight.fit.configs import of_preset, of_transformers

        if batch or loss:
            raise ConfigError(f"{model} has its own batch and loss", "in --batch or --loss", "leave them out")
        texts = of_transformers(model[3:], seq_len) if model.startswith("hf:") else of_preset(model, seq_len)
        for name, text in zip(("whole", "small"), texts, strict=False):
            (folder / f"{name}_model.py").write_text(f"import torch\n{text}\n")
        found = _look(f"{folder}/whole_model.py:build", "", "", f"{folder}/small_model.py:build")
        imports, definitions = texts[0].split("\n\n", 1)
        found |= {
            "imports": [imports],
            "definitions": definitions,
            "small": texts[1],
            "small_words": texts[2],
            "title": model,
        }
    else:
        if seq_len:
            raise ConfigError("a model of your own has its own batch", "in --seq-len", "leave it out")
        found = _look(model, batch, loss, "")
    return Subject(**found | {"imports": tuple(found["imports"])})


def _look(*words: str) -> dict[str, Any]:
    """Look at a model in a process of its own, and return what it says."""
    command = [sys.executable, "-W", "ignore", "-m", "gptscale.foresight.fit.subject", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        fix = "let a batch of two samples be smaller"
        raise ConfigError(f"{words[0]} made no step of two samples in {LIMIT_S} s", "in gptscale fit", fix) from None
    lines = done.stdout.splitlines()
    if not (lines and lines[-1].startswith("{")):
        raise ConfigError(f"{words[0]} fails ({reason(done.stderr)[:200]})", "in gptscale fit", "run it alone")
    found: dict[str, Any] = json.loads(lines[-1])
    if "error" in found:
        raise ConfigError(*found["error"])
    return found


def _function(spec: str, option: str) -> tuple[Callable[..., Any], str, str]:
    """Return what FILE.py:NAME or package.module:NAME names, its module and its name."""
    where, _, name = spec.partition(":")
    if not name:
        raise ConfigError(f"{spec!r} names no function", f"in {option}", "write FILE.py:NAME or package.module:NAME")
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"there is no file {where}", f"in {option}", "name a file that is there")
        sys.path.insert(0, str(path.parent.absolute()))
        where = path.stem
    else:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(where)
    except Exception as error:
        raise ConfigError(
            f"{where} cannot be imported ({type(error).__name__}: {error})"[:300], f"in {option}", "mend it"
        ) from None
    if not callable(function := getattr(module, name, None)):
        raise ConfigError(
            f"{where} has no function {name}", f"in {option}", f"name one of: {' '.join(_functions(module))}"
        )
    return function, where, name


def _functions(module: Any) -> list[str]:
    own = (
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    )
    return sorted(own)[:20] or ["(it has none)"]


def look(build: str, batch: str, loss: str, small: str) -> Subject:
    """Build a small model, compute a loss of it, and return what programs need to know. small: another one that is small."""
    import torch

    from gptscale.foresight.fit.twin import block_of, on_meta, two_blocks

    where = build.partition(":")[0]
    make, module, name = _function(build, "the model")
    tried = _function(small, "the model")[0] if small else make
    deal, *of_batch = _function(batch or f"{(small or build).partition(':')[0]}:batch", "--batch")
    judge, *of_loss = _function(loss, "--loss") if loss else (None,)
    imports = defaultdict(list)
    for (from_module, its_name), as_name in zip(
        filter(None, [(module, name), of_batch, of_loss]), ("build", "batch", "loss"), strict=False
    ):
        imports[from_module].append(its_name if its_name == as_name else f"{its_name} as {as_name}")
    try:
        with on_meta():
            whole = make()
    except Exception as error:
        raise ConfigError(
            f"{name}() fails ({type(error).__name__}: {error})"[:300], f"in {where}", "let it run on a CPU"
        ) from None
    if not isinstance(whole, torch.nn.Module):
        raise ConfigError(f"{name}() returns {type(whole).__name__}", f"in {where}", "let it return a torch.nn.Module")
    sizes = [p.numel() for p in whole.parameters()]
    if not sizes:
        raise ConfigError(f"{name}() has no weights", f"in {where}", "let it return a model that learns")
    words = BATCH_WORDS[: 1 + (len(inspect.signature(deal).parameters) > 1)]
    try:
        inputs = deal(*[SAMPLES, 0][: len(words)])
    except Exception as error:
        fix = "let it take a number of samples"
        raise ConfigError(f"the batch fails ({type(error).__name__}: {error})"[:300], "in --batch", fix) from None
    kinds = {"tensor": torch.Tensor, "dict": Mapping, "list": list | tuple}
    kind = next((kind for kind, of_kind in kinds.items() if isinstance(inputs, of_kind)), "")
    if not kind:
        fix = "return a tensor, a list or a dictionary of tensors"
        raise ConfigError(f"the batch is a {type(inputs).__name__}", "in --batch", fix)
    block = block_of(whole)
    is_shallow = bool(block)
    try:
        loss_words = _loss_words(two_blocks(tried, block), inputs, kind, judge)
    except ConfigError:
        raise
    except Exception:
        # Its first two blocks are no model.
        is_shallow = False
        try:
            loss_words = _loss_words(two_blocks(tried, ""), inputs, kind, judge)
        except Exception as error:
            what = f"the model does not take the batch ({type(error).__name__}: {error})"[:300]
            raise ConfigError(what, f"in {where}", "let them fit each other, on a CPU") from None
    lines = "\n".join(
        f"from {from_module} import {', '.join(sorted(names))}" for from_module, names in sorted(imports.items())
    )
    cut = f"two_blocks(whole_build, {block!r})" if is_shallow else "two_blocks(whole_build, '')"
    folder = Path(where).parent if where.endswith(".py") else Path()
    own = sorted(
        path for m in [*sys.modules.values()] if _is_in(path := Path(getattr(m, "__file__", None) or "/"), folder)
    )
    return Subject(
        (),
        lines,
        f"from gptscale.foresight.fit.twin import two_blocks\n{lines}\n\nwhole_build = build\n\n\ndef build():\n    return {cut}",
        f"two {block} of each list" if is_shallow else "the whole model",
        Path(where).name,
        hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest(),
        ", ".join(words),
        kind,
        loss_words,
        block,
        is_shallow,
        sum(sizes),
        max(sizes),
        _plan_of(whole),
    )


def _plan_of(model: Any) -> dict[str, str]:
    """Return how a model says that tensor ranks cut it (tp_plan), empty if it does not, or in a way that is not written."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    embeddings: list[Any] = [
        getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    if all(embeddings) and embeddings[0].weight is embeddings[1].weight:
        # A matrix with two uses stays whole.
        plan = {
            name: style for name, style in plan.items() if style not in ("embedding_rowwise", "colwise_gather_output")
        }
    return plan if {*plan.values()} <= STYLES.keys() else {}


def _is_in(path: Path, folder: Path) -> bool:
    return (
        path.suffix == ".py"
        and path.is_file()
        and folder.absolute() in path.absolute().parents
        and "site-packages" not in path.parts
    )


def _loss_words(model: Any, inputs: Any, kind: str, judge: Callable[..., Any] | None) -> str:
    """Compute a loss and its gradients, and return the words for it. Raises ConfigError if there is none."""
    import torch

    model.train()
    outputs = model(**inputs) if kind == "dict" else model(*inputs) if kind == "list" else model(inputs)
    tries: list[tuple[str, Callable[[], Any]]] = [
        ("outputs", lambda: outputs),
        ("outputs.loss", lambda: outputs.loss),
        ('outputs["loss"]', lambda: outputs["loss"]),
        ("outputs[0]", lambda: outputs[0]),
    ]
    if judge is not None:
        tries = [("loss(outputs, inputs)", lambda: judge(outputs, inputs))]
    for words, get in tries:
        try:
            value = get()
        except (AttributeError, KeyError, IndexError, TypeError):
            continue
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad:
            value.backward()
            return words
    raise ConfigError(
        "neither the model nor --loss gives a loss",
        "in the model",
        "let it be a tensor without dimensions, with a gradient",
    )


def main(*words: str) -> None:
    """Print a subject, or the error, in a line of JSON."""
    try:
        print(json.dumps(asdict(look(*words))))
    except ConfigError as error:
        print(json.dumps({"error": [error.what, error.where, error.fix]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
