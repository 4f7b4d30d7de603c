"""The model and the batch that a user brings, as the programs of `gptscale fit` have them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.process.program import Program
from gptscale.common.process.task import reason, run_captured
from gptscale.common.settings.families import MODELS

LIMIT_S = 300
SMOOTH = "from gptscale.foresight.fit.twin import Smooth, two_blocks\n\nSmooth().__enter__()\n"


@dataclass(frozen=True)
class Subject:
    """A user's model and batch.

    imports, definitions: the text by which a program has `build`, `batch` and, where loss_words names it, `loss`. small: the
    same text of a small model for proofs with n_small elements, which small_words describes. title: the model, in a few
    words. sources: a hash of the files that it is made of. batch_words: the words for `batch`, which may take the number of
    the micro-batch, too. kind: of a batch, "dict", "list", "nested" or "tensor". call_words: what of `inputs` the model is
    called with; the rest is for the loss alone. is_recurrent: whether cuDNN has layers of it. has_scalars: whether it has
    weights without dimensions, that may have one. has_decisions: whether it routes, masks or branches by values. loss_words:
    the loss by `outputs` and `inputs`. block: the class that is repeated, "" for none. beside: those of other stacks, such as
    an encoder's. is_shallow: whether two blocks of each list are a model, too. is_bf16: whether it runs with weights and
    inputs of bf16. has_floats: whether the batch has such inputs. idle: weights that got no gradient from a batch of two.
    least: samples that it takes at least. is_mean: whether its loss is a mean over samples. renewed: what its forward renews
    and reads, "" for nothing. n_params, largest_weight: elements. plan: how tensor ranks cut modules, by the words of
    transformers, empty for none. chain: where stages cut it (chain_of, with the count of its blocks, and "small", what
    "hidden" is in a small model), empty if they cannot, for the reason no_chain.
    """

    imports: tuple[str, ...]
    definitions: str
    small: str
    small_words: str
    n_small: int
    title: str
    sources: str
    batch_words: str
    kind: str
    call_words: str
    loss_words: str
    block: str
    beside: tuple[str, ...]
    is_shallow: bool
    is_bf16: bool
    has_floats: bool
    is_recurrent: bool
    has_scalars: bool
    has_decisions: bool
    idle: tuple[str, ...]
    least: int
    is_mean: bool
    renewed: str
    n_params: int
    largest_weight: int
    plan: Mapping[str, str]
    chain: Mapping[str, Any]
    no_chain: str


def subject_of(model: str, batch: str, loss: str, seq_len: int | None, folder: Path, small: str = "") -> Subject:
    """Look at what a user names: FILE.py:NAME, package.module:NAME, hf:CONFIG or a preset.

    folder: for files of models that are text. small: a narrow model for proofs. Raises ConfigError if no program can be made.
    """
    if model.startswith("hf:") or model in MODELS:
        from gptscale.foresight.fit.configs import of_preset, of_transformers

        if batch or loss or small:
            where = "in --batch, --loss or --small"
            raise ConfigError(f"{model} has its own batch, loss and small model", where, "leave them out")
        texts = of_transformers(model[3:], seq_len) if model.startswith("hf:") else of_preset(model, seq_len)
        for name, text in zip(("whole", "small"), texts, strict=False):
            (folder / f"{name}_model.py").write_text(f"import torch\n{text}\n")
        whole, narrow = (f"{folder}/{name}_model.py:" for name in ("whole", "small"))
        try:
            words = f"{whole}build", f"{narrow}batch", "", f"{narrow}build", f"{whole}batch"
            found = _look(*words) | {"small": SMOOTH + texts[1]}
        except ConfigError:
            # It cannot be that narrow.
            found = _look(f"{whole}build", "", "", "")
            found |= _shallow(texts[0], found)
        imports, definitions = texts[0].split("\n\n", 1)
        found |= {"imports": [imports], "definitions": definitions, "title": model}
    else:
        if seq_len:
            raise ConfigError("a model of your own has its own batch", "in --seq-len", "leave it out")
        found = _look(model, batch, loss, small)
        found |= _shallow(found["small"], found)
    return Subject(**found | {"imports": tuple(found["imports"])})


def _shallow(text: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of a model with two blocks of each list, or of the whole one, and what it is."""
    blocks = [found["block"], *found["beside"]] if found["is_shallow"] else []
    text = f"{text}\n\nwhole_build = build\n\n\ndef build():\n    return two_blocks(whole_build, {blocks!r})"
    which = f"two {' and '.join(blocks)} of each list" if blocks else "the whole model"
    return {"small": SMOOTH + text, "small_words": f"{which}, {found['n_small'] / 1e6:,.2f}M weights"}


def _look(*words: str) -> dict[str, Any]:
    """Look at a model in a process of its own, and return what it says."""
    try:
        done = run_captured(Program("gptscale.foresight.fit.look", words), timeout=LIMIT_S)
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
