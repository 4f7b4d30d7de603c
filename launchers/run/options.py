"""The command line, made from the configuration dataclasses; a mistake in it is one line, never a page."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RecipeConfig, RunConfig, did_you_mean
from gptscale.recipes import get

T = TypeVar("T")


def parse_run(recipe: str, argv: Sequence[str]) -> tuple[RunConfig, RecipeConfig]:
    """The run's and the recipe's options from a command line; ConfigError for anything that is not one of them."""
    run, recipe_config, _ = parse_launch(recipe, argv, None)
    return run, recipe_config


def parse_launch(recipe: str, argv: Sequence[str], launch: type[T] | None) -> tuple[RunConfig, RecipeConfig, T | None]:
    """As `parse_run`, with the launcher's own options (a dataclass) beside them."""
    row = get(recipe)
    config_type: type[RecipeConfig] = getattr(row.load(), row.config)
    fields: list[tuple[str, Any, Any]] = [
        ("run", RunConfig, dataclasses.field(default_factory=RunConfig)),
        ("recipe", config_type, dataclasses.field(default_factory=lambda: config_type(**row.preset))),
    ]
    if launch is not None:
        fields.append(("launch", launch, dataclasses.field(default_factory=launch)))
    options = dataclasses.make_dataclass("options", fields, frozen=True)
    parsed: Any = parse(options, _bare_resume(argv), prog=f"gptscale run {recipe}", about=row.what)
    for field, fixed in row.preset.items():
        if getattr(parsed.recipe, field) != fixed:
            raise ConfigError(
                f"{recipe} fixes {field} {fixed}",
                f"in --{field.replace('_', '-')}",
                "leave it out, or use another recipe",
            )
    return parsed.run, parsed.recipe, getattr(parsed, "launch", None)


def parse(kind: type[T], argv: Sequence[str], *, prog: str, about: str = "") -> T:
    """An instance of the dataclass `kind` from a command line, flat: the fields of nested dataclasses have no prefix.

    tyro does the work; its boxes of explanation are cut down to their first sentence.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed, unknown = tyro.cli(
                kind,
                args=list(argv),
                prog=prog,
                description=about,
                config=(tyro.conf.OmitArgPrefixes,),
                return_unknown_args=True,
            )
    except SystemExit as end:
        if end.code in (0, None):  # --help
            raise
        raise ConfigError(_first_sentence(said.getvalue()), "on the command line", f"see {prog} --help") from None
    if unknown:
        names = [f"--{name.replace('_', '-')}" for name in _names(kind)]
        word = next((u for u in unknown if u.startswith("-")), unknown[0]).split("=")[0]
        raise ConfigError(
            f"unknown option {word!r}", "on the command line", did_you_mean(word.replace("_", "-"), names)
        )
    return parsed


def option_words(recipe: str, config: RunConfig, recipe_config: RecipeConfig) -> list[str]:
    """The words that `parse_run` makes these two configurations of: an option for each field that is not its default."""
    return _words(config, RunConfig()) + _words(recipe_config, type(recipe_config)(**get(recipe).preset))


def _words(config: Any, default: Any) -> list[str]:
    words: list[str] = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), field.name.replace("_", "-")
        if value != getattr(default, field.name):
            words += (
                [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
            )
    return words


def _names(kind: Any) -> list[str]:
    """Option names of a dataclass and of the dataclasses inside it."""
    found: list[str] = []
    for field in dataclasses.fields(kind):
        inner = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
        found += _names(inner) if dataclasses.is_dataclass(inner) else [field.name]
    return found


def _first_sentence(box: str) -> str:
    """The message inside tyro's box: the lines between its first two rules, joined.

    On a terminal the box is coloured, and the first rule has a title in it.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[│╭╮╰╯]", " ", line).strip() for line in plain.splitlines()]
    rules = [i for i, line in enumerate(lines) if "──" in line or "━━" in line or (line and not line.strip("- "))]
    end = rules[1] if len(rules) > 1 else len(lines)
    begin = rules[0] + 1 if rules else 0
    text = " ".join(line for line in lines[begin:end] if line)
    return text.rstrip(".") or "options that cannot be read"


def _bare_resume(argv: Sequence[str]) -> list[str]:
    """`--resume` with no path behind it means the newest checkpoint of the named run."""
    result = []
    for i, word in enumerate(argv):
        result.append(word)
        if word == "--resume" and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            result.append("auto")
    return result


def fail(error: Exception) -> int:
    """Print a user's error in its one line; the exit status that goes with it."""
    print(f"gptscale: error: {error}", file=sys.stderr, flush=True)
    return 2
