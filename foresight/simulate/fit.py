"""The largest number in a program's command, such as its micro-batch, with which a rank fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gptscale.common.errors import ConfigError

# A batch is no larger than this.
MOST = 2**20


def place_of(command: Sequence[str], name: str) -> tuple[int, str, int]:
    """Return which word of a command holds the number of an option, what stands before the number in it, and the number.

    name: `batch_size` means `--batch-size 8`, `--batch_size=8` and `batch_size=8`. Raises ConfigError if it is not there once.
    """
    words = [*command]
    spelled = re.escape(name.lstrip("-")).replace(r"\-", "_").replace("_", "[-_]")
    of_option = re.compile(rf"(--?)?{spelled}")
    found = [
        (i + 1, "", int(words[i + 1]))
        for i, word in enumerate(words[:-1])
        if of_option.fullmatch(word) and words[i + 1].isdecimal()
    ]
    for i, word in enumerate(words):
        before, equals, number = word.partition("=")
        if equals and of_option.fullmatch(before) and number.isdecimal():
            found.append((i, before + equals, int(number)))
    if len(found) != 1 or found[0][2] < 1:
        fix = f"write the command with --{name.lstrip('-')} 1 or another whole number"
        raise ConfigError(f"the command names {name} {len(found)} times with a number", "in --fit", fix)
    return found[0]


def most_that_fits(start: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number for which `fits` is true, 0 if there is none. It is asked for few numbers, `start` first."""
    low, high = 0, start
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high <= MOST and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
