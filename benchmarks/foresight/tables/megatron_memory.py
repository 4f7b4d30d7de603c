"""What Megatron-LM's tests hold between two steps, beside the bytes of state that a formula gives for each split.

The values are those of the last rank, which writes them: the last stage of a pipeline. What lies beyond the formula is a constant
of the machine and of the layers' implementation, if the formula is right. Source: as in megatron_lm.py.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from benchmarks.foresight.tables.megatron_lm import DEVICES, LEFT_OUT, UNUSED, VOCABULARY
from benchmarks.foresight.tables.rows import CellsOfRow
from benchmarks.foresight.tables.table import read_table
from gptscale.common.errors import DataError
from gptscale.results import render

MIB = 2**20
MACHINES = ("a100", "h100", "gb200")
ALLOCATED, LAYERS = "allocated_bytes", "transformer-impl"
# Columns of what the formula leaves out, beside those that the step's description does.
ALSO_LEFT_OUT = ("data-parallel-sharding-strategy", "num-query-groups")
# Megatron-LM pads the vocabulary to a multiple of this many rows for each tensor rank.
VOCABULARY_MULTIPLE = 128
# Bytes for each parameter: bf16 weights 2 and fp32 gradients 4 stay, fp32 weights and AdamW's two moments may be cut.
STAYS, CAN_BE_CUT = 6, 12
# Transformer Engine asks for a cuBLAS workspace of this many bytes before compute capability 9, and of the other from there on
# (cpp_extensions/gemm.py, get_cublas_workspace_size_bytes).
WORKSPACES = {"a100": 4 * MIB, "h100": 32 * MIB, "gb200": 32 * MIB}


class HeldBytes(NamedTuple):
    """One test: how it is split, on which machine, the state by the formula, and what was held beyond it."""

    split: str
    layers: str
    machine: str
    state: float
    beyond: float


def read_held(path: Path) -> list[HeldBytes]:
    """Return the rows of Megatron-LM's table that the formula describes."""
    table = read_table(path)
    if not {ALLOCATED, LAYERS} <= set(table.titles):
        missing = " or ".join(title for title in (ALLOCATED, LAYERS) if title not in table.titles)
        what = f"{path} has no column {missing}"
        raise DataError(what, "in the table", "give Megatron-LM's golden values with their memory")
    rows = (_held_bytes(CellsOfRow(cells, f"in {path}")) for cells in table.cells)
    return [row for row in rows if row]


def _held_bytes(row: CellsOfRow) -> HeldBytes | None:
    machine = next((name for name in MACHINES if name in row.text("machine")), "")
    left_out = any(row.text(title) not in UNUSED for title in (*LEFT_OUT[:-1], *ALSO_LEFT_OUT))
    shape = ("num-layers", "hidden-size", "seq-length", "tensor-model-parallel-size", ALLOCATED)
    case = row.text("case")
    # Tests of reinforcement learning (GRPO) generate text too, and keep what that needs.
    plain = case.startswith("gpt/") and "grpo" not in case
    if not machine or left_out or not plain or not all(row.text(t) for t in shape):
        return None
    tp = row.whole("tensor-model-parallel-size")
    pp, cp = (
        row.whole(f"{kind}-parallel-size") if row.text(f"{kind}-parallel-size") else 1
        for kind in ("pipeline-model", "context")
    )
    cut = row.text("use-distributed-optimizer") == "true"
    virtual = row.text("num-layers-per-virtual-pipeline-stage") not in UNUSED
    state = parameters(row, tp, pp) * (STAYS + CAN_BE_CUT / (DEVICES / (tp * pp) if cut else 1))
    split = f"tp {tp}, pp {pp}" + f", cp {cp}" * (cp > 1) + ", interleaved" * virtual + ", distributed optimizer" * cut
    split += ", untied" * (row.text("untie-embeddings-and-output-weights") == "true")
    return HeldBytes(split, row.text(LAYERS) or "not said", machine, state, row.number(ALLOCATED) - state)


def parameters(row: CellsOfRow, tp: int, pp: int) -> float:
    """Return the parameters of the last rank: its stage's blocks, the table of the head, the last norm.

    With one stage there are positions too, and where the head has a table of its own the tokens' table.
    """
    h, layers, seq_len = (row.whole(title) for title in ("hidden-size", "num-layers", "seq-length"))
    feed_forward = row.whole("ffn-hidden-size") if row.text("ffn-hidden-size") else 4 * h
    vocabulary = row.whole("vocab-size") if row.text("vocab-size") else VOCABULARY
    rows = -(-vocabulary // (VOCABULARY_MULTIPLE * tp)) * VOCABULARY_MULTIPLE
    # A gated layer has one more matrix to the feed-forward's width.
    wide = 2 if row.text("swiglu") == "true" else 1
    matrices = (4 * h * h + (wide + 1) * h * feed_forward + 3 * h + wide * feed_forward) / tp
    # Projections' biases and the two norms are whole on every tensor rank.
    blocks = layers // pp * (matrices + 6 * h)
    first = seq_len * h if row.text("position-embedding-type") not in ("rope", "none") else 0
    tables = 2 if pp == 1 and row.text("untie-embeddings-and-output-weights") == "true" else 1
    return blocks + tables * rows * h + 2 * h + (first if pp == 1 else 0)


def table_of(rows: Sequence[HeldBytes]) -> Table:
    """Return a table of the state and of what was held beyond it, in MiB, by split and machine: median and number of tests."""
    groups: dict[tuple[str, str], list[HeldBytes]] = defaultdict(list)
    for row in rows:
        groups[row.layers, row.split].append(row)
    titles = ("layers", "split", "state", *(f"beyond it, {machine.upper()}" for machine in MACHINES))
    table = render.table(titles, left=("layers", "split"), title="MiB between two steps: median (tests)")
    for layers, split in sorted(groups, reverse=True):
        mine = groups[layers, split]
        cells = []
        for machine in MACHINES:
            beyond = [row.beyond / MIB for row in mine if row.machine == machine]
            cells.append(f"{statistics.median(beyond):,.1f} ({len(beyond)})" if beyond else "")
        table.add_row(layers, split, f"{statistics.median(row.state for row in mine) / MIB:,.0f}", *cells)
    return table


def between_machines(rows: Sequence[HeldBytes]) -> list[str]:
    """Return lines that set the difference between machines beside that of Transformer Engine's workspaces."""
    by_split: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.layers == "transformer_engine":
            by_split[row.split][row.machine].append(row.beyond)
    lines = []
    for machine in MACHINES[1:]:
        both = [of for of in by_split.values() if of["a100"] and of[machine]]
        if not both:
            continue
        more = [(statistics.median(of[machine]) - statistics.median(of["a100"])) / MIB for of in both]
        workspace_mib = (WORKSPACES[machine] - WORKSPACES["a100"]) / MIB
        near = sum(abs(each - workspace_mib) <= workspace_mib / 4 for each in more)
        lines.append(
            f"{machine.upper()} holds {statistics.median(more):,.1f} MiB more than A100 in the median of {len(more)} splits; "
            f"Transformer Engine's workspace explains {workspace_mib:,.0f}, and to a quarter {near} of the splits"
        )
    return lines
