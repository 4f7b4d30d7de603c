"""Draw the strategies and the two models: `python -m tools.drawings` writes an SVG for each function below.

Colours mean the same in all drawings: weights blue, gradients orange, optimizer state green, activations and data grey, and what
travels between devices red.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "drawings"
WEIGHTS, GRADIENTS, OPTIMIZER, DATA, TRAVELS = "#4c78a8", "#f58518", "#54a24b", "#b8b8b8", "#d62728"
PALE = "#f4f4f4"
# One colour for each micro-batch.
MICRO_BATCHES = ("#9ecae9", "#ffbf79", "#88d27a", "#d6a5c9")

plt.rcParams.update({"font.size": 10, "svg.hashsalt": "gptscale", "font.family": "DejaVu Sans"})


# A computation is (kind, stage, micro-batch) with these kinds.
FORWARD, BACKWARD = "F", "B"
Order = dict[int, list[tuple[str, int, int]]]


def one_forward_one_backward(n_stages: int, n_micro_batches: int) -> Order:
    """Return the order in which a stage has at most as many micro-batches in flight as there are stages from it on."""
    order: Order = {}
    for stage in range(n_stages):
        ahead = min(n_micro_batches, n_stages - stage - 1)
        forwards = [(FORWARD, stage, m) for m in range(n_micro_batches)]
        backwards = [(BACKWARD, stage, m) for m in range(n_micro_batches)]
        pairs = zip(forwards[ahead:], backwards, strict=False)
        steady = [computation for pair in pairs for computation in pair]
        order[stage] = forwards[:ahead] + steady + backwards[n_micro_batches - ahead :]
    return order


def needs(kind: str, stage: int, micro_batch: int, n_stages: int) -> list[tuple[str, int, int]]:
    """Return the computations of other stages that one waits for."""
    if kind == FORWARD:
        return [(FORWARD, stage - 1, micro_batch)] if stage else []
    return [(BACKWARD, stage + 1, micro_batch)] if stage + 1 < n_stages else []


def canvas(width: float, height: float) -> Axes:
    """Return axes on which a unit is the same length in both directions. width, height: in units, of which 10 are 6 inches."""
    figure = plt.figure(figsize=(0.6 * width, 0.6 * height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "", fill: str = "white", **words: Any
) -> None:
    """Draw a box with its lower left corner at (x, y), and a text in its middle."""
    shape = FancyBboxPatch(
        (x, y), width, height, "round,pad=0,rounding_size=0.08", facecolor=fill, edgecolor="#444", linewidth=0.9
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **words)


def device(axes: Axes, x: float, y: float, width: float, height: float, name: str) -> None:
    """Draw the frame of a device, with its name on top."""
    shape = FancyBboxPatch(
        (x, y), width, height, "round,pad=0,rounding_size=0.15", facecolor=PALE, edgecolor="#888", linewidth=1.2
    )
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height - 0.14, name, ha="center", va="top", weight="bold")


def arrow(
    axes: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    color: str = "#444",
    style: str = "-|>",
    **more: Any,
) -> None:
    """Draw an arrow. style: of matplotlib, such as `<|-|>` for both ways."""
    axes.add_patch(
        FancyArrowPatch(
            begin, end, arrowstyle=style, mutation_scale=11, color=color, linewidth=1.4, shrinkA=0, shrinkB=0, **more
        )
    )


def note(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Write a text with its middle at (x, y)."""
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9} | more
    axes.text(x, y, text, **look)


def data_parallel() -> None:
    """Draw ddp: whole models, parts of the batch, and one all-reduce of gradients."""
    axes = canvas(14, 7)
    for rank in range(4):
        x = 0.3 + 3.4 * rank
        box(axes, x + 0.3, 6.1, 2.6, 0.6, f"sequences {2 * rank}, {2 * rank + 1}", DATA)
        arrow(axes, (x + 1.6, 6.1), (x + 1.6, 5.5))
        device(axes, x, 1.5, 3.2, 4.0, f"device {rank}")
        box(axes, x + 0.3, 4.0, 2.6, 0.8, "all weights", WEIGHTS, color="white")
        box(axes, x + 0.3, 2.9, 2.6, 0.8, "all gradients", GRADIENTS)
        box(axes, x + 0.3, 1.8, 2.6, 0.8, "optimizer state", OPTIMIZER, color="white")
        if rank:
            arrow(axes, (x - 0.5, 3.3), (x + 0.3, 3.3), TRAVELS, "<|-|>")
    note(
        axes,
        7,
        0.95,
        "Gradients are summed over all devices, bucket by bucket, while backward still runs (all-reduce).",
        color=TRAVELS,
    )
    note(axes, 7, 0.4, "All devices then make the same optimizer step. 16 bytes per parameter on each.")


def zero_stages() -> None:
    """Draw what a device holds under ddp and ZeRO's stages 1 to 3, in bytes per parameter for 4 devices."""
    axes = canvas(14, 6.6)
    n = 4
    stages = (
        ("ddp", 4.0, 4.0, 8.0),
        ("zero1", 4.0, 4.0, 8 / n),
        ("zero2", 4.0, 4 / n, 8 / n),
        ("zero3, fsdp", 4 / n, 4 / n, 8 / n),
    )
    scale = 0.45
    for row, (name, weights, gradients, optimizer) in enumerate(stages):
        y = 5.2 - 1.25 * row
        note(axes, 2.6, y + 0.35, name, ha="right", weight="bold", fontsize=10)
        x = 2.9
        for nbytes, whole, color in ((weights, 4.0, WEIGHTS), (gradients, 4.0, GRADIENTS), (optimizer, 8.0, OPTIMIZER)):
            axes.add_patch(
                plt.Rectangle(
                    (x, y), whole * scale, 0.7, facecolor="white", edgecolor="#bbb", linewidth=0.8, linestyle=":"
                )
            )
            axes.add_patch(plt.Rectangle((x, y), nbytes * scale, 0.7, facecolor=color, edgecolor="#444", linewidth=0.8))
            x += whole * scale + 0.25
        note(axes, 11.0, y + 0.35, f"{weights + gradients + optimizer:g} bytes per parameter", ha="left")
    for x, text, color in (
        (3.8, "weights", WEIGHTS),
        (5.85, "gradients", GRADIENTS),
        (8.8, "AdamW's two moments", OPTIMIZER),
    ):
        note(axes, x, 6.2, text, color=color, weight="bold")
    note(
        axes,
        7,
        0.95,
        "One device of 4, in fp32, as the paper of ZeRO counts. What is dotted lies on the other devices.",
    )
    gather = "zero3 and fsdp gather the weights of a block just before it computes, and drop them after it."
    note(axes, 7, 0.55, gather, color=TRAVELS)
    note(
        axes,
        7,
        0.15,
        "DeepSpeed keeps one more cut copy of the weights, and cuts zero1's gradients too: 8, 8 and 5 bytes.",
    )


def tensor_parallel() -> None:
    """Draw the MLP of a block on two tensor ranks: columns of the first matrix, rows of the second."""
    axes = canvas(14, 8.2)
    rows = ((4.8, "first", "left", "upper"), (0.9, "second", "right", "lower"))
    for rank, (y, half, columns, part) in enumerate(rows):
        middle = y + 1.25
        device(axes, 0.2, y, 13.6, 2.9, f"device {rank}")
        box(axes, 0.4, y + 0.75, 1.4, 1.0, f"{half} half\nof the\nsequence", DATA, fontsize=8)
        box(axes, 3.2, y + 0.4, 1.3, 1.7, "x\nwhole\nsequence", DATA, fontsize=8)
        axes.add_patch(plt.Rectangle((5.0, y + 0.4), 1.7, 1.7, facecolor="white", edgecolor="#bbb", linestyle=":"))
        axes.add_patch(plt.Rectangle((5.0 + 0.85 * rank, y + 0.4), 0.85, 1.7, facecolor=WEIGHTS, edgecolor="#444"))
        note(axes, 5.85, y + 0.2, f"fc: {columns} columns", fontsize=8)
        note(axes, 7.4, middle, "GELU\nof half\nthe units", fontsize=8)
        axes.add_patch(plt.Rectangle((8.2, y + 0.4), 1.0, 1.7, facecolor="white", edgecolor="#bbb", linestyle=":"))
        axes.add_patch(
            plt.Rectangle((8.2, y + 0.4 + 0.85 * (1 - rank)), 1.0, 0.85, facecolor=WEIGHTS, edgecolor="#444")
        )
        note(axes, 8.7, y + 0.2, f"proj: {part} rows", fontsize=8)
        box(axes, 9.7, y + 0.4, 1.3, 1.7, "a part\nof each\nsum", DATA, fontsize=8)
        box(axes, 12.2, y + 0.75, 1.4, 1.0, f"{half} half,\nwhole\nsums", DATA, fontsize=8)
        for begin, end in ((4.5, 5.0), (6.7, 6.95), (7.85, 8.2), (9.2, 9.7)):
            arrow(axes, (begin, middle), (end, middle))
    # Each device sends its half to both, and gets its half of the sums from both.
    for begin, end in itertools.product([y + 1.25 for y, *_ in rows], repeat=2):
        arrow(axes, (1.8, begin), (3.2, end), TRAVELS)
        arrow(axes, (11.0, begin), (12.2, end), TRAVELS)
    note(axes, 1.7, 4.25, "all-gather", color=TRAVELS, ha="right", weight="bold")
    note(axes, 12.1, 4.25, "reduce-scatter", color=TRAVELS, ha="left", weight="bold")
    note(axes, 7, 4.25, "What is dotted lies on the other device.")
    note(axes, 7, 0.4, "Attention is cut in the same way: qkv by heads, its proj by rows.")


def pipeline() -> None:
    """Draw stages of layers, and the micro-batches that run through them under 1F1B."""
    axes = canvas(14, 7.4)
    stages = ("tables\nblocks 1 to 13", "blocks 14 to 26", "blocks 27 to 38", "blocks 39 to 48\nhead, loss")
    for rank, layers in enumerate(stages):
        x = 0.3 + 3.4 * rank
        device(axes, x, 5.2, 2.9, 1.9, f"device {rank}")
        box(axes, x + 0.3, 5.4, 2.3, 1.1, layers, WEIGHTS, color="white", fontsize=9)
        if rank:
            arrow(axes, (x - 0.8, 6.1), (x + 0.3, 6.1), TRAVELS)
            arrow(axes, (x + 0.3, 5.7), (x - 0.8, 5.7), TRAVELS)
    note(axes, 7, 4.85, "Activations go to the next device, their gradients come back.", color=TRAVELS)
    unit, left, n_stages, n_micro = 0.54, 1.6, 4, 4
    order = one_forward_one_backward(n_stages, n_micro)
    ended: dict[tuple[str, int, int], float] = {}
    ends = [0.0] * n_stages
    while any(order.values()):
        for stage, computations in order.items():
            if not computations or any(other not in ended for other in needs(*computations[0], n_stages)):
                continue
            kind, _, m = computation = computations.pop(0)
            begin = max([ends[stage], *(ended[other] for other in needs(*computation, n_stages))])
            length = 1.0 if kind == FORWARD else 2.0
            ended[computation] = ends[stage] = begin + length
            x, y = left + unit * begin, 3.7 - 0.8 * stage
            bar = plt.Rectangle(
                (x, y), unit * length, 0.62, facecolor=MICRO_BATCHES[m], edgecolor="#444", linewidth=0.8
            )
            axes.add_patch(bar)
            note(axes, x + unit * length / 2, y + 0.31, f"{kind}{m}", fontsize=8)
    for stage in range(n_stages):
        note(axes, 1.4, 4.0 - 0.8 * stage, f"device {stage}", ha="right")
    arrow(axes, (left, 1.0), (left + unit * max(ends), 1.0))
    note(axes, left + unit * max(ends) + 0.1, 1.0, "time", ha="left")
    note(
        axes,
        7,
        0.4,
        "1F1B with micro-batches 0 to 3: F forward, B backward. White is the bubble, in which a device waits.\n"
        "More micro-batches make it a smaller share. The last devices have fewer blocks, because the head\n"
        "computes as much as 2.6 of them.",
    )


def mesh() -> None:
    """Draw hybrid_3d's mesh of 2 x 2 x 2 devices."""
    axes = canvas(14, 7.2)
    corner, right, up, back = (3.0, 1.6), (4.6, 0.0), (0.0, 2.6), (2.6, 1.3)

    def place(tensor: int, data: int, stage: int) -> tuple[float, float]:
        return tuple(corner[i] + tensor * right[i] + data * up[i] + stage * back[i] for i in (0, 1))  # type: ignore[return-value]

    for here in ((t, d, p) for t in (0, 1) for d in (0, 1) for p in (0, 1)):
        for axis, color in ((0, TRAVELS), (1, GRADIENTS), (2, OPTIMIZER)):
            if not here[axis]:
                there = tuple(1 if i == axis else n for i, n in enumerate(here))
                (x0, y0), (x1, y1) = place(*here), place(*there)
                axes.plot([x0, x1], [y0, y1], color=color, linewidth=2.5, zorder=1)
    for tensor, data, stage in ((t, d, p) for p in (1, 0) for d in (0, 1) for t in (0, 1)):
        rank = tensor + 2 * data + 4 * stage
        axes.add_patch(Circle(place(tensor, data, stage), 0.42, facecolor="white", edgecolor="#444", zorder=3))
        axes.text(*place(tensor, data, stage), str(rank), ha="center", va="center", zorder=4, weight="bold")
    note(axes, 5.3, 1.2, "tensor parallel: inside a node", color=TRAVELS, weight="bold")
    note(axes, 2.7, 2.9, "data\nparallel", color=GRADIENTS, weight="bold", ha="right")
    note(axes, 9.3, 1.8, "pipeline: stages", color=OPTIMIZER, weight="bold", ha="left")
    note(
        axes,
        7,
        0.4,
        "Eight ranks. Neighbouring numbers are tensor peers, because they exchange most, in each layer. Stages exchange least.",
    )


def transformer() -> None:
    """Draw the GPT: tables, a block with its shapes, and the head that shares the table's weight."""
    axes = canvas(14, 10.2)
    x, width = 1.4, 3.6
    rows = (
        ("token ids  (B, T)", DATA, "black"),
        ("token table + positions", WEIGHTS, "white"),
        ("block 1", WEIGHTS, "white"),
        ("block 2", WEIGHTS, "white"),
        ("...", "white", "black"),
        ("block L", WEIGHTS, "white"),
        ("LayerNorm", WEIGHTS, "white"),
        ("head: the token table again", WEIGHTS, "white"),
        ("logits  (B, T, V), loss", DATA, "black"),
    )
    for row, (text, color, ink) in enumerate(rows):
        box(axes, x, 0.5 + row, width, 0.65, text, color, color=ink)
        if row:
            arrow(axes, (x + width / 2, 0.15 + row), (x + width / 2, 0.5 + row))
    arrow(axes, (x, 1.85), (x, 7.8), WEIGHTS, "<|-|>", connectionstyle="arc3,rad=-0.25")
    note(axes, 0.45, 4.8, "one weight, used twice", rotation=90, color=WEIGHTS)
    device(axes, 6.2, 0.5, 7.3, 9.4, "a block: 12 h² weights in its four matrices")
    arrow(axes, (9.6, 8.7), (9.6, 9.4))
    left, wide = 7.4, 4.4
    parts = (
        (1.2, "LayerNorm", WEIGHTS, "white", ""),
        (2.0, "qkv", WEIGHTS, "white", "(h, 3h)"),
        (2.8, "causal attention, each head alone", DATA, "black", "(B, T, h)"),
        (3.6, "proj", WEIGHTS, "white", "(h, h)"),
        (5.2, "LayerNorm", WEIGHTS, "white", ""),
        (6.0, "fc", WEIGHTS, "white", "(h, 4h)"),
        (6.8, "GELU", DATA, "black", "(B, T, 4h)"),
        (7.6, "proj", WEIGHTS, "white", "(4h, h)"),
    )
    middle = left + wide / 2
    for y, text, color, ink, shape in parts:
        box(axes, left, y, wide, 0.5, text, color, color=ink, fontsize=9)
        note(axes, left + wide + 0.2, y + 0.25, shape, ha="left", fontsize=8)
    for y, bottom in ((4.55, 0.75), (8.5, 4.75)):
        axes.add_patch(Circle((middle, y), 0.2, facecolor="white", edgecolor="#444", zorder=3))
        axes.text(middle, y, "+", ha="center", va="center", zorder=4)
        axes.plot([middle, 6.8, 6.8], [bottom, bottom, y], color="#444", linewidth=1.4)
        arrow(axes, (6.8, y), (middle - 0.2, y))
    joints = [0.55, *(y for y, *_ in parts[:4]), 4.35, 5.2, *(y for y, *_ in parts[5:]), 8.3]
    bottoms = [0.5, 1.7, 2.5, 3.3, 4.1, 4.75, 5.7, 6.5, 7.3, 8.1]
    for begin, end in zip(bottoms, [*joints[1:5], 4.35, *joints[6:]], strict=True):
        if end > begin:
            arrow(axes, (middle, begin), (middle, end))
    arrow(axes, (x + width, 3.82), (6.2, 9.75), "#bbb", "-")
    arrow(axes, (x + width, 3.5), (6.2, 0.6), "#bbb", "-")
    note(axes, 3.2, 9.6, "blue has weights, grey has none", fontsize=8)
    note(axes, 12.6, 9.05, "shapes: of weights\nor of results", fontsize=8)
    note(axes, 7, 0.15, "B sequences of T tokens, hidden size h, vocabulary V.  1.6b: h = 1600, L = 48, T = 1024.")


def lenet5() -> None:
    """Draw LeNet-5: its maps as sheets with their number and size, what each layer looks at, and its parameters."""
    axes = canvas(14, 5.8)
    # Left edge, number of maps, side as drawn, side in pixels, what makes the maps, and its parameters.
    sheets = (
        (0.4, 1, 1.9, 28, "image", "", 5),
        (3.0, 6, 1.6, 28, "convolution 5 x 5", "156", 2),
        (5.4, 6, 1.1, 14, "max pool 2 x 2", "0", 5),
        (7.3, 16, 0.9, 10, "convolution 5 x 5", "2,416", 2),
        (9.5, 16, 0.6, 5, "max pool 2 x 2", "0", 0),
    )
    begin: tuple[float, float] | None = None
    for x, n, size, side, text, parameters, window in sheets:
        step = min(0.13, 1.0 / n)
        for i in range(n):
            bottom = 2.7 - 0.5 * size + step * (n - i - 1)
            square = plt.Rectangle((x + step * i, bottom), size, size, facecolor=DATA, edgecolor="white", linewidth=0.6)
            axes.add_patch(square)
        # The sheet in front, on which the next layer's window is drawn to scale.
        left, bottom = x + step * (n - 1), 2.7 - 0.5 * size
        middle = x + (size + step * (n - 1)) / 2
        note(axes, middle, 1.2, f"{text}\n{n} x {side} x {side}", fontsize=8)
        note(axes, middle, 0.6, parameters, fontsize=8, color=WEIGHTS)
        if begin:
            arrow(axes, begin, (left + 0.3 * size, bottom + 0.7 * size), TRAVELS)
        if window:
            wide = size * window / side
            corner = (left + 0.55 * size, bottom + 0.35 * size)
            axes.add_patch(plt.Rectangle(corner, wide, wide, fill=False, edgecolor=TRAVELS, linewidth=1.3))
            begin = (corner[0] + wide, corner[1] + wide / 2)
    for x, height, text, parameters in (
        (11.6, 3.0, "120", "48,120"),
        (12.5, 2.3, "84", "10,164"),
        (13.3, 1.2, "10", "850"),
    ):
        box(axes, x, 2.7 - height / 2, 0.3, height, "", DATA)
        note(axes, x + 0.15, 0.9, text, fontsize=8)
        note(axes, x + 0.15, 0.6, parameters, fontsize=8, color=WEIGHTS)
    for left, right in ((11.2, 11.6), (11.9, 12.5), (12.8, 13.3)):
        arrow(axes, (left, 2.7), (right, 2.7))
    note(axes, 12.55, 4.5, "linear layers", fontsize=8)
    note(axes, 0.35, 0.6, "parameters:", fontsize=8, color=WEIGHTS, ha="left")
    note(
        axes,
        7,
        5.4,
        "LeNet-5: 61,706 parameters. Each convolution and each linear layer but the last is followed by ReLU.",
    )
    note(axes, 7, 0.15, "Red: the pixels that one pixel of the next layer is made of.", fontsize=8, color=TRAVELS)


DRAWINGS: tuple[Callable[[], None], ...] = (
    data_parallel,
    zero_stages,
    tensor_parallel,
    pipeline,
    mesh,
    transformer,
    lenet5,
)


def main(folder: Path = FOLDER) -> None:
    """Write every drawing to a folder."""
    for draw in DRAWINGS:
        draw()
        plt.savefig(folder / f"{draw.__name__}.svg", metadata={"Date": None})
        plt.close()


if __name__ == "__main__":
    main()
