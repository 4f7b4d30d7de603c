"""Context parallelism: each sequence is cut over c devices, and in attention they see the keys and values of all of it.

What is sharded        the sequence: each device has T / c tokens of every activation, logits included. A ring gives it a chunk
                       from the front and one from the back, so that all have the same work under the causal mask; parameters,
                       gradients and optimizer state over all d c devices, by fsdp
What is communicated   per layer and micro-batch of B sequences, width h of heads, h_kv of keys', b bytes each: a ring passes keys
                       and values on c - 1 times, in backward again with their fp32 gradients, (c-1)/c B T h_kv (4 b + 8) bytes
                       per device, hidden behind attention; ulysses exchanges heads for tokens before attention and back behind
                       it, 4 (c-1)/c^2 B T (h + h_kv) b bytes, not hidden. And what fsdp sends
Memory per device      16 N / (d c) bytes + one or two gathered blocks + activations / c; a ring holds keys and values of two
                       devices, ulysses those of the whole sequence for 1 / c of the heads
Wins                   when one sequence is too long for a device; a ring where heads are not divisible, or keys are few
Loses                  with short sequences, whose attention is over before the messages are there: fsdp, if the batch allows it
Source                 ring: Liu et al. 2023 (arXiv 2310.01889), Brandon et al. 2023 (2311.09431); ulysses: Jacobs et al. 2023
                       (2309.14509)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from gptscale.recipes.fsdp import FSDPConfig, build_over

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run

Style = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class ContextParallelConfig(FSDPConfig):
    """Options of fsdp, and how ranks of a sequence attend to all of it. Their number is --cp-size."""

    cp_style: Style = "ring"
    """ring passes keys and values on from rank to rank. ulysses exchanges heads for tokens, and cp_size must divide the heads."""

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Return both styles, and on more than two ranks all in a ring, and data ranks beside those of a sequence."""
        two, ulysses = ("--cp-size", "2"), ("--cp-style", "ulysses")
        return [(), ulysses] if nproc < 4 or nproc % 2 else [(), two, two + ulysses]

    def state_formula(self, run: Run) -> str:
        return f"{super().state_formula(run).removesuffix(' / d')} / (d c)"

    def check(self, run: Run) -> None:
        from gptscale.common.engines.context_parallel import check_cp

        super().check(run)
        check_cp(run, self.cp_style)


def shard(tokens: Tensor, rank: int, size: int, style: str) -> Tensor:
    """Return the part of (batch, seq) that a rank has: a piece, or for a ring a chunk from the front and one from the back.

    A token attends to those before it, so that those at the back have most work. With both chunks all ranks have the same.
    """
    import torch

    if style == "ulysses":
        return tokens.chunk(size, 1)[rank]
    chunks = tokens.chunk(2 * size, 1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), 1)


def apply_cp(model: nn.Module, run: Run, style: Style) -> Callable[[Tensor], Tensor] | None:
    """Let a model attend to whole sequences, and know the positions of its tokens.

    Returns what cuts a tensor of tokens, or None where no ranks share a sequence.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from gptscale.common.engines.context_parallel import attend_by_heads, attend_in_ring

    if (size := run.cp_size) == 1:
        return None
    axes = run.mesh.sizes
    group = init_device_mesh(run.world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))["cp"].get_group()
    cut = partial(shard, rank=group.rank(), size=size, style=style)

    def positions(n: int, device: torch.device) -> Tensor:
        return cut(torch.arange(size * n, device=device).unsqueeze(0)).squeeze(0)

    attend = partial(attend_in_ring if style == "ring" else attend_by_heads, group=group)
    module: Any
    for module in model.modules():
        if hasattr(module, "positions"):
            module.positions = positions
        if hasattr(module, "attend"):
            module.attend = attend
    return cut


def build(run: Run, config: ContextParallelConfig) -> TorchEngine:
    """Cut the sequences, then shard the model on the meta device as fsdp does, over data ranks and those of sequences alike."""
    from gptscale.common.model.build import meta_gpt

    model = meta_gpt(run)
    return build_over(model, run, config, apply_cp(model, run, config.cp_style))


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("context_parallel")
