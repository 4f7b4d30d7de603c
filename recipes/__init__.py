"""The table of strategies: a name, the module that implements it, the engine it needs. Importing it loads no engine."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NamedTuple

from gptscale.common.config import did_you_mean
from gptscale.common.errors import ConfigError


class Recipe(NamedTuple):
    """One row: where a strategy lives and what it asks for.

    config: the name of its frozen dataclass in `module`. preset: fields of it that this row fixes.
    engine: distribution on the package index. axes: mesh axes it can split over, of dp, tp, pp; () is one process.
    needs_cuda: its engine refuses a CPU. what: one line for `gptscale list`.
    """

    module: str
    config: str
    what: str
    engine: str = "torch"
    axes: tuple[str, ...] = ("dp",)
    preset: dict[str, object] = {}  # noqa: RUF012  (a NamedTuple default; never written to)
    needs_cuda: bool = False

    def load(self) -> ModuleType:
        """Import the module, and with it the engine; ConfigError, with the pip line, if it is missing or broken."""
        where = "in this environment"
        try:
            version(self.engine)
        except PackageNotFoundError:
            raise ConfigError(
                f"{self.engine} is not installed", where, f"pip install 'gptscale[{self.engine}]'"
            ) from None
        try:
            return import_module(self.module)
        except Exception as error:  # whatever a broken installation raises when it is imported
            reason = f"{self.engine} is installed but does not import ({type(error).__name__}: {error})"
            raise ConfigError(reason, where, f"pip install --force-reinstall 'gptscale[{self.engine}]'") from error


RECIPES: dict[str, Recipe] = {
    "single": Recipe("gptscale.recipes.single", "SingleConfig", "one device, the reference for all others", axes=()),
    "ddp": Recipe("gptscale.recipes.ddp", "DDPConfig", "replicas; gradients all-reduced in buckets"),
    "fsdp": Recipe("gptscale.recipes.fsdp", "FSDPConfig", "weights, gradients, optimizer sharded (fully_shard); HSDP"),
    "fsdp_offload": Recipe(
        "gptscale.recipes.fsdp",
        "FSDPConfig",
        "fsdp with shards and optimizer kept in host memory",
        preset={"cpu_offload": True},
    ),
}


def get(name: str) -> Recipe:
    """The row of `name`; ConfigError with the nearest name if there is none."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}", "on the command line", did_you_mean(name, RECIPES))
    return RECIPES[name]
