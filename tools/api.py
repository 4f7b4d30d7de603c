"""Write the page of public names from their docstrings: `python -m tools.api`.

A public name is one that `PUBLIC` lists, or `shard`, `build` and the options of a recipe. Sources are read and not imported, so
that no engine must be there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
# Title of a part, and the names of each of its modules.
PUBLIC = {
    "The seam and the loop": {
        "common.engine": "Engine Batch StepResult",
        "common.train": "train",
        "common.data.loader": "to_device",
        "common.engines.torch_engine": "TorchEngine",
    },
    "A run and its world": {
        "common.settings.run_config": "RunConfig",
        "common.settings.run": "Run",
        "common.settings.batch_plan": "plan_batch BatchPlan",
        "common.settings.gpt_config": "GPTConfig",
        "common.process.world": "World process_group",
        "common.recipe_config": "RecipeConfig",
        "recipes": "get",
    },
    "Operators": {
        "ops.gelu": "gelu bias_gelu",
        "ops.conv": "conv_bias_relu conv_bias_relu_forward conv_bias_relu_backward",
        "ops.max_pool": "max_pool2d max_pool2d_with_offsets max_pool2d_backward",
    },
    "Errors": {
        "common.errors": "GptscaleError ConfigError DataError CheckpointError StorageError NumericError PeerError"
    },
}
HEAD = """# Public names

What another project may import. A name on this page keeps its place and its arguments in all releases of one minor version, and
[CHANGELOG](../CHANGELOG.md) says when one changes. All other names may move at any time. [Reuse](guides/reuse.md) has examples.

`python -m tools.api` writes this page from the docstrings, and a test compares the two.
"""


def page(root: Path = ROOT) -> str:
    """Return the page. Raises KeyError for a name that its module does not define."""
    text = HEAD
    for title, modules in PUBLIC.items():
        text += f"\n## {title}\n"
        for module, names in modules.items():
            nodes = definitions(root, module)
            text += f"\n`from gptscale.{module} import {', '.join(names.split())}`\n\n"
            text += "".join(f"* `{name}{arguments(nodes[name])}`: {sentence(nodes[name])}\n" for name in names.split())
    text += "\n## Recipes\n\n`shard` splits your model; `build` gives an `Engine`; the class has the strategy's own options.\n\n"
    return text + "| from | import | what it is |\n| --- | --- | --- |\n" + "".join(recipes(root))


def recipes(root: Path) -> Iterator[str]:
    """Yield a row for each module of a recipe, which has `build`, its options, and `shard` where there is something to split."""
    for path in sorted((root / "recipes").glob("*.py")):
        nodes = definitions(root, f"recipes.{path.stem}")
        if "build" in nodes:
            options = [
                name for name, node in nodes.items() if isinstance(node, ast.ClassDef) and name.endswith("Config")
            ]
            names = ", ".join(f"`{name}`" for name in [*options, *(n for n in ("shard", "build") if n in nodes)])
            yield f"| `gptscale.recipes.{path.stem}` | {names} | {sentence(ast.parse(path.read_text()))} |\n"


def definitions(root: Path, module: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Return the functions and classes at the top of a module by their names."""
    path = root.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def arguments(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the arguments of a function as it is called, without their types, and nothing for a class."""
    if isinstance(node, ast.ClassDef):
        return ""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(node.args)})"


def sentence(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Return the first line of a docstring."""
    return (ast.get_docstring(node) or "").splitlines()[0]


if __name__ == "__main__":
    PAGE.write_text(page())
