"""ZeRO by DeepSpeed: optimizer state, gradients and weights are cut over the devices stage by stage, and moved off them.

What is sharded        the batch; stage 1 fp32 weights and optimizer state, stage 2 gradients too, each as one flat vector per
                       parameter group in d equal pieces; stage 3 each parameter, and the weights that are computed with too
What is communicated   per device; b bytes a weight in the compute type. Stages 1, 2: gradients reduced to their owners (2:
                       after every micro-batch) and new weights all-gathered, (d-1)/d x (4 + b) N. Stage 3, per micro-batch:
                       weights gathered for forward and backward, gradients reduce-scattered, (d-1)/d x (2b + 4) N
Memory per device      stage 1: b N + (12 + 4) N / d, gradients 4N while they accumulate (bf16: 4N always, and 2N as they were
                       computed); stage 2: b N + (12 + 4) N / d; stage 3: (b + 12 + 4) N / d; + a reduce bucket, activations
zero_offload           (12 + 4) N / d of that are on the host, which also steps; bf16, fp16: + 4N/d of gradients as they are
                       summed, on the device; stage 3: weights and those sums are on the host too
zero_infinity          stage 3 with (12 + 4 + b) N/d in files; memory holds what is at work, and tensors of less than 1 MiB
Wins                   when the state does not fit: 1, and 2 without accumulation, send no more than DDP; offload when even
                       16N/d does not fit
Loses                  to DDP when that fits; offload to bus and host, NVMe to the disk, unless a step is long (doctor)
Source                 Rajbhandari et al. 2020 (arXiv 1910.02054); Ren et al. 2021 (arXiv 2101.06840); Rajbhandari et al. 2021
                       (arXiv 2104.07857)
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gptscale.common.engines.zero.options import DeepSpeedConfig, merged

if TYPE_CHECKING:
    import deepspeed
    import torch
    from torch import nn

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class ZeroConfig(DeepSpeedConfig):
    """Options of DeepSpeed's ZeRO: stage and offload, because all else is in DeepSpeed's own JSON (--ds-config)."""

    def json(self, run: Run) -> dict[str, Any]:
        loss_scale = {"initial_scale_power": 16, "loss_scale_window": 2000, "min_loss_scale": 1}
        of_run = {
            "train_batch_size": run.batch.global_batch_size,
            "train_micro_batch_size_per_gpu": run.batch.micro_batch_size,
            "gradient_accumulation_steps": run.batch.grad_accum_steps,
            "gradient_clipping": run.config.clip_grad_norm,
            "bf16": {"enabled": run.config.precision == "bf16"},
            "fp16": {"enabled": run.config.precision == "fp16", **loss_scale},
        }
        pins = run.world.device.type == "cuda" or self.offload == "nvme"
        own = ds_config(self, run.gpt.n_params, run.gpt.largest_weight, run.world.world_size, pins)
        return merged(of_run | own, self.ds_config)


def ds_config(config: ZeroConfig, n_params: int, largest_weight: int, world_size: int, pins: bool) -> dict[str, Any]:
    """Return DeepSpeed's JSON without batch and precision. pins: whether memory of the host is pinned."""
    # DeepSpeed's own default is 5e8 elements, 2 GB at once whatever the model.
    zero: dict[str, Any] = {"stage": config.stage, "reduce_bucket_size": min(50_000_000, n_params // 8)}
    if config.offload != "none":
        path = {"nvme_path": str(config.nvme_path)} if config.offload == "nvme" else {}
        zero["offload_optimizer"] = {"device": config.offload, "pin_memory": pins, **path}
        if config.stage == 3:
            zero["offload_param"] = dict(zero["offload_optimizer"])
        if config.offload == "nvme":
            # max_in_cpu 0: no weight stays in memory only because there is room.
            buffers = {"buffer_size": max(2**20, largest_weight // world_size + 1), "buffer_count": 8}
            zero["offload_param"] |= {"max_in_cpu": 0, **buffers}
            # Free each weight after its use: otherwise a model runs out of those buffers.
            zero["stage3_max_reuse_distance"] = 0
            # Read ahead only a part of a model, or DeepSpeed reads a weight that is still in a buffer, and ends (issue 4072).
            zero["stage3_prefetch_bucket_size"] = min(50_000_000, n_params // 8)
    return {
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        # It lets plain SGD in, for parity of weights.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, json: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """Let DeepSpeed cut `model`, which may come from `zero.Init`, and `optimizer`. On CPUs it compiles no exchange of its own."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=json, dist_init_required=False)[0]


def build(run: Run, config: ZeroConfig) -> TorchEngine:
    """Build the model (at stage 3 in pieces from the start) and its optimizer, and hand them to DeepSpeed."""
    import deepspeed
    import torch
    import torch.distributed as dist

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.engines.zero import operators as deepspeed_ops
    from gptscale.common.engines.zero.optimizer import ZeroOptimizer, full_shape
    from gptscale.common.engines.zero.options import check_by_deepspeed
    from gptscale.common.engines.zero.swap_folder import SwapFolder
    from gptscale.common.model.build import materialise, meta_gpt, set_buffers
    from gptscale.common.optim.fused import decay_groups
    from gptscale.common.optim.library import torch_optimizer

    deepspeed_ops.load(config.ops)
    swap = SwapFolder(config.nvme_path or run.config.out, run.world) if config.offload == "nvme" else None
    json = replace(config, nvme_path=swap.path if swap else None).json(run)
    deepspeed_ops.start_deepspeed(run.world.device)
    check_by_deepspeed(json, config.ds_config)
    if config.stage == 3:
        model = meta_gpt(run, deepspeed.zero.Init(config_dict_or_path=json))
        if hasattr(model, "head_weight"):
            # The model uses the head's matrix outside its module.
            deepspeed.zero.register_external_parameter(model, model.head_weight)
    else:
        model = materialise(meta_gpt(run), run, run.world.device)
    names = dict(model.named_parameters())
    groups = decay_groups(names.values(), run.config.weight_decay, full_shape)
    kind, options = torch_optimizer(run.config)
    if kind is torch.optim.AdamW and config.offload != "none":
        kind = deepspeed.ops.adam.DeepSpeedCPUAdam
        del options["fused"]
    with redirect_stdout(None):
        # DeepSpeed prints its memory.
        ds = shard(model, kind(groups, **options), json)
    stepper = ZeroOptimizer(ds, names, name=run.config.optimizer, swap=swap)
    stepper.initialise(run.gpt, run.config.seed)
    # DeepSpeed has cast them.
    set_buffers(model, run.gpt, run.world.device)
    return TorchEngine(
        run,
        ds,
        stepper,
        group=dist.group.WORLD,
        set_grad_sync=ds.set_gradient_accumulation_boundary,
        # The engine divides by the tokens of all micro-batches.
        backward=lambda loss: ds.backward(loss, scale_wrt_gas=False),
    )


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    # --stage N starts the recipe zeroN.
    words = [word for argument in sys.argv for word in argument.split("=")]
    stage = next((value for option, value in pairwise(words) if option == "--stage"), "2")
    run_recipe(f"zero{stage}")
