"""Building a pipeline: this process's stages, the tensors that stages pass on, and the engine over the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptscale.common.engines.pipeline.chain_stage import ChainStage, own_chain, shapes_between
from gptscale.common.engines.pipeline.engine import PipelineEngine, PipelineLoss, TimedStage
from gptscale.common.engines.pipeline.stages import V_SHAPED, PipelineOptions, stage_indices, stage_sizes
from gptscale.common.model.build import meta_gpt
from gptscale.common.model.gpt import Decoder
from gptscale.common.model.own import PREFIX
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.settings.own_config import OwnConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import TABLE


class Stage(Decoder):
    """A run of blocks of a model, with the embedding on the first stage and the head on the last.

    It takes its modules out of `gpt`, which is on the meta device, so that no process ever has the rest in memory. The names
    of its parameters are those of the whole model.
    """

    def __init__(self, gpt: Decoder, blocks: range, *, embeds: bool, ends: bool) -> None:
        nn.Module.__init__(self)
        self.config, self.block, self.embeds, self.ends = gpt.config, gpt.block, embeds, ends
        self.wte = gpt.wte if embeds or (ends and gpt.head is None) else None
        self.wpe = gpt.wpe if embeds else None
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        self.ln_f = gpt.ln_f if ends else None
        self.head = gpt.head if ends else None
        self.loss = gpt.loss if ends else None


def stages_of(gpt: Decoder, sizes: Sequence[int], indices: Sequence[int]) -> list[Stage]:
    """Return the stages `indices` of a pipeline whose stages have `sizes` blocks."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    last = len(sizes) - 1
    return [Stage(gpt, range(starts[i], starts[i] + sizes[i]), embeds=i == 0, ends=i == last) for i in indices]


def tied_embedding_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of this process and the one at the other end of its pipeline, or None for a process in between.

    mesh: has an axis `pp`. Every process of it must call this, because making a group is collective.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    # (pp, every other axis): each column is one pipeline.
    pipelines = mesh.mesh.movedim(names.index("pp"), 0).reshape(mesh["pp"].size(), -1)
    own_group = None
    for first, last in zip(pipelines[0].tolist(), pipelines[-1].tolist(), strict=True):
        if first != last:
            group = dist.new_group([first, last])
            own_group = group if dist.get_rank() in (first, last) else own_group
    return own_group  # type: ignore[return-value]


def parts_of(run: Run, options: PipelineOptions, pp_rank: int) -> dict[int, nn.Module]:
    """Return this process's stages by index, on the meta device, so that no process ever has the rest of the model."""
    sizes = stage_sizes(run, options)
    indices = stage_indices(options.schedule, pp_rank, run.pp_size, len(sizes))
    if not isinstance(run.gpt, OwnConfig):
        return dict(zip(indices, stages_of(meta_gpt(run), sizes, indices), strict=True))
    parts, chain = dict[int, nn.Module](), own_chain(run.gpt)
    for i in indices:
        whole: Any = meta_gpt(run)
        blocks = range(sum(sizes[:i]), sum(sizes[: i + 1]))
        parts[i] = ChainStage(whole.own, chain, blocks, i == len(sizes) - 1, whole.loss_of)
    return parts


def shapes_of(run: Run, n_stages: int, activation: torch.dtype) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function from a stage's index to its input and output for one micro-batch, both on the meta device.

    They are ids at the first stage, the summed loss behind the last, and activations of type `activation` elsewhere. Ranks
    that share a sequence, and tensor ranks, pass on their part of it.
    """
    micro_batch, seq_len, of_token = run.batch.micro_batch_size, run.rank_seq_len // run.tp_size, [run.gpt.n_embd]
    if isinstance(run.gpt, OwnConfig):
        # Its sequences are whole.
        seq_len, of_token, activation = run.seq_len, own_chain(run.gpt)["hidden"][1:], torch.float32
    ids = torch.empty(micro_batch, run.rank_seq_len, dtype=torch.int64, device="meta")
    # Since 2.14 torch expects gradients of those alone that require them.
    activations = ids.new_empty(micro_batch, seq_len, *of_token, dtype=activation, requires_grad=True)
    return shapes_between(ids, activations, n_stages)


def pipeline_engine(
    run: Run,
    options: PipelineOptions,
    parts: dict[int, nn.Module],
    shard: Callable[..., tuple[list[TimedStage], Any]],
    mesh: DeviceMesh,
    *,
    activation: torch.dtype = torch.float32,
    data: dist.ProcessGroup | None = None,
    cut: Callable[[Tensor], Tensor] | None = None,
) -> PipelineEngine:
    """Return the engine over this process's stages and their schedule, which `shard` of recipes/pipeline.py makes.

    mesh: holds the whole world, and has an axis pp. activation: the type of what stages pass on.
    data: the processes that split the batch. cut: as in TorchEngine.
    """
    loss, n_stages = PipelineLoss(run.world.device), len(stage_sizes(run, options))
    order = (mesh["pp"], options.schedule, run.batch.grad_accum_steps)
    stages, schedule = shard(parts, n_stages, *order, loss, shapes_of(run, n_stages, activation), TimedStage)
    parameters = {name: p for part in parts.values() for name, p in part.named_parameters()}
    # A V ends on the process where it begins, so the table is there only once.
    if isinstance(run.gpt, OwnConfig):
        table = next((f"{PREFIX}{name}" for name in own_chain(run.gpt)["tied"]), "")
    else:
        table = TABLE * run.gpt.is_tied
    both_ends = tied_embedding_group(mesh) if table and options.schedule not in V_SHAPED else None
    copies = {table: 2} if both_ends else None
    optimizer = FusedOptimizer(parameters, run.config, shards=dist.group.WORLD, copies=copies)
    tied = (parameters[table], both_ends) if both_ends else None
    pipeline = mesh["pp"].get_group()
    return PipelineEngine(run, stages, schedule, loss, optimizer, pipeline=pipeline, data=data, cut=cut, tied=tied)
