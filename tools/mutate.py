"""Plant bugs into copies of the package, one at a time, and name those that no fast test finds: `make mutate`.

The bugs are cosmic-ray's. The tests are those of the module's own room that start no world, and run in a process that is forked
from one which has PyTorch already. The seed fixes the order of the bugs, and the time how many are planted.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import difflib
import importlib
import multiprocessing
import os
import py_compile
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutate"
# The tests of each room, or of a module of its own, that must find its bugs.
TESTS = {
    "common/checkpoint": ["tests/common/checkpoint"],
    "common/train.py": ["tests/common/test_train.py"],
    "common/engines": ["tests/common/engines", "tests/recipes", "tests/foresight/memory/test_formula.py"],
    "common/data": ["tests/common/data"],
    "common/optim": ["tests/common/optim"],
    "results/comparison": ["tests/results/comparison"],
}
WORKERS = 2
FORK = multiprocessing.get_context("fork")
LIBRARIES = "torch torch.distributed numpy pandas matplotlib.pyplot hypothesis pytest safetensors.torch".split()
FAST = "not world and not slow and not gpu and not cluster"


class BugPlace(NamedTuple):
    """A place of a module that can be changed: its room, its path, and one of cosmic-ray's operators with its occurrence."""

    room: str
    path: str
    operator: str
    occurrence: int


def places(room: str, random: Random) -> Iterator[BugPlace]:
    """Yield each place of a room that can be changed, with one of the operators that can change it."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    # Nearly all unions are of types, which a run does not evaluate.
    names = [
        name for name in operator_names() if "BinaryOperator_BitOr" not in name and not get_operator(name).arguments()
    ]
    for path in sorted((ROOT / room).rglob("*.py")) or [ROOT / room]:
        nodes = list(ast_nodes(get_ast(path.read_text())))
        choices = defaultdict(list)
        for name in names:
            found = (where for node in nodes for where in get_operator(name)().mutation_positions(node))
            for occurrence, where in enumerate(found):
                choices[where].append(BugPlace(room, str(path.relative_to(ROOT)), name, occurrence))
        yield from (random.choice(choices[where]) for where in sorted(choices))


def changed(text: str, place: BugPlace) -> str | None:
    """Return a module's text with the bug in it, None if it is no program or the same one."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    code = str(mutate_code(text, get_operator(place.operator)(), place.occurrence))
    with contextlib.suppress(SyntaxError):
        if ast.dump(ast.parse(code)) != ast.dump(ast.parse(text)):
            return code
    return None


def copy_checkout(folder: Path) -> None:
    """Copy the checkout, with a folder `gptscale` that has the rooms, compiled so that a change is seen by its content."""
    shutil.rmtree(folder, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "build", "demo", "runs")
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    (folder / "gptscale").mkdir()
    for room in "common foresight launchers lenet ops recipes results".split():
        (folder / "gptscale" / room).symlink_to(folder / room)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder, quiet=2, invalidation_mode=by_content)


def run_tests(copy: Path, room: str) -> None:
    """End this process, a fork, with the status of a room's fast tests in a copy."""
    os.setsid()
    os.chdir(copy)
    output = os.open("tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    del sys.modules["tools"]
    sys.exit(sys.modules["pytest"].main(["-q", "-x", "-p", "no:cacheprovider", "-m", FAST, *TESTS[room]]))


def is_found(copy: Path, room: str, limit_s: float) -> bool:
    """Return whether a room's tests fail in a copy, or take longer than the limit."""
    tests = FORK.Process(target=run_tests, args=(copy, room))
    tests.start()
    tests.join(limit_s)
    # Processes of the tests end with them.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(tests.pid or 0, signal.SIGKILL)
    tests.join()
    return tests.exitcode != 0


def plant(worker: int, planned: Sequence[BugPlace], deadline: float, results: Any) -> None:
    """Plant a bug at every place in turn into this worker's copy until the time is over, and tell what came of it."""
    copy, limits = BUILD / f"copy-{worker}", {}
    copy_checkout(copy)
    for place in planned[worker::WORKERS]:
        if time.monotonic() > deadline:
            break
        if place.room not in limits:
            began = time.monotonic()
            if is_found(copy, place.room, 600.0):
                raise RuntimeError(f"the tests of {place.room} fail without any bug: see {copy}/tests.log")
            limits[place.room] = 30.0 + 4.0 * (time.monotonic() - began)
        text = (copy / place.path).read_text()
        if code := changed(text, place):
            (copy / place.path).write_text(code)
            diff = difflib.unified_diff(text.splitlines(), code.splitlines(), n=0, lineterm="")
            results.put((place, "\n    ".join(list(diff)[2:]), is_found(copy, place.room, limits[place.room])))
            (copy / place.path).write_text(text)
    results.put(None)


def main() -> None:
    """Plant bugs until the time is over, and print those that survived and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=28.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--rooms", nargs="+", default=list(TESTS), choices=list(TESTS))
    options = parser.parse_args()
    deadline = time.monotonic() + 60.0 * options.minutes
    # At the end, because these packages are of the tool alone.
    sys.path.append(str(BUILD / "site"))
    for name in LIBRARIES:
        importlib.import_module(name)
    random = Random(options.seed)
    planned = [place for room in options.rooms for place in places(room, random)]
    random.shuffle(planned)
    results: Any = FORK.Queue()
    for worker in range(WORKERS):
        FORK.Process(target=plant, args=(worker, planned, deadline, results)).start()
    score: dict[str, list[bool]] = {room: [] for room in options.rooms}
    for _ in range(WORKERS):
        for place, diff, found in iter(results.get, None):
            score[place.room].append(found)
            if not found:
                print(f"SURVIVED {place.path}\n    {diff}", flush=True)
    for room, each in (*score.items(), ("all", list(chain(*score.values())))):
        print(f"{room}: {sum(each)} of {len(each)} found", f"({sum(each) / len(each):.1%})" if each else "")
    print(f"of {len(planned)} places that can be changed, seed {options.seed}")


if __name__ == "__main__":
    main()
