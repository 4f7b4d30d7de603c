"""Checks of options that many commands share.

Each raises a ConfigError that says what to type instead.
"""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptscale.common.errors import ConfigError

# It never reads as a path, an option or a hidden file.
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
# Words of --resume beside a path: the newest checkpoint of the run. `auto` begins the run if it has none yet.
RUN_WORDS = ("newest", "auto")
# Options that may differ between the ranks of a run: where a machine keeps its copy of the data, whose content is compared
# instead, and its own fast disk. `out` is none of them, because every rank writes its part of a checkpoint there.
OF_THE_MACHINE = frozenset({"data", "tokenizer", "data_dir", "download", "nvme_path", "ds_config", "plan"})
# Formats that matplotlib writes. Without an ending it adds .png.
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")


def option_of(field: str) -> str:
    """Return the option that a dataclass field has on the command line, `seq_len` as `--seq-len`."""
    return f"--{field.replace('_', '-')}"


def check_range(value: float | None, low: float, high: float, field: str, fix: str | None = None) -> None:
    """Raise ConfigError unless `value` lies in [low, high] or is None.

    field: the dataclass field that holds it. fix: what to do instead, by default "use {low} to {high}". NaN is out of
    every range.
    """
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{field} {value} is out of range", f"in {option_of(field)}", fix or f"use {low} to {high}")


def check_ranges(options: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigError for the first field of `options` that is out of its range (low, high) in `ranges`."""
    for field, (low, high) in ranges.items():
        check_range(getattr(options, field), low, high, field)


def check_path(path: Path, option: str) -> None:
    """Raise ConfigError for a path that no file can have, such as one with a name of 400 letters."""
    try:
        path.stat()
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            reason = getattr(error, "strerror", None) or str(error)
            what = f"{str(path)[:40]}... cannot be a path ({reason})"
            raise ConfigError(what, f"in {option}", "give another") from None


def check_output_file(file: Path | None, option: str, problem: str | None = None) -> None:
    """Raise ConfigError if `file` is a folder or lies in a folder that does not exist.

    option: as the user types it, `--csv`. problem: words in place of those that say which of the two it is.
    """
    if file is None:
        return
    check_path(file, option)
    if option == "--png" and file.suffix not in ("", *PICTURES):
        what = f"{file} does not end as a picture does"
        raise ConfigError(what, "in --png", f"end it in one of: {' '.join(PICTURES)}")
    if file.is_dir() or not file.absolute().parent.is_dir():
        reason = "is a folder" if file.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"{file} {problem or reason}", f"in {option}", "name a file in a folder that exists")


def parse_names(text: str, valid: Collection[str], kind: str, option: str, fix: str | None = None) -> list[str]:
    """Return the names in `text`, which has commas between them, in their order.

    ConfigError for the first that is not in `valid`: "unknown {kind} 'x', in {option}, {fix}". The default fix is the
    nearest valid name.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_name(name, valid, kind, f"in {option}", fix)
    return names


def check_name(name: str, valid: Collection[str], kind: str, where: str, fix: str | None = None) -> None:
    """Raise ConfigError unless `name` is in `valid`. The default fix is the nearest valid name."""
    if name not in valid:
        raise ConfigError(f"unknown {kind} {name!r}", where, fix or did_you_mean(name, valid))


def parse_whole_numbers(text: str, option: str, fix: str, *, least: int = 1) -> list[int]:
    """Return the whole numbers in `text`, which has commas between them.

    ConfigError if a word is no whole number or one below `least`.
    """
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"{text!r} is no list of numbers", f"in {option}", fix)
    return [int(word) for word in words]


def check_run_name(run_name: str | None, resume: str | None) -> None:
    """Raise ConfigError for a run name that cannot name a folder, or if `--resume` means a run that has no name."""
    if run_name is not None and not RUN_NAME.fullmatch(run_name):
        fix = "use 1 to 64 letters, digits, '.', '_' or '-', no path and no leading dash or dot"
        raise ConfigError(f"bad run name {run_name!r}", "in --run-name", fix)
    if resume in RUN_WORDS and run_name is None:
        raise ConfigError("nothing names the run to resume", "in --resume", "add --run-name NAME or give --resume PATH")


def refuse_changed(options: Any, names: Iterable[str], why: str, fix: str = "leave it out") -> None:
    """Raise ConfigError for the first of the fields `names` that is not its default, because it would be ignored."""
    defaults = {f.name: f.default for f in dataclasses.fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise ConfigError(why, f"in {option_of(name)}", fix)


def values_of(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each option of a dataclass and of the dataclasses inside it."""
    for name, value in vars(options).items():
        yield from values_of(value) if dataclasses.is_dataclass(value) else [(name, value)]


def did_you_mean(word: str, known: Iterable[object]) -> str:
    """Return `did you mean 'x'?` for the nearest of `known`, or the list of them if none is near."""
    names = [str(name) for name in known]
    near = nearest(word, names, 0.5)
    return f"did you mean {near!r}?" if near else "use one of: " + " ".join(names)


def nearest(word: str, names: Iterable[str], cutoff: float) -> str | None:
    """Return the name that is most like `word`, or None if none is like it by `cutoff`, from 0 (any) to 1 (the same)."""
    import difflib

    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=cutoff)), None)


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
    named = (word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("--"))
    named_options = {word.replace("-", "_") for word in named}
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
    for value in vars(options).values():
        if dataclasses.is_dataclass(value):
            yield from _unmet(value)
