"""`gptscale bench parts`: each part of a step by every way there is of computing it, at the model's exact shapes, in one run.

The ways of a part run in turn, again and again, in one process; medians are taken, and before that every way's values and
gradients are compared with the first's. The CSV is written after each part. Copying and a matrix product, measured in the same
run, are the ceilings.
docs/measurements/bench_parts.md says what each way is.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from rich.console import Console
from torch import Tensor

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.speed import synchronize
from gptscale.common.model.attention import apply_attention, check_attention_on
from gptscale.common.model.precision import DTYPES
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.process.ending import is_out_of_memory
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.bench.model.ceilings import COPY_BYTES, medians
from gptscale.launchers.bench.ops.command import matmul_rate
from gptscale.launchers.bench.parts.cases import PARTS
from gptscale.launchers.bench.parts.report import show
from gptscale.launchers.bench.parts.ways import Part, Shape, Way
from gptscale.launchers.bench.shape_options import ShapeOptions, check_bf16, check_file
from gptscale.results.record.files import replace_file

CPU_SHAPE = GPTConfig(n_layer=2, n_head=16, n_embd=320, block_size=128, vocab_size=50257)  # heads of 20: padded, too
# Of the largest entry: products round in different places, in 16 bits by 2^-8 and 2^-11 each time.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class PartsOptions(ShapeOptions):
    """The model whose parts are measured; on CUDA the defaults are 1.6b, bf16, batch 33, on a CPU hidden 320, 2 layers (only
    the optimizer sees them), 16 heads, sequence 128, vocabulary 50257, fp32, batch 2.
    """

    CPU_SHAPE = CPU_SHAPE

    parts: str = "all"
    """attention,attention64,softmax,head,mlp,gelu,norm,optimizer, or all."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Of products; default fp32, on CUDA bf16."""
    compiled: bool = True
    """With what torch.compile makes, too: seconds of compilation each."""
    flash3: bool = False
    """Put FlashAttention-3 in the place of torch's flash attention (it must be installed), so that `flash` is that."""
    csv: Path | None = None
    """File for all figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for word in self.names():
            if word not in PARTS:
                raise ConfigError(f"unknown part {word!r}", "in --parts", did_you_mean(word, PARTS))
        check_file("--csv", self.csv)

    def names(self) -> list[str]:
        """The parts chosen, each once."""
        return list(PARTS) if self.parts == "all" else list(dict.fromkeys(self.parts.split(",")))


def resolve(options: PartsOptions) -> Shape:
    """The options with this machine's defaults; ConfigError for what it cannot do."""
    cuda, gpt = options.on_cuda(), options.gpt()
    dtype = options.dtype or ("bf16" if cuda else "fp32")
    check_bf16(dtype, cuda, "fp16")
    if options.parts != "all" and "attention64" in options.names() and not other_heads(gpt):
        what = f"hidden {gpt.n_embd} with heads of {gpt.head_dim} has no other heads of 64 to compare with"
        raise ConfigError(what, "in --parts", "leave attention64 out")
    device = torch.device("cuda" if cuda else "cpu")
    if options.flash3:
        check_attention_on(RunConfig(attention="flash3", precision=dtype), device)
    return Shape(gpt, options.batch_size or (33 if cuda else 2), DTYPES[dtype], device, options.compiled)


def other_heads(gpt: GPTConfig) -> bool:
    """Whether the hidden size could be cut into heads of 64, and is not."""
    return gpt.n_embd % 64 == 0 and gpt.head_dim != 64


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; GptscaleError at the end if two ways did not compute the same."""
    about = "Attention, loss, GELU, LayerNorm and optimizer at a model's shapes, by every way there is."
    options = parse(PartsOptions, argv, prog="gptscale bench parts", about=about)
    shape = resolve(options)
    names = [name for name in options.names() if name != "attention64" or other_heads(shape.gpt)]
    keep_freed_memory()
    if options.flash3:
        apply_attention([], "flash3")
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        shared = {
            "copy_gb_per_s": copy_rate(shape.device),
            "product_tflops": matmul_rate(shape.dtype, shape.device) / 1e3,
            **circumstances(shape, options.threads, argv),
        }
        rows: list[dict[str, Any]] = []
        for name in names:
            rows += measured(PARTS[name], shape)
            if options.csv:
                replace_file(options.csv, pd.DataFrame(rows).assign(**shared).to_csv(index=False).encode())
    finally:
        torch.set_num_threads(before)
    frame = pd.DataFrame(rows)
    show(frame, shared)
    if options.csv:
        print(f"wrote {options.csv}")
    wrong = frame[frame.failure.str.startswith("differs")]
    if len(wrong):
        first = wrong.iloc[0]
        what = f"{first.part}: {first.way} {first.failure}"
        raise GptscaleError(what, "in bench parts", "do not use it; its time says nothing")
    return 0


def circumstances(shape: Shape, threads: int, argv: Sequence[str]) -> dict[str, Any]:
    """What all rows share."""
    gpt = shape.gpt
    return {
        "hidden": gpt.n_embd,
        "layers": gpt.n_layer,
        "heads": gpt.n_head,
        "seq_len": gpt.block_size,
        "vocab_size": gpt.vocab_size,
        "batch_size": shape.batch_size,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "threads": threads,
        "device": device_name(shape.device),
        "torch_version": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "gptscale bench parts " + shlex.join(argv),
    }


def copy_rate(device: torch.device) -> float:
    """GB/s of STREAM's copy, read plus write, far beyond the caches."""
    source = torch.empty(COPY_BYTES[device.type] // 4, device=device).fill_(1.0)
    target = torch.empty_like(source)
    return 2 * source.nbytes / medians({"": lambda: target.copy_(source)}, device)[""] / 1e9


def measured(make: Callable[[Shape], Part], shape: Shape) -> Iterator[dict[str, Any]]:
    """A row for each way of a part: what is wrong with it, or its times."""
    torch.compiler.reset()  # its limit of compilations counts over all parts
    part = make(shape)
    Console(stderr=True).print(f"{part.name}: {len(part.ways)} ways")
    failures, errors = compare(part.ways, TOLERANCE[shape.dtype], shape.device)
    running = [way for way in part.ways if not failures[way.name]]
    peaks = {way.name: peak_gib(way.run, shape.device) for way in running}
    calls: dict[tuple[str, str], Callable[[], object]] = {(way.name, "both"): way.run for way in running}
    calls |= {(way.name, "forward"): way.forward for way in running if way.forward is not None}
    times = medians(calls, shape.device)
    first = times.get((part.ways[0].name, "both"))
    for way in part.ways:
        row: dict[str, Any] = {
            "part": part.name,
            "way": way.name,
            "failure": failures[way.name],
            "error": errors.get(way.name),
        }
        if both := times.get((way.name, "both")):
            forward = times.get((way.name, "forward"))
            row |= {
                "forward_ms": forward and forward * 1e3,
                "both_ms": both * 1e3,
                "over_first": first and both / first,
            }
            row |= {"peak_gib": peaks[way.name], "gb_per_s": part.bytes / both / 1e9 or None}
            row |= {"tflops": part.flops / both / 1e12 or None}
        yield row


def compare(ways: Sequence[Way], tolerance: float, device: torch.device) -> tuple[dict[str, str], dict[str, float]]:
    """Why each way is not timed (empty: it is), and how far it is from the first that runs, over the largest entry."""
    failures, errors = {}, {}
    expected: Sequence[Tensor] | None = None
    for way in ways:
        try:
            found = [t.detach().clone() for t in (way.result or way.run)()]
            synchronize(device)
        except Exception as error:  # Triton's are no RuntimeError; no memory, or a kernel that does not take this shape
            failures[way.name] = "out of memory" if is_out_of_memory(error) else first_line(error)
            continue
        expected = expected or found
        errors[way.name] = max(apart(a, b) for a, b in zip(found, expected, strict=True))
        agrees = errors[way.name] <= tolerance  # NaN does not
        failures[way.name] = (
            "" if agrees else f"differs by {errors[way.name]:.2g} of the largest, more than {tolerance:g}"
        )
    return failures, errors


def first_line(error: Exception) -> str:
    """What an error says, in one line; its kind too, unless that says nothing."""
    first = str(error).strip().partition("\n")[0]
    return (first if first and type(error) is RuntimeError else f"{type(error).__name__}: {first}")[:100]


def apart(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    largest = expected.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found.float() - expected.float()).abs().max() / largest)


def peak_gib(run: Callable[[], object], device: torch.device) -> float:
    """GiB allocated at most during a call, beyond what was before: torch's allocator on CUDA, its profiler on a CPU."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**30
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 2**30
