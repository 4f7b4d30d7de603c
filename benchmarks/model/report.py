"""The figures of `python -m benchmarks.model`: ratios, rows, and the parts of a step.

docs/measurements/bench_model.md defines them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.measurement import circumstances, or_dash
from benchmarks.model.ceilings import PARTS, floors, products, step_flops, step_seconds
from benchmarks.model.floors import SHARES
from benchmarks.model.options import FP8, LOSS_TOLERANCE, OF_THIS_PACKAGE, ON_CUDA, Bench, ContenderResult, differing
from gptscale.common.errors import GptscaleError
from gptscale.common.measure.devices import device_name, peak_tflops
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.measure.speed import fp8_seconds_per_token
from gptscale.common.model.precision import DTYPES


class Report:
    """The figures of one bench, or of its turns so far.

    results: of the contenders that ran in as many rounds as there are ceilings. failures: why each other contender has none.
    ours: the fastest of ours, which ratios are to; fp8 is never it.
    """

    def __init__(
        self, bench: Bench, results: Sequence[ContenderResult], ceilings: Sequence[dict[str, Any]], command: str
    ) -> None:
        self.bench = bench
        self.results = [r for r in results if r.times_s and not r.failure]
        self.failures = {r.name: r.failure or "no turn yet" for r in results if r.failure or not r.times_s}
        self.differing = differing(self.results, LOSS_TOLERANCE[bench.precision])
        candidates = [r for r in self.results if r.name != FP8]
        if not candidates:
            what = "; ".join(f"{name}: {failure}" for name, failure in self.failures.items())
            raise GptscaleError(f"no contender ran ({what})", "in benchmarks.model", "use a smaller --batch-size")
        of_ours = [r for r in candidates if r.name in OF_THIS_PACKAGE + ON_CUDA]
        self.ours = min(of_ours or candidates, key=lambda r: r.median_s)
        self.products = median_products([c["products"] for c in ceilings])
        self.copy_bytes_per_s = statistics.median(c["copy_bytes_per_s"] for c in ceilings)
        self.gemm_by_round_s = [
            [step_seconds(bench.gpt, bench.tokens, c["products"], route) for c in ceilings] for route in (None, "mm")
        ]
        self.floors_by_round = [least_seconds(bench, c) for c in ceilings]
        self.gemm_s = step_seconds(bench.gpt, bench.tokens, self.products)
        self.gemm_flops = step_flops(bench.gpt, bench.tokens)
        self.flops = model_flops_per_token(bench.gpt, bench.gpt.block_size) * bench.tokens
        self.device = device_name(torch.device(bench.device))
        self.circumstances = circumstances(
            bench.gpt,
            batch_size=bench.batch_size,
            dtype=bench.precision,
            data=bench.data,
            threads=bench.threads,
            device=self.device,
            command=command,
        )

    def ratios(self) -> dict[str, float]:
        """Return what travels between machines, each the median over rounds of a ratio within one round.

        share_of_gemm_rate: the model's operations per second in our step over those of the products alone, each by its faster
        route. share_of_mm_rate: the same by torch.mm. share_of_roofline: the least time of a step, its products at their rate
        and the rest at the rate of a copy, over that of ours. over_NAME: the time of a step of that contender over that of ours.
        """
        our_step_s = [statistics.median(times) for times in self.ours.times_s]
        fastest, by_mm = (
            statistics.median(gemm_s / step_s for gemm_s, step_s in zip(by_round, our_step_s, strict=True))
            for by_round in self.gemm_by_round_s
        )
        # the model's count has attention, that of the products has the table's padding
        model_over_products = self.flops / self.gemm_flops
        of_roofline = statistics.median(
            sum(parts.values()) / step_s for parts, step_s in zip(self.floors_by_round, our_step_s, strict=True)
        )
        shares = (fastest * model_over_products, by_mm * model_over_products, fastest, of_roofline)
        ratios = dict(zip(SHARES, shares, strict=True))
        for other in self.results:
            rounds = zip(other.times_s, our_step_s, strict=True)
            ratios[f"over_{other.name}"] = statistics.median(
                statistics.median(times) / step_s for times, step_s in rounds
            )
        return ratios

    def parts(self, result: ContenderResult) -> dict[str, float]:
        """Return the microseconds per token of each part, as the profile splits the median step.

        Profiling itself takes time, so that its own seconds are not used.
        """
        scale = result.median_s / sum(result.parts.values())
        return {part: seconds * scale / self.bench.tokens * 1e6 for part, seconds in result.parts.items()}

    def floors(self) -> dict[str, float]:
        """Return the microseconds per token that each part cannot go below, at the rates measured in this bench."""
        least = least_seconds(self.bench, {"products": self.products, "copy_bytes_per_s": self.copy_bytes_per_s})
        return {part: seconds / self.bench.tokens * 1e6 for part, seconds in least.items()}

    def row(self, result: ContenderResult) -> dict[str, Any]:
        """Return a contender's figures."""
        p10, median, p90 = np.quantile(result.steps_s, (0.1, 0.5, 0.9))
        return {
            "kind": "contender",
            "name": result.name,
            "seconds": median,
            "seconds_p10": p10,
            "seconds_p90": p90,
            "tokens_per_s": self.bench.tokens / median,
            **self.utilisation(result.name, median),
            "peak_gib": result.peak_gib,
            "over_ours": self.ratios()[f"over_{result.name}"],
            "steps_timed": len(result.steps_s),
            "loss_last": result.losses[-1],
            "failure": self.differing.get(result.name),
            **{k: v for k, v in result.gpu.items() if k != "name"},
        }

    def utilisation(self, name: str, step_s: float) -> dict[str, float | None]:
        """Return the TFLOP/s of the model's count and their share of a peak, in columns of their own for fp8.

        These are the columns of a run's results. fp8_tflops: as if all were bf16. fp8_mixed_utilisation: the time that the
        operations take at the peaks of both precisions, over the step's.
        """
        tflops = self.flops / step_s / 1e12
        peak, fp8_peak = (peak_tflops(self.device, precision) for precision in (self.bench.precision, "fp8"))
        cells = dict.fromkeys(("tflops", "of_gemm_rate", "mfu", "fp8_tflops", "fp8_mixed_utilisation"))
        if name == FP8:
            token_s = fp8_seconds_per_token(self.bench.gpt, self.bench.gpt.block_size, fp8_peak, peak)
            mixed = None if token_s is None else token_s * self.bench.tokens / step_s
            return {**cells, "fp8_tflops": tflops, "fp8_mixed_utilisation": mixed}
        of_gemm_rate = tflops / (self.gemm_flops / self.gemm_s / 1e12)
        return {**cells, "tflops": tflops, "of_gemm_rate": of_gemm_rate, "mfu": None if peak is None else tflops / peak}

    def frame(self) -> pd.DataFrame:
        """Return every figure, a row each, whose column `kind` says what it is of."""
        rows: list[dict[str, Any]] = [self.row(result) for result in self.results]
        rows += [{"kind": "failed", "name": name, "failure": failure} for name, failure in self.failures.items()]
        for p in products(self.bench.gpt, self.bench.tokens):
            for route, call_s in self.products[f"{p.name} {p.how}"].items():
                name = f"{p.name} {p.how} by {route}"
                row = {"kind": "product", "name": name, "seconds": call_s * p.per_step}
                rows.append(row | {"tflops": p.flops / call_s / 1e12})
        for route_or_none, how in ((None, "each by its faster route"), ("mm", "mm")):
            gemm_s = step_seconds(self.bench.gpt, self.bench.tokens, self.products, route_or_none)
            total = {"kind": "ceiling", "name": f"matrix products, {how}", "seconds": gemm_s}
            rows.append(total | {"tflops": self.gemm_flops / gemm_s / 1e12})
        rows.append({"kind": "ceiling", "name": "copy", "gb_per_s": self.copy_bytes_per_s / 1e9})
        least = self.floors()
        for result in (r for r in self.results if r.parts):
            for part, us in self.parts(result).items():
                name = f"{result.name}: {part}"
                rows.append({"kind": "part", "name": name, "us_per_token": us, "floor_us_per_token": least[part]})
        rows += [{"kind": "ratio", "name": name, "ratio": value} for name, value in self.ratios().items()]
        return pd.DataFrame(rows).assign(**self.circumstances)

    def product_cells(self) -> list[list[str]]:
        """Return a line for each matrix: its name, and the TFLOP/s of its three products by each route."""
        lines: dict[str, list[str]] = {}
        for p in products(self.bench.gpt, self.bench.tokens):
            by_route = self.products[f"{p.name} {p.how}"]
            rates = (f"{p.flops / call_s / 1e12:.4g} {route}" for route, call_s in by_route.items())
            lines.setdefault(p.name, [p.name]).append(", ".join(rates))
        return list(lines.values())

    def contender_cells(self) -> list[list[str]]:
        """Return a line for each contender: name, ms, tokens/s, TFLOP/s, of GEMM rate, MFU, GiB, time over ours."""
        return [
            [
                row["name"],
                f"{row['seconds'] * 1e3:,.1f} ({row['seconds_p10'] * 1e3:,.1f}-{row['seconds_p90'] * 1e3:,.1f})",
                f"{row['tokens_per_s']:,.0f}",
                or_dash(row["tflops"], ".4g"),
                or_dash(row["of_gemm_rate"], ".1%"),
                or_dash(row["mfu"], ".1%"),
                f"{row['peak_gib']:.2f}",
                f"{row['over_ours']:.3f}",
            ]
            for row in map(self.row, self.results)
        ]

    def part_cells(self) -> list[list[str]]:
        """Return a line for each part of our step, and one of all: us per token, share, floor, and what lies above it."""
        measured, least = self.parts(self.ours), self.floors()
        total_us = sum(measured.values())
        figures = [(part, measured[part], least[part]) for part in PARTS]
        figures.append(("all", total_us, sum(least.values())))
        return [
            [part, f"{us:,.2f}", f"{us / total_us:.1%}", f"{floor:,.2f}", f"{us - floor:,.2f}"]
            for part, us, floor in figures
        ]


def least_seconds(bench: Bench, ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Return the least time of each part of a step, at the rates measured."""
    return floors(bench.gpt, bench.tokens, ceilings, DTYPES[bench.precision])  # type: ignore[index]


def median_products(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the seconds of each product by each route, medians over rounds."""
    return {
        name: {route: statistics.median(r[name][route] for r in rounds) for route in by_route}
        for name, by_route in rounds[0].items()
    }
