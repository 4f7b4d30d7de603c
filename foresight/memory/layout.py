"""What follows from a run for every recipe: its place in the mesh, and what a rank has of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptscale.common.engines.rank_shapes import Place, all_shapes, held_shapes, numel, stage_of
from gptscale.foresight.memory.state import State
from gptscale.foresight.memory.step import RecipeBytes, Step

if TYPE_CHECKING:
    from gptscale.common.settings.run import Run

NO_STATE = State(0, 0, 0)


@dataclass(frozen=True)
class Layout:
    """What a rank has of the model, and what it holds all the time.

    n_params: its parameters before data ranks cut them. in_flight: micro-batches whose activations it keeps at once.
    kept_outside: tensors of the residual stream that it keeps beside its blocks, in units of one. buckets: of gradients, held
    from step to step. transfers: buffers for other stages. host: state in the host's memory, where the device has its own.
    """

    n_blocks: int
    n_params: int
    state: State = NO_STATE
    in_flight: float = 1.0
    kept_outside: float = 0.0
    has_head: bool = True
    has_table: bool = True
    buckets: float = 0.0
    transfers: float = 0.0
    host: float = 0.0


Answer = tuple[RecipeBytes, Layout]


@dataclass(frozen=True)
class Case:
    """A run and its recipe's options, and what follows from them for every layout."""

    run: Run
    config: Any
    step: Step
    place: Place
    casts_weights: bool

    @property
    def compute(self) -> int:
        return self.step.compute

    @property
    def root(self) -> int:
        """Return the parameters outside blocks."""
        return numel(held_shapes(self.run, self.config)[0].values())

    @property
    def on_host(self) -> bool:
        """Return whether what is offloaded is in another memory than the device's, which is what is predicted."""
        return self.step.device_type == "cuda" and self.config.offload != "none"

    @property
    def sends_copy(self) -> bool:
        """Return whether a reduce-scatter copies what it is given, as gloo does."""
        return self.step.device_type == "cpu"

    def layout(self, state: State, **more: Any) -> Layout:
        """Return the layout of a rank with this state."""
        outside, n_blocks = stage_of(self.run, self.config)
        n_params = numel(all_shapes(self.run, self.config))
        has = {"has_head": "ln_f" in outside, "has_table": "wte" in outside}
        return Layout(n_blocks, n_params, state, **{**has, **more})

    def lowered(self) -> RecipeBytes:
        """Return what autocast adds in 16 bits, and types of the residual stream."""
        c, n_blocks = self.compute, stage_of(self.run, self.config)[1]
        if c == 4:
            return RecipeBytes(0)
        if self.casts_weights:
            return RecipeBytes(0, residual=c, norm_input=c)
        return RecipeBytes(0, casts=c * self.step.block * n_blocks, working=2 * c * self.step.block)
