"""Tensor parallelism: every matrix is cut over t devices, and between the matrices the sequence is cut.

What is sharded        matrices by output (colwise: qkv by heads, fc) or by input (rowwise: both proj), the token table by
                       vocabulary, the positions by rows; activations by heads or hidden units inside a layer and by sequence
                       between layers (norms, residuals, dropout). Norms and biases of rowwise matrices stay whole everywhere
What is communicated   per layer and micro-batch of B x T tokens, b bytes each: 4 all-gathers and 4 reduce-scatters (half of
                       them in backward), each (t-1)/t x B T h b bytes per device: 8 (t-1)/t B T h b; embedding and head
                       2 of either; the loss 12 bytes per token and block of rows instead of the logits' 4 V
Memory per device      16 N / t + 16 (6 L + 2) h (t - 1) / t bytes, for what stays whole of L layers of h; activations / t
Wins                   inside one node (NVLink), when a layer does not fit or a micro-batch of one is still too slow; it needs
                       no large batch. Usual: t = 8 and not more
Loses                  on slow links, because only async TP (--async-tp) hides these transfers; when t cuts matrices small
Source                 Shoeybi et al. 2019 (arXiv 1909.08053); sequence parallelism: Korthikanti et al. 2022 (2205.05198)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gptscale.common.recipe_config import RecipeConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run
    from gptscale.common.settings.shape import ModelConfig


@dataclass(frozen=True)
class TensorPlanConfig(RecipeConfig):
    """Base of the options of recipes that cut matrices."""

    tp_plan: Path | None = None
    """JSON file: how modules of your own model are cut, in transformers' words. Default: transformers' plan, or inferred."""

    def contents(self) -> dict[str, str]:
        content = self.tp_plan.read_bytes() if self.tp_plan else b""
        return {"the content of --tp-plan": hashlib.sha256(content).hexdigest()[:16]} if content else {}


@dataclass(frozen=True)
class TensorParallelConfig(TensorPlanConfig):
    """Options of the tensor-parallel recipe beside the number of ranks, which is --tp-size."""

    formula: ClassVar[str] = "16 N / t + 16 (6 L + 2) h (t - 1) / t"
    async_tp: bool = False
    """Overlap each product with its transfer (torch's symmetric memory; CUDA with NVLink, and --compile)."""

    def check(self, run: Run) -> None:
        from gptscale.common.engines.tensor_parallel import check_async_tp, check_tp

        check_tp(run, self.tp_plan)
        if self.async_tp:
            check_async_tp(run)


def shard(model: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> nn.Module:
    """Cut the modules that `plan` names over the 1-D `mesh`: on the meta device nothing is copied or sent."""
    from fnmatch import fnmatch

    from torch.distributed.tensor.parallel import parallelize_module

    if lost := [key for key in plan if not any(fnmatch(name, key) for name, _ in model.named_modules())]:
        raise ValueError(f"the plan names {lost[0]}, which is no module of the model")
    return parallelize_module(model, mesh, plan)


def plan_of(config: ModelConfig) -> dict[str, ParallelStyle]:
    """Return how each module of a model is cut, by its name, from what is cut of its matrix or norm."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    from gptscale.common.engines.tensor_parallel import GatherForProducts, VocabParallelEmbedding

    sequence_cut: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    styles: dict[str, ParallelStyle] = {
        "ids": VocabParallelEmbedding(),
        "positions": VocabParallelEmbedding(),
        "whole": SequenceParallel(),
        "heads": SequenceParallel(sequence_dim=2, use_local_output=True),
        "rows": ColwiseParallel(),
        "columns": RowwiseParallel(output_layouts=Shard(1)),
    }
    first, block, last = config.weights()
    plan = {weight.module: styles[weight.cut] for weight in (*first, *last)}
    for weight in block:
        if weight.cut == "rows":
            # The sequence is gathered once, for all matrices of attention or of the MLP.
            plan[f"blocks.*.{weight.module.partition('.')[0]}"] = GatherForProducts(**sequence_cut)
        if weight.name.endswith(".weight"):
            plan[f"blocks.*.{weight.module}"] = styles[weight.cut]
    return plan


def apply_tp(model: nn.Module, gpt: ModelConfig, mesh: DeviceMesh, tp_plan: Path | None = None) -> None:
    """Cut the model by its plan, and give it a loss that never sees a whole row of logits."""
    from gptscale.common.engines.tensor_parallel import VocabParallelCrossEntropy, styles_of
    from gptscale.common.model.tensor_plan import tensor_plan
    from gptscale.common.settings.own_config import OwnConfig

    if isinstance(gpt, OwnConfig):
        shard(model, styles_of(model, tensor_plan(gpt, mesh.size(), tp_plan)), mesh)
        return
    # A stage of a pipeline has some of them, and the last may have no block.
    own = {name.split(".")[0] for name, _ in model.named_parameters()}
    plan = {name: style for name, style in plan_of(gpt).items() if name.split(".")[0] in own}
    shard(model, plan, mesh)
    if getattr(model, "loss", None) is not None:
        model.loss = VocabParallelCrossEntropy(gpt.vocab_size, mesh)


def build(run: Run, config: TensorParallelConfig) -> TorchEngine:
    """Cut the model on the meta device, then fill this rank's shards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gptscale.common.engines.tensor_parallel import enable_async_tp
    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.model.build import materialise, meta_gpt
    from gptscale.common.optim.fused import FusedOptimizer

    mesh = init_device_mesh(run.world.device.type, (run.world.world_size,), mesh_dim_names=("tp",))
    if config.async_tp:
        enable_async_tp(mesh)
    model = meta_gpt(run)
    apply_tp(model, run.gpt, mesh, config.tp_plan)
    materialise(model, run, run.world.device)
    optimizer = FusedOptimizer(dict(model.named_parameters()), run.config, shards=dist.group.WORLD)
    return TorchEngine(run, model, optimizer)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("tensor_parallel")
