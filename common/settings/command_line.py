"""The command line, made from dataclasses of options, where a mistake is told in one line and never in a page."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from gptscale.common.errors import ConfigError, StorageError
from gptscale.common.settings.checks import check_path, ignored, nearest, option_of, refuse_ignored, values_of

T = TypeVar("T")
# Words that are a path unless they are something else.
MAY_NAME_A_FILE = ("data", "tokenizer", "resume")
# Names of our options in other trainers, for whoever types them here.
OTHER_NAMES = {
    "learning_rate": "lr", "batch_size": "global_batch_size", "gradient_accumulation_steps": "grad_accum_steps",
    "gradient_clipping": "clip_grad_norm", "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head",
    "max_steps": "steps", "dtype": "precision", "nproc_per_node": "nproc",
}  # fmt: skip


def parse(kind: type[T], argv: Sequence[str], *, prog: str, about: str = "") -> T:
    """Return an instance of the dataclass `kind` from a command line, flat: fields of nested dataclasses have no prefix.

    tyro does the work. Its boxes of explanation are cut down to their first sentence, which a ConfigError carries. An option
    that would be ignored is refused.
    """
    # Its import takes 0.2 s, and most of `common` never parses anything.
    import tyro

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            flat = (tyro.conf.OmitArgPrefixes,)
            parsed, unknown = tyro.cli(
                kind, args=list(argv), prog=prog, description=about, config=flat, return_unknown_args=True
            )
    except SystemExit as end:
        if end.code in (0, None):
            # The user asked for --help.
            raise
        raise ConfigError(_first_sentence(messages.getvalue()), "on the command line", f"see {prog} --help") from None
    if unknown:
        word = next((u for u in unknown if u.startswith("-")), unknown[0]).split("=")[0]
        near = _nearest_option(word, [name for name, _ in values_of(parsed)])
        fix = f"did you mean {near!r}?" if near else f"see {prog} --help"
        raise ConfigError(f"unknown option {word!r}", "on the command line", fix)
    refuse_ignored(parsed, argv)
    _check_paths(parsed)
    return parsed


def refuse_repeated(argv: Sequence[str]) -> None:
    """Raise ConfigError for an option that a user gives twice, as --x and --no-x too, since one of them would be ignored."""
    names = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    options = [f"--{name.removeprefix('--').removeprefix('no-')}" for name in names]
    if twice := [option for option in options if options.count(option) > 1]:
        raise ConfigError(f"{twice[0]} is given twice", "on the command line", "leave one out")


def changed_options(options: Any, default: Any) -> list[str]:
    """Return the command-line words that make `options` of `default`: an option for each field that differs.

    A field that has no effect beside the others is left out, since `parse` would refuse it.
    """
    words: list[str] = []
    without_effect = ignored(options)
    for field in dataclasses.fields(options):
        value, option = getattr(options, field.name), option_of(field.name)
        if value == getattr(default, field.name) or field.name in without_effect:
            continue
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option.removeprefix('--')}")
        else:
            words += [option, str(value)]
    return words


def bare_resume(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the word `newest` behind each `--resume` that has no path: the newest checkpoint of the named run."""
    words = []
    for i, word in enumerate(argv):
        words.append(word)
        if word == "--resume" and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            words.append("newest")
    return words


def _check_paths(options: Any) -> None:
    for name, value in values_of(options):
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) or (name in MAY_NAME_A_FILE and isinstance(path, str)):
                check_path(Path(path), option_of(name))


def _nearest_option(word: str, fields: Sequence[str]) -> str | None:
    """Return the option whose name is most like `word`, also by the names that other trainers use."""
    names = {field: field for field in fields}
    names = {other: field for other, field in OTHER_NAMES.items() if field in fields} | names
    near = nearest(word.lstrip("-").replace("-", "_"), names, 0.7)
    return option_of(names[near]) if near else None


def _first_sentence(box: str) -> str:
    """Return the message inside tyro's box: the lines between its first two rules, joined.

    On a terminal the box is coloured, and the first rule has a title in it.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[│╭╮╰╯]", " ", line).strip() for line in plain.splitlines()]
    rules = [i for i, line in enumerate(lines) if "──" in line or "━━" in line or (line and not line.strip("- "))]
    end = rules[1] if len(rules) > 1 else len(lines)
    begin = rules[0] + 1 if rules else 0
    text = " ".join(line for line in lines[begin:end] if line)
    return text.rstrip(".") or "options that cannot be read"


def fail(error: Exception) -> int:
    """Print a user's error in its one line and return the exit status that goes with it.

    A disk that is full or fails has its own. All else was found before anything ran.
    """
    print(f"gptscale: error: {error}", file=sys.stderr, flush=True)
    return error.exit_status if isinstance(error, StorageError) else 2
