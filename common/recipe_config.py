"""What a recipe's own options offer to those who plan and start a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from gptscale.common.errors import ConfigError
    from gptscale.common.settings.run import Run

# The letters of a formula of state.
LETTERS = {
    "N": "parameters", "n": "parameters of a rank before d cuts them", "d": "data ranks", "t": "tensor ranks",
    "c": "ranks of a sequence", "p": "pipeline ranks", "b": "bytes of a weight in computation", "h": "hidden size", "L": "blocks",
}  # fmt: skip


@dataclass(frozen=True)
class RecipeConfig:
    """Base of every recipe's own options, and the questions that the launcher asks of them.

    keeps_whole: a kind of weights (`cut` in common/settings/shape.py) that its tensor ranks keep whole, though others cut it.
    formula: `state_formula` where it is the same for all options.
    """

    keeps_whole: ClassVar[str] = ""
    formula: ClassVar[str] = "16 N"

    @property
    def offload(self) -> str:
        """Return what lives off the device, for the results: none, cpu or nvme."""
        return "none"

    def lacks(self) -> ConfigError | None:
        """Return what this machine lacks for these options, whatever the run is, or None if nothing."""
        return None

    def contents(self) -> dict[str, str]:
        """Return hashes of the files that these options name, by what they are. They must be the same on every rank."""
        return {}

    def state_formula(self, run: Run) -> str:
        """Return the bytes of state of one device under fp32 AdamW, as the recipe's docstring has them.

        LETTERS says what its letters are. A space multiplies. Empty for options without a formula.
        """
        return self.formula

    def own_work(self, run: Run) -> dict[str, Any]:
        """Return what this recipe trains otherwise than the run's options say, by the names of `workload`.

        If it has data of its own, `data` is their name, and its module has a function `batches`.
        """
        return {}

    def check(self, run: Run) -> None:
        """Raise ConfigError if these options cannot work in this run, in this world, with these folders."""

    def grad_accum_steps(self, sequences: int, pp_size: int) -> int | None:
        """Return into how many micro-batches to cut a data rank's `sequences`, or None to leave it to the arithmetic."""
        return None

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Return the options that make this recipe split its work differently on `nproc` processes, for parity to try."""
        return [()]

    def describe(self, run: Run) -> list[str]:
        """Return the lines in which --dry-run tells how this strategy splits the run."""
        return []
