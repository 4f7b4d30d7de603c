"""One turn of one contender of `python -m benchmarks.model`: its steps and their times, in a process of its own.

It runs as `python -m benchmarks.model.worker TASK`, with TASK in JSON. The last line printed is the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.model import ceilings as model_ceilings
from benchmarks.model.contenders import CONTENDERS, BatchesShiftedWithin, bench_run
from benchmarks.model.gpu_state import gpu_state
from benchmarks.model.options import CEILINGS
from benchmarks.model.waterfall import annotate, where_time_goes
from benchmarks.task import answer
from gptscale.common.data.loader import Prefetcher
from gptscale.common.data.sources import open_source
from gptscale.common.engine import Batch
from gptscale.common.measure.speed import peak_memory, reset_peak_memory, synchronize
from gptscale.common.model.precision import DTYPES
from gptscale.common.process.ending import is_out_of_memory


def timed_steps(
    step: Callable[[Batch], Tensor], data: Prefetcher, task: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Take the task's steps and return the seconds of each, the wait for its batch included, and the losses.

    Steps of the warm-up have losses and no seconds. peak_gib is the peak over all steps, the warm-up too, since steps replayed
    from a CUDA graph allocate nothing.
    """
    n_warmup, n_steps = task["warmup_steps"], task["steps"]
    times_s: list[float] = []
    losses: list[Tensor] = []
    reset_peak_memory(device)
    for i in range(n_warmup + n_steps):
        began = time.perf_counter()
        losses.append(step(data.get(i)))
        synchronize(device)
        times_s.append(time.perf_counter() - began)
    memory = peak_memory(device)
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        # clocks and power while one more step is under way
        step(data.get(n_warmup + n_steps))
        gpu = gpu_state(device)
        synchronize(device)
    peak_gib = memory["peak_mem_allocated_gib"] or memory["peak_rss_gib"]
    losses_nats = [loss.item() for loss in losses]
    return {"step_times_s": times_s[n_warmup:], "losses": losses_nats, "peak_gib": peak_gib, "gpu": gpu}


def train(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Run one turn of one contender, and profile its parts if the task asks for it."""
    gpt = task["gpt"]
    data = {"random": "synthetic", "text": "stdlib"}[task["data"]]
    source = open_source(data, vocab_size=gpt["vocab_size"], seed=1)
    batches = BatchesShiftedWithin(source, seq_len=gpt["block_size"], global_batch_size=task["batch_size"], seed=1)
    step, engine = CONTENDERS[task["contender"]](task)
    with Prefetcher(batches, device) as reader:
        turn = timed_steps(step, reader, task, device)
        if task["profile"] and engine is not None:
            annotate(engine)
            later = count(task["warmup_steps"] + task["steps"] + 1)
            turn["parts"] = where_time_goes([lambda: step(reader.get(next(later)))] * 2, device)
    return turn


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Run one turn of a contender or of the ceilings, and return its result, whose `status` is ok or oom."""
    torch.manual_seed(0)
    torch.set_num_threads(task["threads"])
    device = torch.device(task["device"])
    try:
        if task["contender"] == CEILINGS:
            run = bench_run(task)
            turn = model_ceilings.measure(run.gpt, run.tokens_per_step, DTYPES[run.config.precision], device)
        else:
            turn = train(task, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom"}
    return {"status": "ok", **turn}


if __name__ == "__main__":
    answer(main)
