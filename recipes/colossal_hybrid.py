"""Tensor, pipeline and data parallelism by Colossal-AI: one plugin cuts transformers' GPT2LMHeadModel in all three ways.

What is sharded        colossal_tensor: the matrices of each block by heads and by hidden units, the token table and the logits by
                       vocabulary, over t tensor ranks; colossal_pipeline: the blocks over p stages too. The d data ranks, which
                       are what remains of the world, split the batch
What is communicated   per block and micro-batch of b tokens, a bytes an activation: 4 all-reduces of b x h x a bytes over
                       tensor ranks (2 forward, 2 backward); per stage border b x h x a forward and backward; per optimizer
                       step gradients all-reduced over data ranks, and the tied table's between first and last stage
Memory per device      16 n bytes, n = N / (t p) with norms and projections' biases whole on tensor ranks, the table on both
                       ends of a pipeline; bf16: 2 + 12 + 2 (+ 4 at the step); + activations, logits of one micro-batch / t
Wins                   where a code base is on transformers' classes: no line of the model changes
Loses                  to this package's own cuts in what they overlap; attention is not flash unless torch's is; its own
                       gradient norm is wrong under tensor parallelism, and its dropout lets replicas drift (mended here)
Source                 Li et al. 2023 (arXiv 2110.14883); Shoeybi et al. 2019 (arXiv 1909.08053); Narayanan et al. 2021
                       (arXiv 2104.04473); colossalai.org, "Booster plugins"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gptscale.common.engines.colossal.checks import check_pipeline, check_tensor, default_micro_batches
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import OptionNeed, check_range

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gptscale.common.engines.colossal.hybrid import ColossalPipelineEngine, ColossalTensorEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class ColossalTensorConfig(RecipeConfig):
    """Options of Colossal-AI's HybridParallelPlugin, in its own spelling."""

    formula: ClassVar[str] = "16 n"
    keeps_whole: ClassVar[str] = "positions"
    ddp_bucket_cap_mb: int = 25
    """MB of gradients that data ranks reduce at once; under pipeline parallelism Colossal-AI reduces each by itself."""

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Return tensor ranks alone, and tensor ranks with data ranks."""
        return [(), ("--tp-size", "2")] if nproc > 2 and nproc % 2 == 0 else [()]

    def check(self, run: Run) -> None:
        check_tensor(run)


@dataclass(frozen=True)
class ColossalPipelineConfig(ColossalTensorConfig):
    """Options of HybridParallelPlugin for a pipeline, in its own spelling except for the schedule (its pp_style)."""

    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order of forwards and backwards."""
    num_model_chunks: int = 2
    """Runs of blocks on each stage under the interleaved schedule."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(
            "num_model_chunks", lambda c: c.schedule != "1f1b", "1f1b has one chunk", "use --schedule interleaved"
        ),
    )

    def __post_init__(self) -> None:
        check_range(self.num_model_chunks, 2, 64, "num_model_chunks", fix="use 2 to 64, or --schedule 1f1b")

    @property
    def chunks(self) -> int:
        return self.num_model_chunks if self.schedule == "interleaved" else 1

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Return both schedules, and a pipeline with tensor ranks."""
        both: list[tuple[str, ...]] = [("--schedule", "1f1b"), ("--schedule", "interleaved")]
        return [*both, ("--tp-size", "2")] if nproc > 2 and nproc % 2 == 0 else both

    def grad_accum_steps(self, sequences: int, pp_size: int) -> int | None:
        return default_micro_batches(self.schedule, pp_size, sequences)

    def check(self, run: Run) -> None:
        check_tensor(run)
        check_pipeline(run, self.schedule, self.chunks)


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: Any, *, tp_size: int, pp_size: int, **options: Any
) -> tuple[Any, Any, Any]:
    """Cut `model` by `policy` (None is Colossal-AI's own) and return the plugin, the model and the optimizer.

    options: HybridParallelPlugin's own.
    """
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    plugin = HybridParallelPlugin(tp_size=tp_size, pp_size=pp_size, custom_policy=policy, **options)
    boosted, boosted_optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    return plugin, boosted, boosted_optimizer


def build(run: Run, config: ColossalTensorConfig) -> ColossalTensorEngine | ColossalPipelineEngine:
    """Build a model without memory, which Colossal-AI then fills and cuts module by module, each on its stage."""
    from gptscale.common.engines.colossal import start as colossal_start

    # This comes before anything imports colossalai.
    colossal_start.start(run.world)
    from gptscale.common.engines.colossal.gpt2 import lazy_gpt2, policy
    from gptscale.common.engines.colossal.hybrid import ColossalPipelineEngine, ColossalTensorEngine
    from gptscale.common.optim.library import make_torch_optimizer

    tp_size, pp_size = run.tp_size, run.pp_size
    model = lazy_gpt2(run)
    options: dict[str, Any] = {"precision": run.config.precision, "ddp_bucket_cap_mb": config.ddp_bucket_cap_mb}
    if pp_size > 1 and isinstance(config, ColossalPipelineConfig):
        options |= {"pp_style": config.schedule, "num_model_chunks": config.chunks}
        options |= {"num_microbatches": run.batch.grad_accum_steps}
        # With overlap, Colossal-AI drops the handle of a stage's last send, and gloo cancels a send that has not begun.
        options |= {"overlap_p2p": run.world.device.type == "cuda"}
    plugin, boosted, optimizer = shard(
        model,
        make_torch_optimizer(model, run.config),
        policy(run.gpt),
        tp_size=tp_size,
        pp_size=pp_size,
        # The table is padded already.
        make_vocab_size_divisible_by=1,
        **options,
    )
    return (ColossalPipelineEngine if pp_size > 1 else ColossalTensorEngine)(run, plugin, boosted, optimizer)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("colossal_tensor")
