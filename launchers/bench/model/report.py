"""What `gptscale bench model` says: ratios, tables, CSV. docs/measurements/bench_model.md has the definitions."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from gptscale.common.errors import GptscaleError
from gptscale.common.measure.devices import device_name, peak_tflops
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.measure.speed import fp8_seconds_per_token
from gptscale.common.model.precision import DTYPES
from gptscale.launchers.bench.model.ceilings import PARTS, floors, products, step_flops, step_seconds
from gptscale.launchers.bench.model.command import FP8, LOSS_TOLERANCE, ON_CUDA, OURS, Bench, Found, differing
from gptscale.launchers.bench.model.floors import SHARES
from gptscale.results.record.files import replace_file


class Report:
    """The figures of one run, or of its turns so far.

    found: contenders with their times, those that ran in as many rounds as there are `ceilings`; ceilings: what
    model_ceilings measured in each.
    """

    def __init__(self, bench: Bench, found: Sequence[Found], ceilings: Sequence[dict[str, Any]], command: str) -> None:
        self.bench, self.command = bench, command
        self.found = [f for f in found if f.times_s and not f.failure]
        self.failures = {f.name: f.failure or "no turn yet" for f in found if f.failure or not f.times_s}
        self.differing = differing(self.found, LOSS_TOLERANCE[bench.precision])
        measures = [f for f in self.found if f.name != FP8]
        if not measures:
            what = "; ".join(f"{name}: {failure}" for name, failure in self.failures.items())
            raise GptscaleError(f"no contender ran ({what})", "in bench model", "use a smaller --batch-size")
        mine = [f for f in measures if f.name in OURS + ON_CUDA]
        self.ours = min(mine or measures, key=lambda f: f.median_s)  # the fastest of ours is what ratios are to
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

    def ratios(self) -> dict[str, float]:
        """What travels between machines, each the median over rounds of a ratio within one round.

        share_of_gemm_rate: the model's operations per second in our step over those of the products alone, each by its faster
        route; share_of_mm_rate: by torch.mm. share_of_roofline: the least time of a step, its products at their rate and the
        rest at the rate of a copy, over that of ours. over_NAME: the time of a step of that contender over that of ours.
        """
        ours = [statistics.median(times) for times in self.ours.times_s]
        fastest, mm = (
            statistics.median(gemm / step for gemm, step in zip(by_round, ours, strict=True))
            for by_round in self.gemm_by_round_s
        )
        more = self.flops / self.gemm_flops  # attention counts in the model, the table's padding in the products
        least = statistics.median(
            sum(parts.values()) / step for parts, step in zip(self.floors_by_round, ours, strict=True)
        )
        found = dict(zip(SHARES, (fastest * more, mm * more, fastest, least), strict=True))
        for other in self.found:
            by_round = [statistics.median(times) / our for times, our in zip(other.times_s, ours, strict=True)]
            found[f"over_{other.name}"] = statistics.median(by_round)
        return found

    def parts(self, found: Found) -> dict[str, float]:
        """Microseconds per token of each part, as its profile splits the median step (profiling itself takes time)."""
        scale = found.median_s / sum(found.parts.values())
        return {part: seconds * scale / self.bench.tokens * 1e6 for part, seconds in found.parts.items()}

    def floors(self) -> dict[str, float]:
        """Microseconds per token that each part cannot go below, at the rates measured in this run."""
        least = least_seconds(self.bench, {"products": self.products, "copy_bytes_per_s": self.copy_bytes_per_s})
        return {part: seconds / self.bench.tokens * 1e6 for part, seconds in least.items()}

    def row(self, found: Found) -> dict[str, Any]:
        """A contender's figures."""
        p10, median, p90 = np.quantile(found.steps_s, (0.1, 0.5, 0.9))
        return {
            "kind": "contender",
            "name": found.name,
            "seconds": median,
            "seconds_p10": p10,
            "seconds_p90": p90,
            "tokens_per_s": self.bench.tokens / median,
            **self.utilisation(found.name, median),
            "peak_gib": found.peak_gib,
            "over_ours": self.ratios()[f"over_{found.name}"],
            "steps_timed": len(found.steps_s),
            "loss_last": found.losses[-1],
            "failure": self.differing.get(found.name),
            **{k: v for k, v in found.gpu.items() if k != "name"},
        }

    def utilisation(self, name: str, step_s: float) -> dict[str, float | None]:
        """TFLOP/s of the model's count, and what share that is of a peak; of fp8 in columns of its own, as in a run's results.

        fp8_tflops: as if all were bf16. fp8_mixed_utilisation: the time that the operations take at the peaks of both precisions,
        over the step's.
        """
        tflops = self.flops / step_s / 1e12
        peak, fp8_peak = (peak_tflops(self.device, precision) for precision in (self.bench.precision, "fp8"))
        found = dict.fromkeys(("tflops", "of_gemm_rate", "mfu", "fp8_tflops", "fp8_mixed_utilisation"))
        if name == FP8:
            token_s = fp8_seconds_per_token(self.bench.gpt, self.bench.gpt.block_size, fp8_peak, peak)
            mixed = None if token_s is None else token_s * self.bench.tokens / step_s
            return {**found, "fp8_tflops": tflops, "fp8_mixed_utilisation": mixed}
        of_gemm_rate = tflops / (self.gemm_flops / self.gemm_s / 1e12)
        return {**found, "tflops": tflops, "of_gemm_rate": of_gemm_rate, "mfu": None if peak is None else tflops / peak}

    def frame(self) -> pd.DataFrame:
        """Every figure, a row each; `kind` says what it is of."""
        rows: list[dict[str, Any]] = [self.row(f) for f in self.found]
        rows += [{"kind": "failed", "name": name, "failure": failure} for name, failure in self.failures.items()]
        for p in products(self.bench.gpt, self.bench.tokens):
            for route, each in self.products[f"{p.name} {p.how}"].items():
                name = f"{p.name} {p.how} by {route}"
                rows.append(
                    {"kind": "product", "name": name, "seconds": each * p.per_step, "tflops": p.flops / each / 1e12}
                )
        for which, how in ((None, "each by its faster route"), ("mm", "mm")):
            gemm_s = step_seconds(self.bench.gpt, self.bench.tokens, self.products, which)
            total = {"kind": "ceiling", "name": f"matrix products, {how}", "seconds": gemm_s}
            rows.append(total | {"tflops": self.gemm_flops / gemm_s / 1e12})
        rows.append({"kind": "ceiling", "name": "copy", "gb_per_s": self.copy_bytes_per_s / 1e9})
        least = self.floors()
        for found in (f for f in self.found if f.parts):
            for part, us in self.parts(found).items():
                name = f"{found.name}: {part}"
                rows.append({"kind": "part", "name": name, "us_per_token": us, "floor_us_per_token": least[part]})
        rows += [{"kind": "ratio", "name": name, "ratio": value} for name, value in self.ratios().items()]
        frame = pd.DataFrame(rows)
        for name, value in self.circumstances().items():
            frame[name] = value
        return frame

    def circumstances(self) -> dict[str, Any]:
        """What all rows share."""
        b, gpt = self.bench, self.bench.gpt
        shape = {"hidden": gpt.n_embd, "layers": gpt.n_layer, "heads": gpt.n_head, "seq_len": gpt.block_size}
        return {
            **shape,
            "vocab_size": gpt.vocab_size,
            "batch_size": b.batch_size,
            "dtype": b.precision,
            "data": b.data,
            "threads": b.threads,
            "device": self.device,
            "torch_version": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "command": self.command,
        }

    def show(self) -> None:
        """The tables."""
        console = Console(width=None if Console().is_terminal else 125, highlight=False, markup=False)
        c = self.circumstances()
        console.print(
            f"{c['device']}, torch {c['torch_version']}, {c['threads']} threads, {c['dtype']}, {c['data']} tokens"
        )
        sizes = f"hidden {c['hidden']}, {c['layers']} layers, {c['heads']} heads, sequence {c['seq_len']}"
        console.print(f"{sizes}, vocabulary {c['vocab_size']}, batch {c['batch_size']}\n")
        console.print(self._products_table())
        copy = f"copy {self.copy_bytes_per_s / 1e9:,.1f} GB/s"
        rate = self.gemm_flops / self.gemm_s / 1e12
        console.print(f"all products of a step {self.gemm_s * 1e3:,.1f} ms, {rate:.4g} TFLOP/s; {copy}\n")
        console.print(self._contenders_table())
        for name, failure in (self.failures | self.differing).items():
            console.print(f"{name}: {failure}")
        for row in (self.row(f) for f in self.found if f.name == FP8):
            mixed = said(row["fp8_mixed_utilisation"], ".1%")
            console.print(
                f"{FP8}: {row['fp8_tflops']:.4g} bf16-equivalent TFLOP/s, {mixed} of the mixed fp8 and bf16 peak"
            )
        if self.ours.gpu:
            console.print("GPU under load: " + ", ".join(f"{k} {v}" for k, v in self.ours.gpu.items() if v is not None))
        shares = self.ratios()
        line = ", ".join(f"{name.replace('_', ' ')} {shares[name]:.1%}" for name in SHARES)
        console.print(f"{self.ours.name}: {line}\n")
        if self.ours.parts:
            console.print(self._parts_table())

    def _products_table(self) -> Table:
        table = Table("TFLOP/s of", "forward", "grad-input", "grad-weight", box=None, pad_edge=False)
        rates: dict[str, list[str]] = {}
        for p in products(self.bench.gpt, self.bench.tokens):
            by_route = self.products[f"{p.name} {p.how}"]
            said = (f"{p.flops / each / 1e12:.4g} {route}" for route, each in by_route.items())
            rates.setdefault(p.name, []).append(", ".join(said))
        for name, cells in rates.items():
            table.add_row(name, *cells)
        return table

    def _contenders_table(self) -> Table:
        titles = (
            "contender",
            "step ms (p10-p90)",
            "tokens/s",
            "TFLOP/s",
            "of GEMM rate",
            "MFU",
            "peak GiB",
            "time / ours",
        )
        table = Table(*titles, box=None, pad_edge=False)
        for row in map(self.row, self.found):
            times = f"{row['seconds'] * 1e3:,.1f} ({row['seconds_p10'] * 1e3:,.1f}-{row['seconds_p90'] * 1e3:,.1f})"
            table.add_row(
                row["name"],
                times,
                f"{row['tokens_per_s']:,.0f}",
                said(row["tflops"], ".4g"),
                said(row["of_gemm_rate"], ".1%"),
                said(row["mfu"], ".1%"),
                f"{row['peak_gib']:.2f}",
                f"{row['over_ours']:.3f}",
            )
        return table

    def _parts_table(self) -> Table:
        table = Table(
            f"{self.ours.name}, us per token", "measured", "share", "floor", "above it", box=None, pad_edge=False
        )
        found, least = self.parts(self.ours), self.floors()
        for part in (*PARTS, "all"):
            us = sum(found.values()) if part == "all" else found[part]
            low = sum(least.values()) if part == "all" else least[part]
            table.add_row(part, f"{us:,.2f}", f"{us / sum(found.values()):.1%}", f"{low:,.2f}", f"{us - low:,.2f}")
        return table

    def write_csv(self, path: Path) -> None:
        """Every figure."""
        replace_file(path, self.frame().to_csv(index=False).encode())

    def write(self, table: Path | None, picture: Path | None) -> None:
        """CSV and PNG, where asked for."""
        if table:
            self.write_csv(table)
            print(f"wrote {table}")
        if picture:
            from gptscale.launchers.bench.model.picture import draw

            draw(self, picture)
            print(f"wrote {picture}")


def least_seconds(bench: Bench, ceilings: Mapping[str, Any]) -> dict[str, float]:
    """The least time of each part of a step, at the rates measured."""
    return floors(bench.gpt, bench.tokens, ceilings, DTYPES[bench.precision])  # type: ignore[index]


def said(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def median_products(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Seconds of each product by each route: medians over rounds."""
    return {
        name: {route: statistics.median(r[name][route] for r in rounds) for route in by_route}
        for name, by_route in rounds[0].items()
    }
