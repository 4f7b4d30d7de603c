"""Does the simulation put splits in the order that others measured? Tensor, data and pipeline ranks in all mixtures.

python -m benchmarks.foresight.split_times --table FILE [--every 7] [--least 4] [--launch-us 37] [--csv FILE]

FILE is one of vTrain's tables of Megatron-DeepSpeed on A100 (VIA-Research/vTrain, data/ground_truth_single.csv or _multi.csv).
A group is a model, a number of GPUs and a global batch: its rows differ in the split and the micro-batch alone. Each row is
simulated as the recipe that splits so, with full recompute as theirs. Of each group the fastest by simulation is the one that
would be recommended; beside it stands the fastest that was measured. All is told twice: with a host that is always ahead, and
with one that asks for a kernel in --launch-us, as one row tells that is bound by its host.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.measurement import collect, print_written, tell
from gptscale.common.errors import DataError, GptscaleError
from gptscale.common.process.world import World
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.settings.user_file import read_rows
from gptscale.foresight.plan.question import Cluster, gpu_cluster
from gptscale.foresight.plan.rows import Tried
from gptscale.foresight.plan.trials import RECORDED, tried
from gptscale.foresight.price.record import TIMED
from gptscale.foresight.price.step_time import SPREAD
from gptscale.foresight.simulate.interpreters import prepare_mock
from gptscale.foresight.simulate.simulation import simulate
from gptscale.launchers.cli import start
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import get

if TYPE_CHECKING:
    import pandas as pd

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
    launch_us: float = 37.0
    """Microseconds in which a host asks for a kernel."""
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
    numbered = ((number, row) for number, rows in enumerate(large) for row in rows)
    told = ({"group": number, **found} for number, row in numbered if (found := compared(row, options.launch_us)))
    frame = collect(told, options.csv)
    print_written(options.csv)
    if frame.empty:
        return 1
    for name in ("host_ahead_s", "simulated_s"):
        report(frame, name)
    return 0


def compared(row: Mapping[str, str], launch_us: float) -> dict[str, Any] | None:
    """Return a row's split with its measured and its simulated seconds, or None after saying why it cannot be simulated."""
    split = {axis: int(row[name]) for axis, name in AXES.items()}
    name = " ".join(f"{axis}{size}" for axis, size in split.items()) + f" micro {row[MICRO]}"
    try:
        timing = trial(row, split, launch_us)
    except GptscaleError as error:
        tell(f"{name}: left out: {error}")
        return None
    measured, ahead = float(row[MEASURED]) / 1e3, timing.low * SPREAD
    work = {key: int(row[key]) for key in (*GROUP, MICRO)}
    tell(
        f"{work}: {name}: measured {measured:.3f} s, host ahead {ahead / measured - 1:+.1%}, "
        f"simulated {timing.seconds / measured - 1:+.1%}, {timing.bound_by}"
    )
    times = {"measured_s": measured, "host_ahead_s": ahead, "simulated_s": timing.seconds}
    return {**work, **split, **times, "bound": timing.bound_by}


def trial(row: Mapping[str, str], split: Mapping[str, int], launch_us: float) -> Tried:
    """Return what a simulation of the recipe with a row's split tells."""
    tp, pp, n = split["tp"], split["pp"], int(row[GPUS])
    recipe = "ddp" if tp == pp == 1 else "tensor_parallel" if tp == n else "pipeline" if pp == n else "hybrid_3d"
    kind = getattr(get(recipe).load(), get(recipe).config)
    own = kind(data_parallel="ddp") if recipe == "hybrid_3d" else kind()
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
    run = resolve(recipe, config, own, World(0, 0, n, torch.device("cuda"), 600.0))
    own.check(run)
    micro_batches = run.batch.grad_accum_steps
    written = min(micro_batches, RECORDED) if pp == 1 else micro_batches
    few = dataclasses.replace(config, global_batch_size=None, grad_accum_steps=written)
    world: dict[str, Any] = {"world_size": n, "ranks_per_node": min(n, PER_NODE)}
    each = [simulate(recipe, few, own, device=DEVICE, rank=rank, **world) for rank in run.mesh.ranks("pp")]
    for simulation in each:
        launches = sum(work.kind in TIMED for work in simulation.recorded or ())
        simulation.facts["host_s"] = 1e-6 * launch_us * launches
    return tried(each, machines(n), "bf16", micro_batches, written)


def machines(n: int) -> Cluster:
    """Return the authors' machines with `n` GPUs in all."""
    return gpu_cluster(DEVICE, max(1, n // PER_NODE), min(n, PER_NODE), LINKS)


def report(frame: pd.DataFrame, name: str) -> None:
    """Print how far the times of a column are off, and how good the splits are that would be recommended by them."""
    good, behind, pairs, right = 0, [], 0, 0
    kept = [rows for _, rows in frame.groupby("group") if len(rows) > 1]
    for rows in kept:
        behind.append(rows.sort_values(name).measured_s.iloc[0] / rows.measured_s.min())
        good += behind[-1] <= AS_GOOD
        ordered, measured = rows.sort_values("measured_s")[name].tolist(), sorted(rows.measured_s)
        for i, first in enumerate(ordered):
            # Rows within the tolerance of each other have no order.
            far = [second for j, second in enumerate(ordered) if measured[j] > AS_GOOD * measured[i]]
            pairs, right = pairs + len(far), right + sum(first < second for second in far)
    off = frame[name] / frame.measured_s - 1
    print(
        f"{name}: {len(frame)} rows: median {off.abs().median():.1%} off, worst {off.abs().max():.1%}, mean {off.mean():+.1%}"
    )
    if kept:
        print(
            f"  {len(kept)} groups: the recommended split within {AS_GOOD - 1:.0%} of the best measured one in {good}, "
            f"worst {max(behind) - 1:.1%} behind it; {right} of {pairs} pairs that differ by more in the right order"
        )


if __name__ == "__main__":
    sys.exit(start(main))
