"""What `gptscale fit` prints: the splits, the best first, and why that one."""

from __future__ import annotations

from collections.abc import Sequence

from gptscale.common.measure.gpus import GIB
from gptscale.foresight.fit.options import FitOptions
from gptscale.foresight.fit.subject import Subject
from gptscale.foresight.fit.trials import FitRow
from gptscale.foresight.memory.report import filled_by
from gptscale.foresight.plan.question import Cluster
from gptscale.results.render import console, table

COLUMNS = ("", "split", "micro-batch", "proved on", "gradients within", "peak GiB", "step", "MFU", "bound by", "lines")


def show(subject: Subject, cluster: Cluster, options: FitOptions, rows: Sequence[FitRow]) -> list[FitRow]:
    """Print and return the rows that fit and are right, why the first is the first, and what was left out."""
    good = [row for row in rows if row.fits and row.proved]
    title = (
        f"{subject.title}: {subject.n_params / 1e6:,.1f}M weights on {cluster}, {options.samples} samples a step, "
        f"{options.precision}"
    )
    if good:
        cells = [(str(i), *cells_of(row)) for i, row in enumerate(good, 1)]
        printed = table(COLUMNS, cells, left=("split", "bound by", "micro-batch"), title=title)
        console(log_columns=150, highlight=False).print(printed)
        fp64 = ", or fp64 where fp32 rounds by more than is allowed," * any(row.in_double for row in good)
        of_all = "with ReLU made smooth: gradients, norms, moments, weights"
        print(f"proved   3 steps of {subject.small_words}, in fp32{fp64} on CPU ranks, {of_all}")
        assert good[0].found is not None
        print(f"time     by {good[0].found.grade}")
        for line in reasons(good):
            print(line)
        if not subject.is_bf16 and options.precision == "bf16":
            print("note     the model does not run with weights in bf16: they are in fp32, and autocast casts products")
    else:
        print(title)
        print(nearest(rows))
    if subject.is_recurrent:
        print("note     recurrent layers are simulated step by step: cuDNN's are faster, and need less memory")
    if subject.idle:
        first = f"{len(subject.idle)} weights, {subject.idle[0]} the first,"
        print(f"note     {first} got no gradient from two samples: programs give them zeros")
    if not subject.is_mean:
        print("note     the loss depends on the size of a micro-batch (masks, contrasts): twice 2 samples is not 4")
    for row in rows:
        if row.why:
            print(f"{'but' if row in good else 'left out':<8} {row.name}: {row.why}")
    return good


def cells_of(row: FitRow) -> tuple[str, ...]:
    """Return the cells of a row that fits."""
    assert row.found is not None
    assert row.found.memory is not None
    time = row.found
    return (
        row.name,
        f"{row.choice.micro_batch_size}{' recomputed' * row.choice.recompute}",
        f"{' and '.join(map(str, row.proved))} rank{'s' * (row.proved != (1,))}{', fp64' * row.in_double}",
        f"{row.worst:.0e}",
        f"{row.found.memory.needed / GIB:,.1f}",
        f"{time.seconds:.3g} s",
        f"{time.mfu or 0:.0%}",
        time.bound_by,
        str(row.lines),
    )


def reasons(rows: Sequence[FitRow]) -> list[str]:
    """Return why the next two rows are slower than the first."""
    lines = []
    for row in rows[1:3]:
        first, second = rows[0].found, row.found
        assert first is not None
        assert second is not None
        ratio = second.seconds / first.seconds
        if ratio < 1.01:
            lines.append(f"as fast  {row.name}: within {ratio - 1:.1%}; {rows[0].name} is first for no reason of speed")
            continue
        more = {kind: seconds - first.parts.get(kind, 0.0) for kind, seconds in second.parts.items()}
        why = max(more, key=lambda kind: more[kind], default="")
        lines.append(f"slower   {row.name}: {ratio:.2f} times as long, most of it {why}")
    return lines


def nearest(rows: Sequence[FitRow]) -> str:
    """Return which row comes nearest to fitting, and what it lacks."""
    memories = {row.name: row.found.memory for row in rows if row.found and row.found.memory}
    over = {name: memory.needed - memory.capacity for name, memory in memories.items() if memory.is_too_large}
    if not over:
        return "nothing  could be tried"
    name = min(over, key=lambda each: over[each])
    memory, more = memories[name], over[name] / GIB
    lacks = f"{'more than ' * bool(memory.out_of_memory)}{more:,.1f} GiB" if more > 0 else "memory"
    return f"nothing  fits: {name} comes nearest and lacks {lacks}, filled by {filled_by(memory)}; use more GPUs, or larger ones"
