"""One device, nothing split: the reference that every other recipe must agree with.

What is sharded        nothing
What is communicated   nothing
Memory per device      16 N bytes for N parameters (fp32 weights 4, gradients 4, AdamW state 8) + activations
Wins                   while the model, its state and one micro-batch fit: no strategy beats having no communication
Loses                  when they do not fit (1.6b: 23.2 GiB of state before the first activation), or one device is too slow
Source                 Kingma & Ba 2015 (arXiv 1412.6980) for Adam; everything else is plain PyTorch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptscale.common.recipe_config import RecipeConfig

if TYPE_CHECKING:
    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class SingleConfig(RecipeConfig):
    """One device has no options of its own."""


def build(run: Run, config: SingleConfig) -> TorchEngine:
    """Build the model as it is, on this process's device."""
    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.model.build import materialise, meta_gpt
    from gptscale.common.optim.fused import FusedOptimizer

    model = materialise(meta_gpt(run), run, run.world.device)
    return TorchEngine(run, model, FusedOptimizer(dict(model.named_parameters()), run.config))


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("single")
