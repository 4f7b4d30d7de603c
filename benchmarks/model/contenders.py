"""What `python -m benchmarks.model` times: each contender trains one model from the same weights on the same batches.

All contenders compute the same losses. For that the last target of a sequence counts nothing, because the exercise's baseline
shifts inside the sequence that it feeds. Every AdamW has our betas and decay. Contenders that take the gradient norm never find
it too large, so that nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor

from benchmarks.engines.minimal_loops import groups
from benchmarks.model.minimal_gpt import MinimalGPT, make_step
from gptscale.common.data.loader import Batches
from gptscale.common.engine import Batch
from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import GPT
from gptscale.common.model.hf_gpt2 import qkv_to_hf
from gptscale.common.model.hf_weights import to_hf
from gptscale.common.model.loss import IGNORE
from gptscale.common.model.precision import DTYPES, autocast
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes.handout import handout_loss
from gptscale.recipes.single import SingleConfig, build

CLIP_NEVER = 1e6
# There is no warm-up of the learning rate. At a higher one 1.6b would leap, and rounding errors would grow with it.
LR = 1e-4
BETAS = (0.9, 0.95)


class Contender(NamedTuple):
    """A function that takes one optimizer step on a batch and returns its loss.

    engine: the package's own, if the contender has one.
    """

    step: Callable[[Batch], Tensor]
    engine: TorchEngine | None = None


class BatchesShiftedWithin(Batches):
    """Batches whose last target of each sequence counts nothing."""

    def batch(self, step: int) -> Batch:
        """Return a batch as Batches.batch does."""
        batch = super().batch(step)
        batch.targets[:, -1] = IGNORE
        return batch


def bench_run(task: dict[str, Any], **options: Any) -> Run:
    """Return the task as a run of `single`, with more of its options."""
    gpt = GPTConfig(**task["gpt"])
    config = RunConfig(
        **{
            "device": task["device"],
            "steps": task["warmup_steps"] + task["steps"],
            "precision": task["precision"],
            "seq_len": gpt.block_size,
            "clip_grad_norm": CLIP_NEVER,
            "lr": LR,
            **options,
        }
    )
    batch = plan_batch(1, global_batch_size=task["batch_size"])
    return Run("single", config, gpt, batch, World.from_environment(config.device, config.dist_timeout_s))


def single(task: dict[str, Any], *, activation: str | None = None, **options: Any) -> Contender:
    """Build the recipe `single` with these options, in a process set up as its worker is.

    Its optimizer's guard and norm are included. activation: another operator for the same function, here ours in place of
    PyTorch's.
    """
    keep_freed_memory()
    if activation:
        task["gpt"]["activation"] = activation
    # without it the profiler could not tell compiled kernels apart
    inductor.cpp.enable_kernel_profile = True
    engine = build(bench_run(task, **options), SingleConfig())
    return Contender(lambda batch: engine.train_step(batch, LR).loss, engine)


def initial(run: Run) -> GPT:
    """Return the model with the weights that all contenders start from, on the CPU."""
    model = materialise(meta_gpt(run), run, torch.device("cpu"))
    assert isinstance(model, GPT)
    return model


def handout(task: dict[str, Any]) -> Contender:
    """Build the exercise's baseline: transformers' model with its mask and cache, copies of whole logits, plain AdamW.

    Its dropout is 0, and its optimizer has our betas and decay. Both are values, not work.
    """
    run = bench_run(task)
    device = run.world.device
    model: Any = to_hf(initial(run))
    model.to(device).train()
    optimizer = torch.optim.AdamW(groups(model), lr=LR, betas=BETAS)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with autocast(run.config.precision, device):
            loss = handout_loss(model, batch.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Contender(step)


def handout_best(task: dict[str, Any]) -> Contender:
    """Build the same model as well as one can run it unchanged.

    It has fused attention, no mask, no cache, fused AdamW, and is compiled whole. The targets come shifted, so that no logits
    are copied. It clips, as the others do.
    """
    run = bench_run(task)
    device = run.world.device
    model: Any = to_hf(initial(run))
    model.to(device).train()
    model.set_attn_implementation("sdpa")
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(groups(model), lr=LR, betas=BETAS, fused=True)

    def step(batch: Batch) -> Tensor:
        with autocast(run.config.precision, device):
            logits = compiled(input_ids=batch.inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NEVER)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(step)


def minimal(task: dict[str, Any], *, compile: bool = False) -> Contender:
    """Build the hundred lines by hand of minimal_gpt.py, on CUDA with a table of whole tiles, as such scripts have it."""
    run = bench_run(task)
    gpt, device = run.gpt, run.world.device
    shape = {f: getattr(gpt, f) for f in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    rows = gpt.padded_vocab_size if device.type == "cuda" else gpt.vocab_size
    model = MinimalGPT(**shape, table_rows=rows)
    take_weights(model, initial(run))
    step = make_step(
        model.to(device),
        lr=LR,
        clip_grad_norm=CLIP_NEVER,
        compile=compile,
        dtype=DTYPES[run.config.precision],
        device=device,
    )
    return Contender(lambda batch: step(batch.inputs, batch.targets))


@torch.no_grad()
def take_weights(model: MinimalGPT, gpt: GPT) -> None:
    """Fill the hand-written model with our weights.

    Its rows of query, key and value are in transformers' order.
    """
    sources, targets = dict(gpt.named_parameters()), dict(model.named_parameters())
    names = {"attn.qkv": "c_attn", "attn.proj": "attn_proj", "mlp.fc": "c_fc", "mlp.proj": "mlp_proj"}
    for _, name, _ in gpt.config.parameters():
        minimal_name = name.replace("blocks.", "h.")
        for long, short in names.items():
            minimal_name = minimal_name.replace(long, short)
        value = qkv_to_hf(sources[name], gpt.config.n_head) if "qkv" in name else sources[name]
        target = targets[minimal_name]
        target.copy_(value[: len(target)])


CONTENDERS: dict[str, Callable[[dict[str, Any]], Contender]] = {
    "single": single,
    "single_gelu": partial(single, activation="custom-tanh"),
    "single_compiled": partial(single, compile=True),
    "single_gelu_compiled": partial(single, compile=True, activation="custom-tanh"),
    "single_autotuned": partial(single, compile=True, compile_mode="max-autotune-no-cudagraphs"),
    "single_graphs": partial(single, compile=True, compile_mode="reduce-overhead"),
    "single_fp8": partial(single, compile=True, precision="fp8"),
    "handout": handout,
    "handout_best": handout_best,
    "minimal": minimal,
    "minimal_compiled": partial(minimal, compile=True),
}
