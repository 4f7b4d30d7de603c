"""The pipeline stages of a model, as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptscale.common.model.gpt import Decoder


class Stage(Decoder):
    """A run of blocks of a model, with the embedding on the first stage and the head on the last.

    It takes its modules out of `gpt`, which is on the meta device, so that no process ever has the rest in memory. The names
    of its parameters are those of the whole model.
    """

    def __init__(self, gpt: Decoder, blocks: range, *, embeds: bool, ends: bool) -> None:
        nn.Module.__init__(self)
        self.config, self.embeds, self.ends = gpt.config, embeds, ends
        self.wte = gpt.wte if embeds or (ends and gpt.head is None) else None
        self.wpe = gpt.wpe if embeds else None
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        self.ln_f = gpt.ln_f if ends else None
        self.head = gpt.head if ends else None
        self.loss = gpt.loss if ends else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute this stage's part of one micro-batch.

        x: (batch, seq) ids on the first stage, (batch, seq, n_embd) activations on the others. Returns activations, or the
        summed loss, (), on the last stage.
        """
        x = self.embed(x) if self.embeds else x
        for block in self.blocks.values():
            x = block(x)
        if self.ends:
            x = self.loss(self.ln_f(x), self.head_weight, targets)
        return x


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
