"""Does the simulation put splits in the order that others measured? Tensor, data and pipeline ranks in all mixtures.

python -m benchmarks.foresight.split_times --table FILE [--every 10] [--least 4] [--csv FILE]

FILE is one of vTrain's tables of Megatron-DeepSpeed on A100 (VIA-Research/vTrain, data/ground_truth_single.csv or _multi.csv).
A group is a model, a number of GPUs and a global batch: its rows differ in the split and the micro-batch alone. Each row is
simulated as the recipe that splits so, with full recompute as theirs. Of each group the fastest by simulation is the one that
would be recommended; beside it stands the fastest that was measured.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measurement import print_written, tell, write_csv
from gptscale.common.errors import DataError, GptscaleError
from gptscale.common.process.world import World
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.settings.user_file import read_rows
from gptscale.foresight.plan.enumeration import Candidate
from gptscale.foresight.plan.question import Cluster, gpu_cluster
from gptscale.foresight.plan.rows import PlannedRow, Tried, places_of
from gptscale.foresight.plan.trials import simulated
from gptscale.foresight.simulate.interpreters import prepare_mock
from gptscale.launchers.cli import start
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import get

FILE_BYTES_MAX = 2**26
GPUS, BATCH, MICRO, HIDDEN, HEADS, LAYERS, TOKENS, MEASURED = (
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "iteration time (ms)",
)  # fmt: skip
AXES = {"tp": "tensor parallelism", "dp": "data parallelism", "pp": "pipeline parallelism"}
GROUP = (GPUS, BATCH, HIDDEN, LAYERS)
COLUMNS = (*GROUP, MICRO, HEADS, TOKENS, *AXES.values(), MEASURED)
PER_NODE = 8
# Both nodes of the authors: eight A100 behind switches, and 800 Gb/s between nodes (vTrain, arXiv 2312.12391, section 4).
DEVICE, LINKS = "a100-80", "ib-800"
# GPT-2's, filled up to a multiple of 128 for each tensor rank as Megatron does.
VOCABULARY = 51200
# A split that is slower than the best measured one by less is as good.
AS_GOOD = 1.05


@dataclass(frozen=True)
class SplitTimeOptions:
    """Which groups of the table to simulate."""

    table: Path
    """A table of vTrain."""
    every: int = 10
    """Every so manieth group."""
    least: int = 4
    """Groups with fewer rows are left out."""
    csv: Path | None = None
    """A row for each that was compared."""

    def __post_init__(self) -> None:
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Simulate groups of the table, print what would be recommended in each, and return 1 if none was compared."""
    about = "The order of splits by simulation beside the order that others measured."
    options = parse(SplitTimeOptions, argv, prog="python -m benchmarks.foresight.split_times", about=about)

    def refuse(reason: str) -> DataError:
        return DataError(f"{options.table} is not vTrain's table ({reason})", "in --table", "give its CSV")

    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in read_rows(options.table, FILE_BYTES_MAX, refuse, COLUMNS):
        groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    large = [groups[key] for key in sorted(groups, key=lambda key: [int(n) for n in key])]
    large = [rows for rows in large if len(rows) >= options.least][:: options.every]
    prepare_mock()
    told: list[dict[str, Any]] = []
    for number, rows in enumerate(large):
        told += [{"group": number, **figures} for row in rows if (figures := compared(row))]
    import pandas as pd

    frame = pd.DataFrame(told)
    write_csv(frame, options.csv)
    print_written(options.csv)
    if frame.empty:
        return 1
    report(frame)
    return 0


def compared(row: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a row's split with its measured and its simulated seconds, or None after saying why it cannot be simulated."""
    split = {axis: int(row[name]) for axis, name in AXES.items()}
    name = " ".join(f"{axis}{size}" for axis, size in split.items()) + f" micro {row[MICRO]}"
    try:
        timing = trial(row, split).timing
    except GptscaleError as error:
        tell(f"{name}: left out: {error}")
        return None
    measured = float(row[MEASURED]) / 1e3
    off = timing.seconds / measured - 1
    work = {key: int(row[key]) for key in (*GROUP, MICRO)}
    tell(f"{work}: {name}: measured {measured:.3f} s, simulated {timing.seconds:.3f} s ({off:+.1%}), {timing.bound_by}")
    return {**work, **split, "measured_s": measured, "simulated_s": timing.seconds, "off": off, "bound": timing.bound_by}


def trial(row: Mapping[str, str], split: Mapping[str, int]) -> Tried:
    """Return what a simulation of the recipe with a row's split tells."""
    tp, pp, n = split["tp"], split["pp"], int(row[GPUS])
    recipe = "ddp" if tp == pp == 1 else "tensor_parallel" if tp == n else "pipeline" if pp == n else "hybrid_3d"
    options = getattr(get(recipe).load(), get(recipe).config)(
        **({"data_parallel": "ddp"} if recipe == "hybrid_3d" else {})
    )
    sizes: dict[str, Any] = {f"{axis}_size": split[axis] for axis in get(recipe).axes if axis in ("tp", "pp")}
    config = RunConfig(
        **sizes,
        n_layer=int(row[LAYERS]),
        n_embd=int(row[HIDDEN]),
        n_head=int(row[HEADS]),
        seq_len=int(row[TOKENS]),
        vocab_size=VOCABULARY,
        micro_batch_size=int(row[MICRO]),
        global_batch_size=int(row[BATCH]),
        precision="bf16",
        activation_checkpointing="full",
        device="cuda",
        data="synthetic",
    )
    cluster = machines(n)
    run = resolve(recipe, config, options, World(0, 0, n, torch.device("cuda"), 600.0))
    options.check(run)
    candidate = Candidate(run, options)
    return simulated(PlannedRow(candidate, cluster, places_of(candidate), 0.0))


def machines(n: int) -> Cluster:
    """Return the authors' machines with `n` GPUs in all."""
    return replace(gpu_cluster(DEVICE, max(1, n // PER_NODE), min(n, PER_NODE), LINKS))


def report(frame: Any) -> None:
    """Print how far the times are off, and how good the splits are that would be recommended."""
    good, behind, pairs, right = 0, [], 0, 0
    kept = [rows for _, rows in frame.groupby("group") if len(rows) > 1]
    for rows in kept:
        best, chosen = rows.loc[rows.measured_s.idxmin()], rows.loc[rows.simulated_s.idxmin()]
        behind.append(chosen.measured_s / best.measured_s)
        good += behind[-1] <= AS_GOOD
        ordered = rows.sort_values("measured_s").simulated_s.tolist()
        measured = sorted(rows.measured_s)
        for i, first in enumerate(ordered):
            # Rows within the tolerance of each other have no order.
            far = [second for j, second in enumerate(ordered) if measured[j] > AS_GOOD * measured[i]]
            pairs, right = pairs + len(far), right + sum(first < second for second in far)
    off = frame.off.abs()
    print(
        f"{len(frame)} rows: median {off.median():.1%} off, worst {off.max():.1%}, mean {frame.off.mean():+.1%}; "
        f"spread about the mean {statistics.pstdev(frame.off):.1%}"
    )
    if kept:
        print(
            f"{len(kept)} groups: the recommended split within {AS_GOOD - 1:.0%} of the best measured one in {good}, "
            f"worst {max(behind) - 1:.1%} behind it; {right} of {pairs} pairs that differ by more in the right order"
        )


if __name__ == "__main__":
    sys.exit(start(main))
