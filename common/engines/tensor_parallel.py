"""Tensor parallelism beyond torch's own styles: the embedding table, the loss of the head, checks, async TP.

The vocabulary is cut over the ranks, so no rank ever holds a complete row of logits. The loss follows Shoeybi et al. 2019,
arXiv 1909.08053, section 3. The ranks exchange three numbers per row: its largest logit, its sum of exponentials, and the
logit of its target. Gathering the logits would exchange the whole vocabulary instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput

from gptscale.common.errors import ConfigError
from gptscale.common.model.loss import IGNORE, linear_cross_entropy
from gptscale.common.model.tensor_plan import STYLES, tensor_plan
from gptscale.common.settings.own_config import OwnConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import CUT_DIMS


class GatherForProducts(PrepareModuleInput):
    """Gather the whole sequence for a module, in the type of its products: half of the bytes that a norm in fp32 has."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Before torch's own hook, which gathers.
        module.register_forward_pre_hook(self._cast)
        return super()._apply(module, device_mesh)

    def _cast(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, kind = inputs[0], inputs[0].device.type
        return (x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x, *inputs[1:])


class VocabParallelEmbedding(ParallelStyle):
    """The style of a table whose rows are cut over the ranks, such as an embedding, or a head whose loss is cut alike.

    Each rank looks up the ids whose rows it has. The results are summed, and each rank keeps its shard of the sequence (is_whole:
    all of it).
    torch's RowwiseParallel has the same forward, but its backward (torch 2.11) makes the gradient of the whole table on
    every rank.
    """

    def __init__(self, is_whole: bool = False) -> None:
        super().__init__()
        self.is_whole = is_whole

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding | nn.Linear)
        rows = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(rows))
        module.forward = partial(self._look_up, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _look_up(self, module: nn.Module, mesh: DeviceMesh, ids: Tensor) -> Tensor:
        assert isinstance(module.weight, DTensor)
        table = module.weight.to_local()
        row = ids - mesh.get_local_rank() * table.shape[0]
        is_here = (row >= 0) & (row < table.shape[0])
        embedded = F.embedding(row.clamp(0, table.shape[0] - 1), table) * is_here.unsqueeze(-1)
        summed = DTensor.from_local(embedded, mesh, [Partial()], run_check=False)
        of_rank = Replicate() if self.is_whole else Shard(ids.ndim - 1)
        return summed.redistribute(placements=[of_rank]).to_local()


class VocabParallelCrossEntropy(nn.Module):
    """The head's loss when the table and the activations are DTensors on the tensor-parallel `mesh`.

    It takes the place of `LinearCrossEntropy`.
    """

    def __init__(self, vocab_size: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.vocab_size, self.mesh = vocab_size, mesh

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss, (), the same on every rank of the mesh.

        x: (batch, seq, n_embd), in shards of seq; a plain tensor is this rank's shard.
        weight: (padded_vocab, n_embd), in shards of rows. targets: (batch, seq), complete on every rank.
        """
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)
        assert isinstance(weight, DTensor)
        rows = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).flatten(0, 1)
        table = weight.to_local()
        begin = self.mesh.get_local_rank() * table.shape[0]
        softmax = partial(vocab_parallel_softmax_and_loss, begin=begin, group=self.mesh.get_group())
        return linear_cross_entropy(rows, table, targets.flatten(), self.vocab_size, softmax)


def vocab_parallel_softmax_and_loss(
    logits: Tensor, targets: Tensor, vocab_size: int, *, begin: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return this rank's columns of the softmax, and the summed loss over all columns.

    Like `softmax_and_loss`, for a rank that has columns `begin` to `begin + logits.shape[1]` of the vocabulary.
    logits: (rows, columns of this rank), overwritten. targets: (rows,), ids of the whole vocabulary.
    """
    logits, columns = logits.float(), logits.shape[1]
    logits[:, max(0, vocab_size - begin) :] = -torch.inf
    largest = logits.amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(largest.unsqueeze(1))
    is_here = (targets >= begin) & (targets < begin + columns)
    column = (targets - begin).clamp(0, columns - 1).unsqueeze(1)
    target_logit = torch.where(is_here, logits.gather(1, column).squeeze(1), 0.0)
    probs = logits.exp_()
    sums = torch.stack([probs.sum(1), target_logit])
    dist.all_reduce(sums, group=group)
    counted = targets != IGNORE
    loss = ((sums[0].log() - sums[1]) * counted).sum()
    probs.div_(sums[0].unsqueeze(1)).scatter_add_(1, column, -is_here.to(probs.dtype).unsqueeze(1))
    return probs.mul_(counted.unsqueeze(1)), loss


def check_tp(run: Run, tp_plan: Path | None = None) -> None:
    """Raise ConfigError, naming the sizes that fit, unless tp_size divides heads, table, sequence and each cut of a weight."""
    tp_size, gpt = run.tp_size, run.gpt
    if isinstance(gpt, OwnConfig):
        tensor_plan(gpt, tp_size, tp_plan)
        return
    if tp_plan is not None:
        raise ConfigError("presets have a plan of their own", "in --tp-plan", "leave it out")
    cut_sizes = {"n_head": gpt.n_head, "n_kv_head": gpt.n_kv_head, "seq_len": run.seq_len}
    names = {"ids": "the padded vocabulary", "positions": "block_size"}
    for weight in (weight for part in gpt.weights() for weight in part):
        if (dim := CUT_DIMS[weight.cut]) is not None:
            cut_sizes[names.get(weight.cut, f"the width of {weight.name}")] = weight.shape[dim]
    for what, size in cut_sizes.items():
        if size % tp_size:
            fits = [n for n in range(1, gpt.n_head + 1) if all(s % n == 0 for s in cut_sizes.values())]
            fix = f"use one of {fits}"
            raise ConfigError(f"{what} {size} is not divisible by tp_size {tp_size}", "in --tp-size", fix)


def styles_of(part: nn.Module, plan: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """Return the styles for the modules of a plan of one's own that a model, or a stage of it, has."""
    own = {name for name, module in part.named_modules() if module._parameters}
    styles = STYLES | {"embedding_rowwise": partial(VocabParallelEmbedding, is_whole=True)}
    return {name: styles[style]() for name, style in plan.items() if name in own}


def check_async_tp(run: Run) -> None:
    """Raise ConfigError where torch cannot overlap matrix products with transfers."""
    if run.world.device.type != "cuda":
        raise ConfigError("async TP needs CUDA devices with NVLink", "in --async-tp", "leave it out")
    if not run.config.compile:
        raise ConfigError("async TP is made by torch.compile", "in --async-tp", "add --compile")


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Let torch.compile fuse all-gather + product, and product + reduce-scatter, into one pipelined operator."""
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
