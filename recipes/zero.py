"""ZeRO by DeepSpeed: optimizer state, gradients and weights cut over the devices a stage at a time, and moved off them.

What is sharded        the batch, and, each as one flat vector in d equal pieces: stage 1 fp32 weights and optimizer state;
                       stage 2 gradients too; stage 3 the weights that are computed with too, each parameter by itself
What is communicated   per optimizer step and device, b bytes a weight in the compute type: stages 1, 2 gradients reduced to
                       their owners and new weights all-gathered, (d-1)/d x (4 + b) N (stage 2 reduces every micro-batch);
                       stage 3 weights gathered for forward and for backward of every micro-batch, 2 (d-1)/d x bN, and
                       gradients reduce-scattered, (d-1)/d x 4N
Memory per device      weights bN + fp32 weights and AdamW state 12N/d + fp32 gradients 4N; stage 2: gradients 4N/d;
                       stage 3: weights bN/d (none in fp32: they are the fp32 weights) + gathered blocks; all + activations
zero_offload           12N/d bytes and the AdamW step on the host (stage 3: the weights' bN/d too)
zero_infinity          stage 3, and all of that in files on NVMe: 12N/d + bN/d and gradients, a sub-group at a time in memory
Wins                   when the state does not fit: 1, then 2, cost little more than DDP; offload when even 16N/d does not
Loses                  to DDP when that fits; offload to the bus and the host's AdamW, NVMe to the disk, unless batches are big
Source                 Rajbhandari et al. 2020 (arXiv 1910.02054); Ren et al. 2021, ZeRO-Offload (arXiv 2101.06840);
                       Rajbhandari et al. 2021, ZeRO-Infinity (arXiv 2104.07857)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from gptscale.common import deepspeed_ops
from gptscale.common.build import materialise, meta_gpt
from gptscale.common.config import RecipeConfig
from gptscale.common.deepspeed_optimizer import ZeroOptimizer
from gptscale.common.deepspeed_quietly import deepspeed, start
from gptscale.common.optimizer import decay_groups
from gptscale.common.run import Run
from gptscale.common.swap_folder import SwapFolder
from gptscale.common.torch_engine import TorchEngine


@dataclass(frozen=True)
class ZeroConfig(RecipeConfig):
    """Which ZeRO; everything else is DeepSpeed's own JSON, given with --ds-config."""

    stage: int = 2
    """1 shards the optimizer, 2 gradients too, 3 weights too."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer lives and steps, and at stage 3 the weights."""
    nvme_path: Path | None = None
    """Folder on a fast local disk, for offload nvme."""
    ds_config: Path | None = None
    """A DeepSpeed JSON of your own, merged over ours."""

    @property
    def ops(self) -> tuple[str, ...]:
        """DeepSpeed's compiled operators that these options use."""
        return {"none": (), "cpu": ("cpu_adam",), "nvme": ("cpu_adam", "pin_memory", "async_io")}[self.offload]


def ds_config(run: Run, config: ZeroConfig) -> dict[str, Any]:
    """DeepSpeed's JSON for this run: the only place that writes it."""
    precision, device = run.config.precision, config.offload
    zero: dict[str, Any] = {"stage": config.stage}
    if device != "none":
        where = {"device": device, "pin_memory": run.world.device.type == "cuda" or device == "nvme"}
        if device == "nvme":
            where["nvme_path"] = str(config.nvme_path)
        zero["offload_optimizer"] = where
        if config.stage == 3:  # no weight stays in host memory because there would be room; buffers as long as the longest
            largest = run.gpt.padded_vocab_size * run.gpt.n_embd // run.world.world_size + 1
            zero["offload_param"] = {**where, "max_in_cpu": 0, "buffer_size": max(largest, 2**20), "buffer_count": 8}
    return {
        "train_micro_batch_size_per_gpu": run.batch.micro_batch_size,
        "gradient_accumulation_steps": run.batch.grad_accum_steps,
        "gradient_clipping": run.config.clip_grad_norm,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 16, "loss_scale_window": 2000, "min_loss_scale": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # plain SGD, for parity of weights
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
    }


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, json: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """`model` and `optimizer` in DeepSpeed's hands; for stage 3 build the model under `deepspeed.zero.Init`."""
    return deepspeed.initialize(model=model, optimizer=optimizer, config=json, dist_init_required=False)[0]


def build(run: Run, config: ZeroConfig) -> TorchEngine:
    """The GPT (at stage 3 in pieces from the start) and its optimizer, handed to DeepSpeed."""
    deepspeed_ops.load(config.ops)
    swap = SwapFolder(config.nvme_path or run.config.out, run.world) if config.offload == "nvme" else None
    config = replace(config, nvme_path=swap and swap.path)
    json = ds_config(run, config)
    start(run.world.device)
    if config.stage == 3:
        model = meta_gpt(run, deepspeed.zero.Init(config_dict_or_path=json))
        deepspeed.zero.register_external_parameter(model, model.wte.weight)  # the tied head uses it outside its module
    else:
        model = materialise(meta_gpt(run), run, run.world.device)
    names = dict(model.named_parameters())
    groups = decay_groups(names.values(), run.config.weight_decay)
    optimizer: torch.optim.Optimizer
    if run.config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=run.config.peak_lr)
    elif config.offload != "none":
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, betas=(run.config.beta1, run.config.beta2))
    else:
        optimizer = torch.optim.AdamW(groups, betas=(run.config.beta1, run.config.beta2), fused=True)
    ds = shard(model, optimizer, json)
    stepper = ZeroOptimizer(ds, names, adamw=run.config.optimizer == "adamw", swap=swap)
    stepper.initialise(run.gpt, run.config.seed)
    return TorchEngine(
        run,
        ds,
        stepper,
        group=dist.group.WORLD,
        set_grad_sync=ds.set_gradient_accumulation_boundary,
        backward=lambda loss: ds.backward(loss, scale_wrt_gas=False),
    )


def main() -> None:
    """This process's part of a run, from the command line."""
    from gptscale.launchers.entry import run_recipe

    run_recipe("zero2")


if __name__ == "__main__":
    main()
