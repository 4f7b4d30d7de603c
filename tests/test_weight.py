"""The weight of the house: how many of our lines a rank loads, and how many each part of the house has.

A limit falls. Whoever adds lines above it takes others out; docs/measurements/LOG.md tells where that was not so.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ("common", "launchers", "ops", "recipes", "results")
LABS = ("foresight", "lenet")
FOLDERS = {
    "core": (CORE, 24_700),
    "foresight": (("foresight",), 11_323),
    "lenet": (("lenet",), 6_264),
    "the package": ((*CORE, *LABS), 42_287),
    "the tests": (("tests",), 25_328),
}
GPT2 = ("common/settings/gpt_config.py", "common/model/gpt.py")
LOADED = {
    "a rank": (["launchers/run/worker.py", *GPT2], 9_849),
    "`gptscale run` until its options are parsed": (["launchers/cli.py", "launchers/commands/run.py", GPT2[0]], 2_457),
    **{f"recipes/{path.name}": ([f"recipes/{path.name}"], 1_000) for path in (ROOT / "recipes").glob("[!_u]*.py")},
}


def lines_of(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def imports(node):
    """Yield the names that importing a module imports: not those inside functions, nor those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}{tail}" for tail in ("", *(f".{name.name}" for name in child.names)))
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            yield from (name for other in child.orelse for name in imports(other))
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(child)


def loaded(starts):
    """Return the files of all modules that importing `starts` loads."""
    found, waiting = set(), [ROOT / start for start in starts]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            ours = (n.split(".")[1:] for n in imports(ast.parse(path.read_text())) if n.startswith("gptscale."))
            files = (
                file
                for parts in ours
                for file in (ROOT.joinpath(*parts, "__init__.py"), ROOT.joinpath(*parts).with_suffix(".py"))
            )
            waiting += [file for file in files if file.is_file()]
    return found


@pytest.mark.parametrize("part", FOLDERS)
def test_a_part_of_the_house_is_not_heavier_than_its_limit(part):
    folders, most = FOLDERS[part]
    assert lines_of(path for folder in folders for path in (ROOT / folder).rglob("*.py")) <= most


@pytest.mark.parametrize("what", LOADED)
def test_importing_loads_at_most_so_many_lines_of_ours(what):
    starts, most = LOADED[what]
    files = loaded(starts)
    assert lines_of(files) <= most, "\n".join(sorted(str(path.relative_to(ROOT)) for path in files))
