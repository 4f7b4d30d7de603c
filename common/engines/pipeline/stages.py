"""A GPT's pipeline stages as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptscale.common.model.gpt import GPT


class Stage(nn.Module):
    """Blocks `first` to `last` of a GPT, with the embedding before block 0 and the head behind the last stage.

    Takes what it keeps out of `gpt` (on the meta device, so that nobody ever has the rest); names stay the whole model's.
    """

    def __init__(self, gpt: GPT, blocks: range, *, embeds: bool, ends: bool) -> None:
        super().__init__()
        self.config, self.embeds, self.ends = gpt.config, embeds, ends
        self.wte = gpt.wte if embeds or ends else None
        self.wpe = gpt.wpe if embeds else None
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        self.ln_f = gpt.ln_f if ends else None
        self.loss = gpt.loss if ends else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """(batch, seq) ids or (batch, seq, n_embd) activations, to activations or, at the end, the summed loss, a scalar."""
        if self.embeds:
            x = GPT.embed(self, x)  # type: ignore[arg-type]
        for block in self.blocks.values():
            x = block(x)
        if self.ln_f is not None and self.loss is not None and self.wte is not None:
            loss: Tensor = self.loss(self.ln_f(x), self.wte.weight, targets)
            return loss
        return x


def stages_of(gpt: GPT, sizes: Sequence[int], mine: Sequence[int]) -> list[Stage]:
    """The stages with indices `mine` of a pipeline whose stages have `sizes` blocks."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    last = len(sizes) - 1
    return [Stage(gpt, range(starts[i], starts[i] + sizes[i]), embeds=i == 0, ends=i == last) for i in mine]


def tied_embedding_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of this process and the one at the other end of its pipeline, axis `pp` of `mesh`; None in between.

    Every process of the mesh must call it: making a group is collective.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    pipelines = mesh.mesh.movedim(names.index("pp"), 0).reshape(mesh["pp"].size(), -1)  # (pp, every other axis)
    mine = None
    for first, last in zip(pipelines[0].tolist(), pipelines[-1].tolist(), strict=True):
        if first != last:
            group = dist.new_group([first, last])
            mine = group if dist.get_rank() in (first, last) else mine
    return mine
