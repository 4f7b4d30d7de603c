"""ZeRO by Colossal-AI: LowLevelZero cuts optimizer state and gradients, Gemini also moves weights, in chunks.

What is sharded        the batch; colossal_zero: fp32 weights and optimizer state (stage 1) and gradients (2), each parameter
                       flattened and cut evenly; colossal_gemini: those, and a fraction shard_param_frac of the weights that
                       are computed with, in chunks of some 32 Mi elements
What is communicated   per device, b bytes a weight in the compute type. colossal_zero: gradients reduced in buckets, stage 1
                       once a step 2 (d-1)/d x bN, stage 2 after each micro-batch (d-1)/d x bN, and new weights gathered,
                       (d-1)/d x bN; colossal_gemini, per micro-batch: chunks gathered for forward and backward, gradients
                       reduce-scattered, 3 (d-1)/d x bN
Memory per device      colossal_zero: b N + 12 N / d + b N, the last for gradients (stage 2: b N / d), + a bucket;
                       colossal_gemini: (b + 12 + b) N / d + the gathered chunks; offload_optim_frac of 12 N/d, and
                       offload_param_frac of bN/d, live on the host; + activations
Wins                   colossal_gemini: when state does not fit and part of it may be on the host, block by block as needed
Loses                  to fsdp and zero1 to zero3, which need no compiled optimizer (Gemini's HybridAdam is, at first use) and
                       accumulate in fp32; both need a GPU, Gemini bf16 too
Source                 Fang et al. 2023 (arXiv 2108.05818, PatrickStar); Rajbhandari et al. 2020 (arXiv 1910.02054);
                       colossalai.org, "Booster plugins"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import OptionNeed, check_range

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class ColossalZeroConfig(RecipeConfig):
    """Options of Colossal-AI's LowLevelZeroPlugin, in its own spelling."""

    stage: Literal[1, 2] = 1
    """1: optimizer state and fp32 weights; 2: gradients too."""
    overlap_communication: bool = True
    """Reduce gradients beside the backward that makes them."""

    def state_formula(self, run: Run) -> str:
        return f"b N + 12 N / d + b N{' / d' if self.stage == 2 else ''}"


@dataclass(frozen=True)
class ColossalGeminiConfig(RecipeConfig):
    """Options of Colossal-AI's GeminiPlugin with a static placement_policy, in its own spelling."""

    shard_param_frac: float = 1.0
    """Fraction of the weights that is cut: 1 as ZeRO 3, 0 as ZeRO 2."""
    offload_optim_frac: float = 0.0
    """Fraction of optimizer state and fp32 weights kept on the host."""
    offload_param_frac: float = 0.0
    """Fraction of the weights kept on the host; only beside an offload_optim_frac of 1."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(
            "offload_param_frac",
            lambda c: c.offload_optim_frac == 1,
            "the optimizer state is not on the host",
            "use --offload-optim-frac 1",
        ),
    )

    def __post_init__(self) -> None:
        for field, fraction in self.fractions.items():
            check_range(fraction, 0, 1, field)

    def state_formula(self, run: Run) -> str:
        return "(b + 12 + b) N / d" if self.shard_param_frac == 1 else ""

    @property
    def fractions(self) -> dict[str, float]:
        """Return the three fractions by the names that the plugin has for them."""
        return {name: getattr(self, name) for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac")}

    @property
    def offload(self) -> str:
        return "cpu" if self.offload_optim_frac or self.offload_param_frac else "none"

    def check(self, run: Run) -> None:
        """Raise ConfigError for a precision that Gemini does not compute in and for an optimizer that is not its own."""
        if run.config.precision == "fp32":
            raise ConfigError("Gemini computes in 16 bits only", "in --precision", "use bf16")
        if run.config.optimizer != "adamw":
            raise ConfigError("Gemini steps with its own AdamW only", "in --optimizer", "use adamw")


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, gemini: bool, **options: Any) -> tuple[Any, Any]:
    """Let Colossal-AI cut `model` and `optimizer`, by the plugin's own `options`, and return both."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin

    plugin = GeminiPlugin(**options) if gemini else LowLevelZeroPlugin(**options)
    boosted, boosted_optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    return boosted, boosted_optimizer


def build(run: Run, config: ColossalZeroConfig | ColossalGeminiConfig) -> TorchEngine:
    """Build the whole model on each device (Gemini: one parameter at a time, into its chunk) and a cut optimizer."""
    import torch
    import torch.distributed as dist

    from gptscale.common.engines.colossal import start as colossal_start

    # This comes before anything imports colossalai.
    colossal_start.start(run.world)
    from gptscale.common.engines.colossal.gpt2 import GPT2WithLoss
    from gptscale.common.engines.colossal.hybrid import BoostedModel
    from gptscale.common.engines.colossal.weights import named_parameters
    from gptscale.common.engines.colossal.zero import GeminiStepper, LowLevelZeroStepper, hybrid_adam
    from gptscale.common.engines.torch_engine import TorchEngine, holding_back
    from gptscale.common.optim.library import make_torch_optimizer

    clip, is_gemini = run.config.clip_grad_norm, isinstance(config, ColossalGeminiConfig)
    model, options = GPT2WithLoss(run, lazy=is_gemini), dict[str, Any](precision=run.config.precision)
    if isinstance(config, ColossalGeminiConfig):
        options |= {"enable_gradient_accumulation": True, **config.fractions}
        # 0.5.0 keeps a model of a single chunk whole, and then counts what it accumulates once for each rank.
        options["min_chunk_size_m"] = min(32.0, run.gpt.n_params_in_memory / 2**23)
        # Gemini computes norms only if it is to clip. No norm exceeds infinity.
        options["max_norm"] = clip or torch.inf
        unsharded = hybrid_adam(model, run.config)
    else:
        options |= {"communication_dtype": torch.float32, "max_norm": clip}
        options |= {"stage": config.stage, "overlap_communication": config.overlap_communication}
        unsharded = make_torch_optimizer(model, run.config)
    boosted, optimizer = shard(model, unsharded, is_gemini, **options)
    stepper = (GeminiStepper if is_gemini else LowLevelZeroStepper)(run, optimizer, named_parameters(model.hf, run.gpt))
    # Stage 1 holds gradients back while they accumulate. The others reduce them after every micro-batch.
    holds_back = isinstance(config, ColossalZeroConfig) and config.stage == 1
    return TorchEngine(
        run,
        BoostedModel(boosted),
        stepper,
        group=dist.group.WORLD,
        set_grad_sync=holding_back(optimizer.no_sync) if holds_back else lambda on: None,
        backward=optimizer.backward,
    )


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("colossal_zero")
