"""What torch's tensor-parallel styles leave to do: the table, the head's loss, the checks, async TP.

The loss is that of a head whose vocabulary is cut: no rank ever holds a row of logits whole. Shoeybi et al. 2019, arXiv
1909.08053, section 3: of each row three numbers are exchanged (its largest logit, its sum of exponentials, the logit of its
target) where gathering the logits would exchange the vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from gptscale.common.errors import ConfigError
from gptscale.common.model.loss import IGNORE, linear_cross_entropy
from gptscale.common.settings.run import Run


class VocabParallelEmbedding(ParallelStyle):
    """An embedding whose rows are cut; each rank looks up what it has, and the sum leaves in shards of dim `sequence_dim`.

    torch's RowwiseParallel does this forward; backward (2.11) it makes the gradient of the whole table on every rank.
    """

    def __init__(self, sequence_dim: int) -> None:
        self.sequence_dim = sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        rows = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(rows))
        module.forward = partial(self._look_up, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _look_up(self, module: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
        assert isinstance(module.weight, DTensor)
        table = module.weight.to_local()
        row = ids - mesh.get_local_rank() * table.shape[0]
        here = (row >= 0) & (row < table.shape[0])
        found = F.embedding(row.clamp(0, table.shape[0] - 1), table) * here.unsqueeze(-1)
        summed = DTensor.from_local(found, mesh, [Partial()], run_check=False)
        return summed.redistribute(placements=[Shard(self.sequence_dim)]).to_local()


class VocabParallelCrossEntropy(nn.Module):
    """In place of `LinearCrossEntropy` when table and activations are DTensors on the tensor-parallel `mesh`."""

    def __init__(self, vocab_size: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.vocab_size, self.mesh = vocab_size, mesh

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Summed loss, the same on every rank of the mesh.

        x (batch, seq, n_embd) in sequence shards; weight (padded_vocab, n_embd) in row shards; targets (batch, seq), whole.
        """
        if not isinstance(x, DTensor):  # a plain local shard
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
    """As `softmax_and_loss`, for columns `begin` and following: logits (rows, their number), overwritten; loss of all."""
    logits, columns = logits.float(), logits.shape[1]
    logits[:, max(0, vocab_size - begin) :] = -torch.inf
    largest = logits.amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(largest.unsqueeze(1))
    here = (targets >= begin) & (targets < begin + columns)
    column = (targets - begin).clamp(0, columns - 1).unsqueeze(1)
    target_logit = torch.where(here, logits.gather(1, column).squeeze(1), 0.0)
    probs = logits.exp_()
    sums = torch.stack([probs.sum(1), target_logit])
    dist.all_reduce(sums, group=group)
    counted = targets != IGNORE
    loss = ((sums[0].log() - sums[1]) * counted).sum()
    probs.div_(sums[0].unsqueeze(1)).scatter_add_(1, column, -here.to(probs.dtype).unsqueeze(1))
    return probs.mul_(counted.unsqueeze(1)), loss


def check_tp(run: Run) -> None:
    """ConfigError unless tp_size divides heads, table, sequence and positions, with the sizes that would."""
    tp_size, gpt = run.tp_size, run.gpt
    cut = {
        "n_head": gpt.n_head,
        "the padded vocabulary": gpt.padded_vocab_size,
        "seq_len": run.seq_len,
        "block_size": gpt.block_size,
    }
    for what, size in cut.items():
        if size % tp_size:
            fits = [n for n in range(1, gpt.n_head + 1) if all(s % n == 0 for s in cut.values())]
            raise ConfigError(
                f"{what} {size} is not divisible by tp_size {tp_size}", "in --tp-size", f"use one of {fits}"
            )


def check_async_tp(run: Run) -> None:
    """ConfigError where torch cannot overlap products with transfers."""
    if run.world.device.type != "cuda":
        raise ConfigError("async TP needs CUDA devices with NVLink", "in --async-tp", "leave it out")
    if not run.config.compile:
        raise ConfigError("async TP is made by torch.compile", "in --async-tp", "add --compile")


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Let the compiler turn all-gather + product and product + reduce-scatter into one pipelined operator."""
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
