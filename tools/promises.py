"""Write the tables of the fault page from the tests that hold its promises: `python -m tools.promises`.

A test holds a promise by its marker: `promise("P1 | fault | what happens")`. The marker of another test that holds it too has
its number alone, or several: `promise("P1 P2")`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "faults.md"
# Each table stands between two comments, of which the first has the letter of its numbers.
TABLE = re.compile(r"(<!-- promises (\w) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def held(tests: Path) -> Iterator[tuple[str, str]]:
    """Yield the text of each marker `promise` and the test that has it."""
    for path in sorted(tests.rglob("test_*.py")):
        for function in ast.parse(path.read_text()).body:
            for marker in getattr(function, "decorator_list", []):
                if isinstance(marker, ast.Call) and ast.unparse(marker.func) == "pytest.mark.promise":
                    name = getattr(function, "name", "")
                    yield ast.literal_eval(marker.args[0]), f"`{path.relative_to(tests)}::{name}`"


def rows(tests: Path) -> dict[str, str]:
    """Return the row of each promise by its number. Raises ValueError if a number has two texts or none."""
    texts: dict[str, str] = {}
    holders: dict[str, list[str]] = {}
    for text, test in held(tests):
        for number in text.partition(" | ")[0].split():
            # The test that has the text comes first.
            holders.setdefault(number, []).insert(0 if "|" in text else len(holders[number]), test)
            if "|" in text and texts.setdefault(number, text) != text:
                raise ValueError(f"two tests tell what {number} is: {', '.join(holders[number])}")
    if homeless := sorted(holders.keys() - texts.keys()):
        raise ValueError(f"no test tells what {', '.join(homeless)} is")
    numbers = sorted(texts, key=lambda number: (number[0], int(number[1:])))
    return {number: f"| {texts[number]} | {', '.join(holders[number])} |\n" for number in numbers}


def page(text: str, tests: Path = ROOT / "tests") -> str:
    """Return the page's text with its tables as the tests have them."""
    all_rows = rows(tests)

    def table(match: re.Match[str]) -> str:
        head = "| | fault | what happens | held by |\n| --- | --- | --- | --- |\n"
        return match[1] + head + "".join(row for number, row in all_rows.items() if number[0] == match[2])

    return TABLE.sub(table, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
