"""ZeRO 3 by fairscale: FullyShardedDataParallel, the ancestor of torch's own.

What is sharded        the batch; each parameter, its gradient and its optimizer state, as a flat vector in d equal pieces
What is communicated   per micro-batch: weights all-gathered for forward and again for backward, 2 (d-1)/d x bN bytes
                       (b bytes a weight in the compute type). Gradients reduce-scattered, (d-1)/d x 4N, but not during
                       accumulation, which holds whole gradients instead, 4N bytes
Memory per device      16 N / d bytes + gathered blocks + activations
Wins                   today only to repeat what was done with it
Loses                  to fsdp: overlap by hand, no DTensor, no further development
Source                 Baines et al. 2021, fairscale; Xu et al. 2020 (arXiv 2004.13336); fairscale.readthedocs.io, "FSDP"

It needs CUDA, because it works on CUDA streams. `flatten_parameters` stays off: one flat vector of a block would mix matrices,
which decay, with norms and biases, which do not, and the run would no longer compute what the others do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig

if TYPE_CHECKING:
    import torch
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from torch import Tensor, nn

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run
    from gptscale.common.state import Shard


@dataclass(frozen=True)
class FairscaleFSDPConfig(RecipeConfig):
    """Options of fairscale's FullyShardedDataParallel, in its own spelling."""

    formula: ClassVar[str] = "16 N / d"
    reshard_after_forward: bool = True
    """Free a block's gathered weights after forward and gather again in backward; False keeps them."""
    bucket_cap_mb: int = 25
    """Gradients are reduce-scattered when a bucket of this many MiB is full."""

    def check(self, run: Run) -> None:
        """Raise ConfigError for one rank that accumulates in 16 bits, whose weights fairscale frees after a micro-batch."""
        if run.world.world_size == 1 and run.config.precision != "fp32" and run.batch.grad_accum_steps > 1:
            what = "fairscale's FSDP on one rank cannot accumulate in 16 bits"
            raise ConfigError(what, "in --grad-accum-steps", "use --grad-accum-steps 1, --precision fp32 or more ranks")


def shard(
    model: nn.Module, block_class: type[nn.Module], config: FairscaleFSDPConfig, compute_dtype: torch.dtype
) -> FullyShardedDataParallel:
    """Cut each `block_class` in `model`, then what remains, so that parameters become flat shards in place."""
    import torch
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    options: dict[str, Any] = {
        "reshard_after_forward": config.reshard_after_forward,
        "bucket_cap_mb": config.bucket_cap_mb,
        "flatten_parameters": False,
        "mixed_precision": compute_dtype != torch.float32,
        "compute_dtype": compute_dtype,
        "fp32_reduce_scatter": compute_dtype != torch.float32,
    }
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, block_class):
                setattr(parent, name, FullyShardedDataParallel(child, **options))
    return FullyShardedDataParallel(model, **options)


def build(run: Run, config: FairscaleFSDPConfig) -> TorchEngine:
    """Build the model, cut it block by block, and put torch's optimizer over the shards."""
    import torch
    import torch.distributed as dist

    from gptscale.common.engines.flat_shards import shards_of_range
    from gptscale.common.engines.torch_engine import TorchEngine, holding_back
    from gptscale.common.model.build import materialise, meta_gpt
    from gptscale.common.model.precision import DTYPES
    from gptscale.common.optim.fused import decay_groups
    from gptscale.common.optim.library import LibraryOptimizer, torch_optimizer

    model = materialise(meta_gpt(run), run, run.world.device)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    # Groups are made before a matrix turns into a flat shard.
    groups = decay_groups(parameters.values(), run.config.weight_decay)
    sharded = shard(model, model.block, config, DTYPES[run.config.precision])
    kind, options = torch_optimizer(run.config)
    optimizer = kind(groups, **options)

    def boxes(name: str, tensor: Tensor) -> Iterator[Shard]:
        shape = shapes[name.split("/", 1)[1]]
        chunk, n = tensor.numel(), torch.Size(shape).numel()
        begin = chunk * dist.get_rank()
        # The last shard is padded.
        return shards_of_range(name, tensor.flatten()[: max(0, n - begin)], shape, begin)

    stepper = LibraryOptimizer(optimizer, optimizer, parameters, run.config, clip=sharded.clip_grad_norm_, boxes=boxes)
    return TorchEngine(run, sharded, stepper, group=dist.group.WORLD, set_grad_sync=holding_back(sharded.no_sync))


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("fairscale_fsdp")
