"""Values as the text of a program has them."""

from __future__ import annotations

from functools import partial
from typing import Any

# A dictionary that is longer stands in several lines.
WIDTH = 110


class Words(str):
    """Code of a program, which stands there without quotes."""


def as_python(value: Any, indent: int | None = None) -> str:
    """Return a value as a program spells it. indent: of a dictionary with a line for each item, None for one in a line."""
    if isinstance(value, dict):
        items = [f"{as_python(name)}: {as_python(each)}" for name, each in value.items()]
        if indent is None or not items:
            return f"{{{', '.join(items)}}}"
        space = " " * (indent + 4)
        for i, (name, each) in enumerate(value.items()):
            if isinstance(each, dict) and len(items[i]) > WIDTH:
                items[i] = f"{as_python(name)}: {as_python(each, indent + 4)}"
        return "".join(["{\n", *(f"{space}{item},\n" for item in items), " " * indent, "}"])
    if isinstance(value, str) and not isinstance(value, Words):
        return f'"{value}"'
    if isinstance(value, partial):
        return f"{value.func.__name__}({', '.join(f'{name}={each!r}' for name, each in value.keywords.items())})"
    if isinstance(value, list):
        return f"[{', '.join(map(as_python, value))}]"
    return f'float("{value}")' if value in (float("inf"), -float("inf")) else str(value)
