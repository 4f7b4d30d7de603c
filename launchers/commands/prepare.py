"""`gptscale prepare`: compile the package's operators and what recipes need, once, before any run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.errors import ConfigError, StorageError
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.launchers.run.options import default_recipe_config
from gptscale.ops.build import kernels
from gptscale.ops.build.cache import BuildError, CacheFolderError
from gptscale.recipes import RECIPES
from gptscale.results.render import console

if TYPE_CHECKING:
    from rich.console import Console

# The lab whose mock is compiled too. It is found by its name, because nothing here depends on it.
LAB = "gptscale.foresight.simulate.interpreters"


@dataclass(frozen=True)
class PrepareOptions:
    """What to compile."""

    recipes: str = ""
    """Only what these need: names with commas between, or all. By default all, and the package's own operators."""


def main(argv: Sequence[str]) -> int:
    """Compile those operators of DeepSpeed's that the recipes need, and without --recipes our own and the mock of CUDA too.

    Unless recipes are named, what cannot be compiled is left out with a message.
    """
    options = parse(PrepareOptions, argv, prog="gptscale prepare", about="Compile what recipes need, before any run.")
    named = options.recipes not in ("", "all")
    names = parse_names(options.recipes, RECIPES, "recipe", "--recipes") if named else list(RECIPES)
    terminal = console(stderr=True)
    if not options.recipes:
        _prepare_own(terminal)
    recipe_of_op: dict[str, str] = {}
    for name in names:
        try:
            config = default_recipe_config(name)
        except ConfigError as error:
            if named:
                raise
            print(f"leaving out {name}: {error}")
            continue
        for op in getattr(config, "ops", ()):
            recipe_of_op.setdefault(op, name)
    # A compile takes one core, and some machines have two.
    with ThreadPoolExecutor(max_workers=2) as pool, terminal.status("DeepSpeed's operators"):
        builds = {op: pool.submit(deepspeed_ops.prepare, op, print) for op in recipe_of_op}
    for op, name in recipe_of_op.items():
        try:
            print(f"{op} {'compiled' if builds[op].result() else 'is there'}, for {name}", flush=True)
        except ConfigError as error:
            if named:
                raise
            print(f"leaving out {op}: {error}")
    if recipe_of_op:
        print(f"DeepSpeed's operators are in {deepspeed_ops.ops_path()}")
    return 0


def _prepare_own(terminal: Console) -> None:
    """Compile the package's C++ operators and its mock of CUDA, which no recipe needs unless its options ask for them."""
    try:
        with terminal.status("the C++ operators"):
            built = kernels.prepare(print)
        print(f"C++ operators {'compiled' if built else 'are there'}", flush=True)
    except CacheFolderError as error:
        raise StorageError(*error.args) from None
    except BuildError as error:
        print(f"leaving out the C++ operators, which will run in Python: {error}")
    try:
        mock = import_module(LAB).prepare_mock("")
        print(f"the mock of CUDA is there, for gptscale simulate: {mock.parent}")
    except ConfigError as error:
        print(f"leaving out the mock of CUDA: {error}")
