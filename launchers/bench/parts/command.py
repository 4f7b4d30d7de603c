"""The command `gptscale bench parts`: each part of a step by every way of computing it, at the model's exact shapes.

The ways of a part run in turn, again and again, in one process, and medians are taken. Before that every way's values and
gradients are compared with the first's. The CSV is written after each row. Copying and a matrix product, measured in the same
run, are the ceilings. docs/measurements/bench_parts.md says what each way is.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.settings.checks import check_output_file, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.bench.measurement import circumstances, collect, print_written
from gptscale.launchers.bench.quiet import quiet_machine
from gptscale.launchers.bench.shape_options import ShapeOptions, check_bf16
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd

    from gptscale.launchers.bench.parts.ways import StepShape


@dataclass(frozen=True)
class PartsOptions(ShapeOptions):
    """The model whose parts are measured, which parts, and by which ways.

    On CUDA the defaults are 1.6b, bf16, batch 33. On a CPU they are hidden 320, 2 layers (only the optimizer sees them), 16
    heads, sequence 128, vocabulary 50257, fp32, batch 2.
    """

    # Heads of 20, so that attention has something to pad.
    CPU_SHAPE = GPTConfig(n_layer=2, n_head=16, n_embd=320, block_size=128, vocab_size=50257)

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
        self.names()
        check_output_file(self.csv, "--csv", "cannot be written")

    def names(self) -> list[str]:
        """Return the chosen parts, each once."""
        from gptscale.launchers.bench.parts.cases import PARTS

        return list(PARTS if self.parts == "all" else dict.fromkeys(parse_names(self.parts, PARTS, "part", "--parts")))


def resolve(options: PartsOptions) -> StepShape:
    """Return the shape with this machine's defaults, or raise ConfigError for what it cannot do."""
    import torch

    from gptscale.common.model.attention import check_attention_on
    from gptscale.common.model.precision import DTYPES
    from gptscale.launchers.bench.parts.ways import StepShape

    cuda, gpt = options.on_cuda(), options.gpt()
    dtype = options.dtype or ("bf16" if cuda else "fp32")
    check_bf16(dtype, cuda, "fp16")
    if options.parts != "all" and "attention64" in options.names() and not has_other_heads(gpt):
        what = f"hidden {gpt.n_embd} with heads of {gpt.head_dim} has no other heads of 64 to compare with"
        raise ConfigError(what, "in --parts", "leave attention64 out")
    device = torch.device("cuda" if cuda else "cpu")
    if options.flash3:
        check_attention_on(RunConfig(attention="flash3", precision=dtype), device)
    return StepShape(gpt, options.batch_size or (33 if cuda else 2), DTYPES[dtype], device, options.compiled)


def has_other_heads(gpt: GPTConfig) -> bool:
    """Return whether the hidden size could be cut into heads of 64, and is not."""
    return gpt.n_embd % 64 == 0 and gpt.head_dim != 64


def main(argv: Sequence[str]) -> int:
    """Measure, print, write, and return 0, or raise GptscaleError if two ways did not compute the same."""
    about = "Attention, loss, GELU, LayerNorm and optimizer at a model's shapes, by every way there is."
    options = parse(PartsOptions, argv, prog="gptscale bench parts", about=about)
    shape = resolve(options)
    with quiet_machine(options, "bench parts"):
        frame = measure(options, shape, "gptscale bench parts " + shlex.join(argv))
        show(frame)
        print_written(options.csv)
    differing = frame[frame.failure.str.startswith("differs")]
    if len(differing):
        first = differing.iloc[0]
        what = f"{first.part}: {first.way} {first.failure}"
        raise GptscaleError(what, "in bench parts", "do not use it; its time says nothing")
    return 0


def measure(options: PartsOptions, shape: StepShape, command: str) -> pd.DataFrame:
    """Measure the ceilings and every way of the chosen parts, and return a row for each way.

    Rows are written to the CSV as they come.
    """
    import torch

    from gptscale.common.measure.devices import device_name
    from gptscale.common.model.attention import apply_attention
    from gptscale.common.process.begin import keep_freed_memory
    from gptscale.launchers.bench.parts.cases import PARTS
    from gptscale.launchers.bench.parts.measure import measure_part
    from gptscale.launchers.bench.timing import copy_rate, matmul_rate

    names = [name for name in options.names() if name != "attention64" or has_other_heads(shape.gpt)]
    keep_freed_memory()
    if options.flash3:
        apply_attention([], "flash3")
    torch.manual_seed(0)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        shared: dict[str, Any] = {
            "copy_gb_per_s": copy_rate(shape.device),
            "product_tflops": matmul_rate(shape.dtype, shape.device) / 1e3,
            **circumstances(
                shape.gpt,
                batch_size=shape.batch_size,
                dtype=str(shape.dtype).removeprefix("torch."),
                threads=options.threads,
                device=device_name(shape.device),
                command=command,
            ),
        }
        return collect((row for name in names for row in measure_part(PARTS[name], shape)), options.csv, **shared)
    finally:
        torch.set_num_threads(threads_before)


def show(frame: pd.DataFrame) -> None:
    """Print the table of each part."""
    from gptscale.launchers.bench.parts.report import TITLES, cells, heading

    console = render.console(125, highlight=False, markup=False)
    console.print(heading(frame.iloc[0].to_dict()))
    for part, rows in frame.groupby("part", sort=False):
        console.print(render.table([str(part), *TITLES], map(cells, rows.to_dict("records"))), "")
