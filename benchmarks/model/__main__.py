"""The package's step between what no step can beat and what one would use instead: `python -m benchmarks.model`.

Ceilings (the step's matrix products alone, and copying), ours, the exercise's baseline, and a script written by hand run in
turn, A B C A B C, each in a process of its own. Medians over rounds are compared. All train one model from the same weights on
the same batches, and the bench ends with an error if their losses differ. The CSV is written as soon as there are figures, so
that a bench that is cut short leaves what it measured. docs/measurements/bench_model.md defines every figure.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import collect, or_dash, print_written, tell, write_csv
from benchmarks.model.floors import SHARES, check_floors, read_floors
from benchmarks.model.options import (
    CEILINGS,
    FP8,
    LOSS_TOLERANCE,
    OF_THIS_PACKAGE,
    ON_CUDA,
    OUT_OF_MEMORY,
    WORKER,
    Bench,
    ContenderResult,
    ModelBenchOptions,
    check_losses,
    comparable,
    resolve,
)
from benchmarks.quiet import quiet_machine
from benchmarks.task import run_worker
from gptscale.common.errors import GptscaleError
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd

    from benchmarks.model.report import Report
    from benchmarks.model.scale import ScalingLine


def main(argv: Sequence[str]) -> int:
    """Measure, check, print, write, and return the exit status: 1 if a floor is missed or a contender failed."""
    about = "Our step, the exercise's, one written by hand, and what none can beat: in one run."
    options = parse(ModelBenchOptions, argv, prog="python -m benchmarks.model", about=about)
    if options.scale != "none" and options.contenders == "all":
        options = replace(options, contenders="single")
    bench = resolve(options)
    with quiet_machine(options, "benchmarks.model"):
        return _measure_and_show(options, bench, "python -m benchmarks.model " + shlex.join(argv))


def _measure_and_show(options: ModelBenchOptions, bench: Bench, command: str) -> int:
    if options.scale != "none":
        return scale(options, bench, command)
    from benchmarks.model.picture import draw
    from benchmarks.model.report import Report

    names = options.names(bench)
    floors = read_floors(options.floors, names) if options.floors else []

    def save(results: list[ContenderResult], ceilings: list[dict[str, Any]]) -> None:
        if options.csv:
            write_csv(Report(bench, results, ceilings, command).frame(), options.csv)

    results, ceilings = measure(bench, names, save)
    report = Report(bench, results, ceilings, command)
    show(report)
    write_csv(report.frame(), options.csv)
    if options.png:
        draw(report, options.png)
    print_written(options.csv, options.png)
    # The figures took minutes, so that they are shown before the losses are compared.
    check_losses(report.results, LOSS_TOLERANCE[bench.precision])
    is_broken = any(result.failure not in ("", OUT_OF_MEMORY) for result in results)
    return max(check_floors(report.ratios(), floors), int(is_broken))


def measure(
    bench: Bench, names: Sequence[str], save: Callable[[list[ContenderResult], list[dict[str, Any]]], None]
) -> tuple[list[ContenderResult], list[dict[str, Any]]]:
    """Run all contenders and the ceilings in turn, and return their results.

    A contender that fails is reported, and not tried again. `save` is called whenever the results so far are comparable.
    """
    results = [ContenderResult(name) for name in names]
    ceilings: list[dict[str, Any]] = []
    for turn in range(1, bench.rounds + 1):
        tell(f"round {turn} of {bench.rounds}: {CEILINGS}")
        ceilings.append(run_worker(WORKER, bench.task(CEILINGS)))
        if ceilings[-1]["status"] == "oom":
            raise GptscaleError("the matrix products alone do not fit", "on this device", "use a smaller --batch-size")
        for result in (r for r in results if not r.failure):
            tell(f"round {turn} of {bench.rounds}: {result.name}")
            profile = turn == bench.rounds and result.name in OF_THIS_PACKAGE + ON_CUDA and result.name != FP8
            try:
                result.add_turn(run_worker(WORKER, bench.task(result.name, profile)))
            except GptscaleError as error:
                # Hours of other figures may depend on going on. The exit status will be 1.
                result.failure = error.what
                tell(f"gptscale: error: {error}")
            if comparable(results, rounds=turn):
                save(results, ceilings)
    return results, ceilings


def show(report: Report) -> None:
    """Print the tables of a report."""
    console = render.console(125, highlight=False)
    c = report.circumstances
    console.print(
        f"{c['device']}, torch {c['torch_version']}, {c['threads']} threads, {c['dtype']}, {c['data']} tokens"
    )
    sizes = f"hidden {c['hidden']}, {c['layers']} layers, {c['heads']} heads, sequence {c['seq_len']}"
    console.print(f"{sizes}, vocabulary {c['vocab_size']}, batch {c['batch_size']}\n")
    titles = ["TFLOP/s of", "forward", "grad-input", "grad-weight"]
    console.print(render.table(titles, report.product_cells()))
    copy = f"copy {report.copy_bytes_per_s / 1e9:,.1f} GB/s"
    rate = report.gemm_flops / report.gemm_s / 1e12
    console.print(f"all products of a step {report.gemm_s * 1e3:,.1f} ms, {rate:.4g} TFLOP/s; {copy}\n")
    titles = ["contender", "step ms (p10-p90)", "tokens/s", "TFLOP/s", "of GEMM rate", "MFU", "peak GiB", "time / ours"]
    console.print(render.table(titles, report.contender_cells()))
    for name, failure in (report.failures | report.differing).items():
        console.print(f"{name}: {failure}")
    for row in (report.row(result) for result in report.results if result.name == FP8):
        mixed = or_dash(row["fp8_mixed_utilisation"], ".1%")
        console.print(f"{FP8}: {row['fp8_tflops']:.4g} bf16-equivalent TFLOP/s, {mixed} of the mixed fp8 and bf16 peak")
    if report.ours.gpu:
        figures = (f"{name} {value}" for name, value in report.ours.gpu.items() if value is not None)
        console.print("GPU under load: " + ", ".join(figures))
    ratios = report.ratios()
    shares = ", ".join(f"{name.replace('_', ' ')} {ratios[name]:.1%}" for name in SHARES)
    console.print(f"{report.ours.name}: {shares}\n")
    if report.ours.parts:
        titles = [f"{report.ours.name}, us per token", "measured", "share", "floor", "above it"]
        console.print(render.table(titles, report.part_cells()))


def scale(options: ModelBenchOptions, bench: Bench, command: str) -> int:
    """Measure one contender at each size of --scale, fit a line, print, write, and return exit status 0."""
    import torch

    from benchmarks.model.picture import draw_scaling
    from benchmarks.model.scale import check_scale, fit, point_row, points
    from gptscale.common.measure.devices import device_name

    check_scale(options)
    name, kind = options.contenders, options.scale
    benches = points(options, bench)
    ceilings = run_worker(WORKER, benches[0].task(CEILINGS))["products"]

    def measure_point(point: Bench) -> dict[str, Any]:
        tell(f"{name}: sequence {point.gpt.block_size}, {point.gpt.n_layer} layers, batch {point.batch_size}")
        return point_row(point, name, run_worker(WORKER, point.task(name)), ceilings)

    device = device_name(torch.device(bench.device))
    rows = map(measure_point, benches)
    frame = collect(rows, options.csv, device=device, torch_version=torch.__version__, command=command)
    line = fit(frame, kind)
    show_scaling(frame, line, kind)
    if options.png:
        draw_scaling(frame, line, kind, options.png)
    print_written(options.csv, options.png)
    return 0


def show_scaling(frame: pd.DataFrame, line: ScalingLine | None, kind: str) -> None:
    """Print the table of --scale and the line fitted to it."""
    from benchmarks.model.scale import AXIS, fit_gemm, point_cells

    console = render.console(120, highlight=False)
    first = frame.iloc[0]
    console.print(
        f"{first.device}, torch {first.torch_version}, {first.threads} threads, {first['dtype']}, {first.contender}"
    )
    console.print(
        f"hidden {first.hidden}, {first.heads} heads, vocabulary {first.vocab_size}, the same tokens per step"
    )
    titles = [AXIS[kind], "batch", "tokens/s", "us/token", "at the GEMM rate", "of GEMM rate", "peak GiB"]
    console.print(render.table(titles, (point_cells(point, kind) for point in frame.to_dict("records"))))
    if line is not None:
        console.print(f"us per token = {line.in_words(kind)}; no point is further from it than {line.worst:.1%}")
        console.print(f"at the GEMM rate it would be {fit_gemm(frame, kind).in_words(kind)}")


if __name__ == "__main__":
    sys.exit(start(main))
