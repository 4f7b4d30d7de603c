"""What `gptscale bench` times: each contender is a function that returns one step, or a loop of them, over the same shape.

Run as `python -m gptscale.launchers.bench.model.loop_contenders TASK`, TASK being JSON; the last line printed is the result.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.common.data.loader import Batches, Prefetcher
from gptscale.common.data.sources import open_source
from gptscale.common.engine import Batch
from gptscale.common.measure.speed import peak_memory, synchronize
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.precision import autocast
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.process.task import answer
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.train import train
from gptscale.recipes.single import SingleConfig, build
from gptscale.results.record.recorder import Recorder

WARMUP_STEPS = 3
LR = 5e-4


def the_run(task: dict[str, Any], **changes: Any) -> Run:
    """The task as a run of `single`."""
    gpt = GPTConfig(**task["gpt"])
    steps = WARMUP_STEPS + task["steps"]
    options = {
        "steps": steps,
        "precision": task["precision"],
        "activation_checkpointing": task["activation_checkpointing"],
        "lr": LR,
    }
    config = RunConfig(**{**options, "seq_len": gpt.block_size, **changes})
    return Run(
        "single",
        config,
        gpt,
        plan_batch(1, global_batch_size=task["batch_size"]),
        World.from_environment(config.device, config.dist_timeout_s),
    )


def random_batch(run: Run, step: int = 0) -> Batch:
    """Random ids on the run's device."""
    ids = torch.randint(0, run.gpt.vocab_size, (run.batch.global_batch_size, run.seq_len + 1))
    return Batch(step, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(run.world.device)


def handout(task: dict[str, Any]) -> Callable[[], object]:
    """The exercise's baseline as it stands: transformers' model, whole logits, shifted cross entropy, plain AdamW.

    Dropout is 0 (its default of 0.1 would be other work); the KV cache stays on without checkpointing, as it has it.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    run = the_run(task)
    gpt, device = run.gpt, run.world.device
    checkpointing = task["activation_checkpointing"] != "none"
    config = GPT2Config(
        vocab_size=gpt.vocab_size, n_positions=gpt.block_size, n_embd=gpt.n_embd, n_layer=gpt.n_layer, n_head=gpt.n_head,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    model = model.to(device).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    ids = random_batch(run).inputs

    def step() -> None:
        optimizer.zero_grad()
        with autocast(run.config.precision, device):
            loss = handout_loss(model, ids, use_cache=not checkpointing)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def handout_loss(model: Any, ids: Tensor, *, use_cache: bool) -> Tensor:
    """The exercise's forward and loss: a mask of ones, whole logits, and copies of them and of the ids, shifted by one."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=use_cache)[0]
    shifted, labels = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def single(task: dict[str, Any], compile: bool = False) -> Callable[[], object]:
    """The recipe's engine, in a process set up as its worker is: clipping and guard included, which the baseline lacks."""
    keep_freed_memory()
    run = the_run(task, compile=compile)
    engine, batch = build(run, SingleConfig()), random_batch(run)
    return lambda: engine.train_step(batch, LR)


def gemm(task: dict[str, Any]) -> Callable[[], object]:
    """The matrix products of one step at their exact shapes, forward and both of backward: what no step can beat."""
    run = the_run(task)
    h, rows, device = run.gpt.n_embd, run.batch.global_batch_size * run.seq_len, run.world.device
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[run.config.precision]
    shapes = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]

    def tensors(k: int, n: int) -> tuple[Tensor, ...]:
        made = [torch.randn(s, device=device).to(dtype) for s in ((rows, k), (k, n), (rows, n), (rows, k), (k, n))]
        return tuple(made)

    blocks, head = [tensors(k, n) for k, n in shapes], tensors(h, run.gpt.padded_vocab_size)

    def products(x: Tensor, w: Tensor, y: Tensor, dx: Tensor, dw: Tensor) -> None:
        torch.mm(x, w, out=y)
        torch.mm(y, w.t(), out=dx)
        torch.mm(x.t(), y, out=dw)

    def step() -> None:
        for _ in range(run.gpt.n_layer):
            for operands in blocks:
                products(*operands)
        products(*head)

    return step


def bare_loop(task: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """What one would write by hand for the same model: no engine, no recorder, no files; the loss read each step."""
    run = the_run(task)
    model = materialise(meta_gpt(run), run, run.world.device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    ids = np.random.default_rng(0).integers(0, run.gpt.vocab_size, 10**6)
    n, times = run.batch.global_batch_size * run.seq_len, []
    for step in range(run.config.steps):
        began = time.perf_counter()
        tokens = torch.from_numpy(ids[step * n : (step + 1) * n + 1]).to(run.world.device)
        inputs, targets = tokens[:-1].view(-1, run.seq_len), tokens[1:].view(-1, run.seq_len)
        with autocast(run.config.precision, run.world.device):
            loss = model(inputs, targets) / n
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
        times.append(time.perf_counter() - began)
    return times[WARMUP_STEPS:], {}


def our_loop(task: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """The package's loop with all it does: memory-mapped tokens read ahead, engine, CSV, TensorBoard, a line per step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.bin"
        run = the_run(task, data=str(file), out=Path(folder), timing_warmup_steps=WARMUP_STEPS)
        np.random.default_rng(0).integers(0, run.gpt.vocab_size, 10**7).astype("<u2").tofile(file)
        source = open_source(str(file), vocab_size=run.gpt.vocab_size)
        batches = Batches(source, seq_len=run.seq_len, global_batch_size=run.batch.global_batch_size, seed=0)
        engine = build(run, SingleConfig())
        with (
            Recorder(run, Path(folder), sequences=batches.sequences) as recorder,
            Prefetcher(batches, run.world.device) as data,
        ):
            train(engine, data, recorder, lr_at=lambda step: LR, start=0, steps=run.config.steps)
        fraction = recorder.speed().data_wait_fraction
        return recorder.step_times_s, {"data_wait_fraction": fraction, "data": "10,000,000 memory-mapped uint16 tokens"}


# Operators by what they are for; the loss is the head's softmax, its products count as matrix products.
PARTS = {
    "matrix products": ("mm", "addmm", "bmm", "matmul", "linear"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "loss": ("log_softmax", "exp_", "gather", "scatter_add"),
    "optimizer": ("fused_adamw",),
    "GELU": ("gelu",),
    "LayerNorm": ("layer_norm",),
    "adds, copies, fills": ("add", "copy_", "mul", "zero", "fill", "sum", "div", "embedding"),
}


def where_time_goes(step: Callable[[], object]) -> dict[str, float]:
    """Shares of one step's operator time by part, from torch's profiler."""
    with torch.profiler.profile() as profile:
        step()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        name = event.key.removeprefix("aten::")
        part = next((part for part, words in PARTS.items() if any(w in name for w in words)), "other")
        times[part] = times.get(part, 0.0) + (event.self_device_time_total or event.self_cpu_time_total)
    total = sum(times.values())
    return {part: t / total for part, t in sorted(times.items(), key=lambda item: -item[1])}


def timed(step: Callable[[], object], n_steps: int, device: torch.device) -> list[float]:
    """Seconds of each of `n_steps` steps after warm-up."""
    times = []
    for i in range(WARMUP_STEPS + n_steps):
        began = time.perf_counter()
        step()
        synchronize(device)
        if i >= WARMUP_STEPS:
            times.append(time.perf_counter() - began)
    return times


STEPS: dict[str, Callable[[dict[str, Any]], Callable[[], object]]] = {
    "handout": handout,
    "single": single,
    "single_compiled": lambda task: single(task, compile=True),
    "gemm": gemm,
}
LOOPS = {"bare_loop": bare_loop, "our_loop": our_loop}


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Run one contender; its step times, its peak memory, and what else it has to say."""
    torch.manual_seed(0)
    torch.set_num_threads(task["threads"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    details: dict[str, Any] = {}
    if task["contender"] in LOOPS:
        times, details = LOOPS[task["contender"]](task)
    else:
        step = STEPS[task["contender"]](task)
        times = timed(step, task["steps"], device)
    memory = peak_memory(device)
    if task["contender"] == "single":
        details["where_time_goes"] = where_time_goes(step)
    peak_gib = memory.rss_gib if memory.allocated_gib is None else memory.allocated_gib
    return {"step_times_s": times, "peak_gib": peak_gib, "details": details}


if __name__ == "__main__":
    answer(main)
