"""Options that have an effect only beside another one, refused where they would be ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import option_of


class OptionNeed(NamedTuple):
    """Fields of a dataclass of options, with commas between, that are ignored unless `holds(options)`.

    why: for the error; {name} in it is the value of the field `name`. instead: what to type beside the option. A dataclass lists
    its own in `NEEDS`. What depends on the machine or the number of processes is none: one command line serves them all.
    """

    fields: str
    holds: Callable[[Any], object]
    why: str
    instead: str = ""


def refuse_ignored(options: Any, argv: Sequence[str]) -> None:
    """Raise ConfigError for the first option on the command line `argv` that `options`, which it makes, would ignore.

    An option is refused with its default value too, because who types it expects an effect.
    """
    named_options = {
        word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")
    }
    for part, need in _unmet(options):
        for field in need.fields.split(","):
            if field in named_options:
                why = need.why.format(**vars(part))
                fix = f"leave it out, or {need.instead}" if need.instead else "leave it out"
                raise ConfigError(why, f"in {option_of(field)}", fix)


def ignored(options: Any) -> set[str]:
    """Return the fields of `options` that have no effect beside the others."""
    return {field for _, need in _unmet(options) for field in need.fields.split(",")}


def _unmet(options: Any) -> Iterator[tuple[Any, OptionNeed]]:
    """Yield each need that does not hold, of `options` and of the dataclasses inside it, with the dataclass it belongs to."""
    needs: Iterable[OptionNeed] = getattr(options, "NEEDS", ())
    yield from ((options, need) for need in needs if not need.holds(options))
    for field in dataclasses.fields(options):
        inner = getattr(options, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _unmet(inner)
