"""The rule of the house: which room may import which, and what every module, class and docstring keeps to."""

import ast
import re
import tokenize
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A module imports its own room and those of earlier lines. Rooms of one line do not import each other.
ORDER = """
ops
common.errors common.state
common.process
common.settings
common.measure
common.engine common.model
common.recipe_config common.checkpoint common.data common.optim common.train
common.engines
results recipes
launchers
foresight lenet
tools benchmarks
"""
# Rooms that are run from the checkout. Only tests and they themselves import them.
OUTSIDE = ("benchmarks", "tools")
LEVEL = {room: level for level, line in enumerate(ORDER.strip().splitlines()) for room in line.split()}
COMMANDS = re.compile(r"gptscale\.(launchers|foresight)\.commands\.|.*\.__main__$")
# Comments for tools stand behind a line.
FOR_TOOLS = re.compile(r"# *(noqa|type:|fmt:)")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A file without such a line has no comment to complain of, and most have none: to read a file's tokens takes long.
SUSPECT = re.compile(r"(?m)^ *[^#\s].*#|# (Of|What) ")

PATHS = {path for room in {room.split(".")[0] for room in LEVEL} for path in (ROOT / room).rglob("*.py")}
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
FILES = {module if module.startswith(OUTSIDE) else f"gptscale.{module}": path for module, path in FILES.items()}
FILES = {module.removesuffix(".__init__"): path for module, path in FILES.items()}
# The trees of the package and of its tests.
ALL_TREES = {path: ast.parse(path.read_text()) for path in [*PATHS, *(ROOT / "tests").rglob("*.py")]}
TREES = {module: ALL_TREES[path] for module, path in FILES.items()}
DEFINED = [(path, node) for path, tree in ALL_TREES.items() for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]


def report(offences):
    """Fail with every offence, given as (module or its path, line, what)."""
    places = sorted((str(FILES.get(m, m).relative_to(ROOT)), line, what) for m, line, what in set(offences))
    if places:
        lines = [f"{path}:{line}: {what}" for path, line, what in places]
        pytest.fail("\n".join([f"{len(lines)} offences", *lines]), pytrace=False)


def imports(node, module):
    """Yield (line, imported module) for each import of the package, inside functions and under TYPE_CHECKING too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, name.name) for name in child.names if name.name in FILES)
        elif isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] in ("gptscale", *OUTSIDE):
            both = ((f"{child.module}.{name.name}", child.module) for name in child.names)
            yield from ((child.lineno, inner if inner in FILES else outer) for inner, outer in both)
        # The one exception: the lines that start a recipe by hand import the launchers, which are above it.
        elif room_of(module) != "recipes" or not ast.unparse(child).startswith("if __name__ == '__main__':"):
            yield from imports(child, module)


def room_of(module):
    """Return the room of a module, as ORDER names it."""
    parts = module.removeprefix("gptscale.").split(".")
    return ".".join(parts[:2]) if parts[:1] == ["common"] else parts[0]


IMPORTS = {module: list(imports(tree, module)) for module, tree in TREES.items()}
ALL_IMPORTS = [(module, line, other) for module, lines in IMPORTS.items() for line, other in lines]


def test_a_room_imports_only_rooms_below_it():
    """`common` alone, without a module behind it, stands for its empty `__init__`."""
    report((m, 1, f"{room_of(m)} has no place in ORDER") for m in FILES if room_of(m) not in {*LEVEL, "common"})
    levels = {module: LEVEL.get(room_of(module), 0) for module in FILES}
    apart = ((m, line, other) for m, line, other in ALL_IMPORTS if room_of(m) != room_of(other))
    report((m, line, f"imports {other}") for m, line, other in apart if levels[other] >= levels[m])


def test_no_imports_go_in_a_circle():
    graph = {module: {other for _, other in lines} - {module} for module, lines in IMPORTS.items()}
    offences = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return report(offences)
        except CycleError as error:
            first, second, *_ = circle = error.args[1][::-1]
            line = next(line for line, other in IMPORTS[first] if other == second)
            offences.append((first, line, "a circle: " + " -> ".join(circle)))
            # Look for the next circle.
            graph[first].remove(second)


def test_commands_are_imported_by_the_command_line_alone():
    others = [place for place in ALL_IMPORTS if place[0] != "gptscale.launchers.cli"]
    report((m, line, f"imports the command {other}") for m, line, other in others if COMMANDS.match(other))


def test_no_folder_holds_too_many_modules():
    folders = defaultdict(list)
    for module, path in FILES.items():
        if path.name != "__init__.py":
            folders[path.parent].append(module)
    # One for each strategy is the point of recipes/.
    heavy = [held for folder, held in folders.items() if len(held) > (24 if folder.name == "recipes" else 16)]
    report((min(held), 1, f"one of {len(held)} modules in its folder") for held in heavy)


def test_no_class_name_is_used_twice():
    places = defaultdict(list)
    for path, node in DEFINED:
        if isinstance(node, ast.ClassDef) and path in PATHS:
            places[node.name].append((path, node.lineno))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    report((*place, f"class {name}, one of {len(found)}") for name, found in twice.items() for place in found)


def test_docstrings_begin_with_one_plain_sentence():
    """Private functions and methods, and the tests, may lack one. Any that is there keeps to the form."""
    offences = []
    for path, node in DEFINED:
        tree, name = ALL_TREES[path], getattr(node, "name", "module")
        first, *_ = (ast.get_docstring(node) or "").splitlines() or [""]
        if not first:
            public = node is tree or (node in tree.body and not name.startswith("_"))
            if public and path in PATHS:
                offences.append((path, getattr(node, "lineno", 1), f"{name} has no docstring"))
        elif ";" in first or first[-1] not in ".:?" or len(first) > 120:
            what = "has a semicolon, no end on the line, or more than 120 columns"
            offences.append((path, node.body[0].lineno, f"the first line of {name} {what}"))
    report(offences)


def test_comments_stand_above_what_they_explain_and_begin_with_the_thing():
    """The tests keep to it too. A comment that begins with Of or What hides its subject."""
    offences = []
    for path in (path for path in ALL_TREES if SUSPECT.search(path.read_text())):
        with path.open("rb") as file:
            tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
        behind = (token for token in tokens if token.line[: token.start[1]].strip())
        offences += [(path, t.start[0], f"{t.string} is behind code") for t in behind if not FOR_TOOLS.match(t.string)]
        offences += [(path, t.start[0], t.string) for t in tokens if t.string.startswith(("# Of ", "# What "))]
    report(offences)


def test_names_of_tests_have_at_most_70_characters():
    names = [(path, node.lineno, node.name) for path, node in DEFINED if isinstance(node, ast.FunctionDef)]
    report((path, line, f"{name} has {len(name)}") for path, line, name in names if re.match(r"test_.{66}", name))
