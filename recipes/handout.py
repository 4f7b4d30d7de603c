"""The baseline of the university exercise: transformers' GPT-2 on its own random ids, trained in the plainest way.

What is sharded        nothing; with several processes the batch, by the exercise's DistributedSampler, under DDP
What is communicated   nothing; with several processes gradients, as `ddp`
Memory per device      16 N bytes + activations, the logits of a whole micro-batch in fp32 and a copy of them for the shift
Wins                   as the measure: what a student begins with, so that a speed-up says something
Loses                  to `single` in speed and memory: no fused loss or optimizer, a mask and a cache that training does not need
Source                 the exercise (docs/lenet/README.md); Wolf et al. 2020 (arXiv 1910.03771) for transformers

It differs             in its work, and is kept out of parity for that: dropout is 0.1, transformers' default; the loss shifts
                       inside a sequence, so that the last token is no target; its 256 sequences of random ids come again each
                       epoch. With --same-work it has the tokens, targets and dropout of the run, and computes what all others do
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import OptionNeed, check_ranges, refuse_changed

if TYPE_CHECKING:
    from torch import Tensor

    from gptscale.common.data.exercise_loader import ExerciseBatches
    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run

# GPT2Config's default.
DROPOUT = 0.1
# Options of the run that the exercise has an answer of its own to.
OWN = ("tokenizer", "dropout", "eval_every", "sample", "allow_data_change")


@dataclass(frozen=True)
class HandoutConfig(RecipeConfig):
    """Options of the exercise's data loader, and what makes its work that of the other recipes."""

    data_size: int = 256
    """Sequences of random ids, which come again each epoch."""
    workers: int = 8
    """Processes of each rank that the DataLoader reads with."""
    same_work: bool = False
    """Train on the run's --data with its targets and --dropout, so that compare ranks it beside the other recipes."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(
            "data_size,workers", lambda c: not c.same_work, "the run's own --data is read", "leave out --same-work"
        ),
    )

    def __post_init__(self) -> None:
        check_ranges(self, {"data_size": (1, 10**7), "workers": (0, 256)})

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Return the way that does the others' work."""
        return [("--same-work",)]

    def check(self, run: Run) -> None:
        """Raise ConfigError for an option that the exercise's own data and dropout would ignore."""
        if self.same_work:
            return
        why, fix = "the exercise has its own random ids and its own dropout", "leave it out, or add --same-work"
        if run.config.data not in ("stdlib", "synthetic"):
            raise ConfigError(why, "in --data", fix)
        refuse_changed(run.config, OWN, why, fix)

    def own_work(self, run: Run) -> dict[str, Any]:
        if self.same_work:
            return {}
        data = {"data": "exercise", "data_fingerprint": f"{self.data_size} sequences"}
        return {"dropout": DROPOUT, "loss": "shifted inside the sequence", **data}

    def describe(self, run: Run) -> list[str]:
        """Return the line with the exercise's two formulas."""
        from gptscale.common.measure.flops import handout_flops_per_token, handout_n_params

        size, gflop = handout_n_params(run.gpt), handout_flops_per_token(run.gpt) / 1e9
        return [f"exercise get_model_size {size:,}, and get_tflops {gflop:.4f} GFLOP per token, 8 for each of them"]


def batches(run: Run, config: HandoutConfig, data_rank: int, data_size: int) -> ExerciseBatches:
    """Return the batches of the exercise's data loader, for a run that does its own work."""
    from gptscale.common.data.exercise_loader import ExerciseBatches

    return ExerciseBatches(run, config.data_size, config.workers, data_rank, data_size)


def handout_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the exercise's loss, the mean over (batch, seq - 1) targets of `ids` (batch, seq).

    A mask of ones, the cache unless blocks are recomputed, and copies of whole logits and ids, shifted by one.
    """
    import torch
    from torch.nn import functional

    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=model.config.use_cache)[0]
    shifted, labels = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
    return functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def build(run: Run, config: HandoutConfig) -> TorchEngine:
    """Build transformers' model with the run's initial weights, plain AdamW, and DDP over several processes."""
    import torch.distributed as dist

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.engines.transformers_gpt2 import HandoutModel, PlainOptimizer
    from gptscale.recipes import ddp

    gpt = run.gpt if config.same_work else replace(run.gpt, dropout=DROPOUT)
    model = HandoutModel(gpt, run, None if config.same_work else handout_loss).to(run.world.device)
    stepper = PlainOptimizer(model, run)
    if run.world.world_size == 1:
        return TorchEngine(run, model, stepper)
    replica = ddp.shard(model)
    sync = partial(setattr, replica, "require_backward_grad_sync")
    return TorchEngine(run, replica, stepper, group=dist.group.WORLD, set_grad_sync=sync)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("handout")
