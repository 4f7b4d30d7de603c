"""What `gptscale bench model` times: each contender trains one model from the same weights on the same batches.

Run as `python -m gptscale.launchers.bench.model.contenders TASK`, TASK being JSON; the last line printed is the
result. So that all
of them compute the same losses, the last target of a sequence counts nothing (the exercise shifts inside the sequence it
feeds), everybody's AdamW has our betas and decay, and the gradient norm is taken, where it is, but never found too large.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor

from gptscale.common.data.loader import Batches, Prefetcher
from gptscale.common.data.sources import open_source
from gptscale.common.engine import Batch
from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.measure.speed import peak_memory, reset_peak_memory, synchronize
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import GPT, MLP
from gptscale.common.model.hf_weights import name_pairs, qkv_to_hf, to_hf
from gptscale.common.model.loss import IGNORE
from gptscale.common.model.precision import DTYPES, autocast
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.process.ending import is_out_of_memory
from gptscale.common.process.task import answer
from gptscale.common.settings.run import Run
from gptscale.launchers.bench.engines.minimal_loops import groups
from gptscale.launchers.bench.model import ceilings as model_ceilings
from gptscale.launchers.bench.model.gpu_state import gpu_state
from gptscale.launchers.bench.model.loop_contenders import handout_loss, the_run
from gptscale.launchers.bench.model.minimal_gpt import MinimalGPT, make_step
from gptscale.launchers.bench.model.waterfall import annotate, where_time_goes
from gptscale.ops.mlp import mlp
from gptscale.recipes.single import SingleConfig, build

CLIP_NEVER = 1e6
LR = 1e-4  # without warm-up: at a higher one 1.6b would leap, and rounding grow with it
BETAS = (0.9, 0.95)


class Contender(NamedTuple):
    """What takes one optimizer step on a batch and returns its loss; engine: the package's own, if it is one."""

    step: Callable[[Batch], Tensor]
    engine: TorchEngine | None = None


class BatchesShiftedWithin(Batches):
    """Batches whose last target counts nothing."""

    def batch(self, step: int) -> Batch:
        """As Batches.batch."""
        batch = super().batch(step)
        batch.targets[:, -1] = IGNORE
        return batch


def bench_run(task: dict[str, Any], **options: Any) -> Run:
    """The task as a run of `single`, with more of its options."""
    return the_run(task, device=task["device"], clip_grad_norm=CLIP_NEVER, lr=LR, **options)


def ours(task: dict[str, Any], *, activation: str | None = None, **options: Any) -> Contender:
    """The recipe `single` with these options, in a process set up as its worker is; its optimizer's guard and norm included.

    activation: another one of the same function, here our operators in place of PyTorch's.
    """
    keep_freed_memory()
    if activation:
        task["gpt"]["activation"] = activation
    inductor.cpp.enable_kernel_profile = True  # or the profiler could not tell compiled kernels apart
    engine = build(bench_run(task, **options), SingleConfig())
    return Contender(lambda batch: engine.train_step(batch, LR).loss, engine)


def with_epilogues(task: dict[str, Any]) -> Contender:
    """Ours, compiled, with GELU inside the products of the MLP: a candidate for the model, put into it here only."""

    def forward(module: MLP, x: Tensor) -> Tensor:
        fc, proj = module.fc, module.proj
        dtype = torch.get_autocast_dtype(x.device.type)
        y = mlp(*(t.to(dtype) for t in (x, fc.weight, fc.bias, proj.weight, proj.bias)))
        return F.dropout(y, module.dropout, module.training)

    MLP.forward = forward  # type: ignore[assignment, method-assign]  # this process has no other contender
    return ours(task, compile=True)


def initial(run: Run) -> GPT:
    """The weights that all contenders start from, on the CPU."""
    return materialise(meta_gpt(run), run, torch.device("cpu"))


def handout(task: dict[str, Any]) -> Contender:
    """The exercise's baseline: transformers' model with its mask and cache, shifted copies of whole logits, plain AdamW.

    Its dropout is 0, and its optimizer has our betas and decay; both are values, not work.
    """
    run = bench_run(task)
    device = run.world.device
    model: Any = to_hf(initial(run))
    model.to(device).train()
    optimizer = torch.optim.AdamW(groups(model), lr=LR, betas=BETAS)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with autocast(run.config.precision, device):
            loss = handout_loss(model, batch.inputs, use_cache=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Contender(step)


def handout_best(task: dict[str, Any]) -> Contender:
    """The same model as well as one can run it unchanged: fused attention, no mask, no cache, compiled whole, fused AdamW.

    The targets come shifted, so that no logits are copied; it clips, as the others do.
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
    """A hundred lines by hand (minimal_gpt.py); on CUDA with a table of whole tiles, as such scripts have it."""
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
    """Fill the hand-written model with ours; its rows of query, key and value are in transformers' order."""
    ours, theirs = dict(gpt.named_parameters()), dict(model.named_parameters())
    names = {"attn.qkv": "c_attn", "attn.proj": "attn_proj", "mlp.fc": "c_fc", "mlp.proj": "mlp_proj"}
    for name, _, _ in name_pairs(gpt.config.n_layer):
        own = name.replace("blocks.", "h.")
        for long, short in names.items():
            own = own.replace(long, short)
        value = qkv_to_hf(ours[name], gpt.config.n_head) if "qkv" in name else ours[name]
        theirs[own].copy_(value[: len(theirs[own])])


OURS: dict[str, Callable[[dict[str, Any]], Contender]] = {
    "single": ours,
    "single_gelu": partial(ours, activation="custom-tanh"),
    "single_compiled": partial(ours, compile=True),
    "single_gelu_compiled": partial(ours, compile=True, activation="custom-tanh"),
}
OTHERS: dict[str, Callable[[dict[str, Any]], Contender]] = {
    "handout": handout,
    "handout_best": handout_best,
    "minimal": minimal,
    "minimal_compiled": partial(minimal, compile=True),
}
ON_CUDA: dict[str, Callable[[dict[str, Any]], Contender]] = {
    "single_autotuned": partial(ours, compile=True, compile_mode="max-autotune-no-cudagraphs"),
    "single_graphs": partial(ours, compile=True, compile_mode="reduce-overhead"),
    "single_epilogues": with_epilogues,
    "single_fp8": partial(ours, compile=True, precision="fp8"),
}
CONTENDERS = OURS | ON_CUDA | OTHERS
CEILINGS = "ceilings"


def timed_steps(
    step: Callable[[Batch], Tensor], data: Prefetcher, task: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Warm-up, then seconds of each whole step, waiting for its batch included; the loss of every one.

    peak_gib: over all of them, the warm-up too, since steps replayed from a CUDA graph allocate nothing.
    """
    times_s, losses, warm = [], [], task["warmup_steps"]
    reset_peak_memory(device)
    for i in range(warm + task["steps"]):
        began = time.perf_counter()
        losses.append(step(data.get(i)))
        synchronize(device)
        times_s.append(time.perf_counter() - began)
    memory = peak_memory(device)
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        step(data.get(warm + task["steps"]))
        gpu = gpu_state(device)  # while that step is under way
        synchronize(device)
    peak_gib = memory.rss_gib if memory.allocated_gib is None else memory.allocated_gib
    losses_nats = [loss.item() for loss in losses]
    return {"step_times_s": times_s[warm:], "losses": losses_nats, "peak_gib": peak_gib, "gpu": gpu}


def train(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """One turn of one contender; its parts too if the task says so."""
    gpt = task["gpt"]
    data = {"random": "synthetic", "text": "stdlib"}[task["data"]]
    source = open_source(data, vocab_size=gpt["vocab_size"], seed=1)
    batches = BatchesShiftedWithin(source, seq_len=gpt["block_size"], global_batch_size=task["batch_size"], seed=1)
    step, engine = CONTENDERS[task["contender"]](task)
    with Prefetcher(batches, device) as reader:
        found = timed_steps(step, reader, task, device)
        if task["profile"] and engine is not None:
            annotate(engine)
            later = count(task["warmup_steps"] + task["steps"] + 1)
            found["parts"] = where_time_goes([lambda: step(reader.get(next(later)))] * 2, device)
    return found


def main(task: dict[str, Any]) -> dict[str, Any]:
    """One turn; `status` is ok or oom."""
    torch.manual_seed(0)
    torch.set_num_threads(task["threads"])
    device = torch.device(task["device"])
    try:
        if task["contender"] == CEILINGS:
            run = bench_run(task)
            found = model_ceilings.measure(run.gpt, run.tokens_per_step, DTYPES[run.config.precision], device)
        else:
            found = train(task, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom"}
    return {"status": "ok", **found}


if __name__ == "__main__":
    answer(main)
