"""`gptscale why`: the verdict on a run, explained: its line, its shares, each cause with its gain, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from gptscale.common.errors import ConfigError, visible
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.foresight.price.picture import filled
from gptscale.foresight.verdict.judge import Verdict
from gptscale.results.render import DPI, SHARES, subplots


@dataclass(frozen=True)
class WhyOptions:
    """Which run, and whether to draw it."""

    run: tyro.conf.Positional[Path | None] = None
    """Folder of a run, such as results/runs/NAME."""
    png: Path | None = None
    """Picture of the last traced step by rank, and of the shares."""

    def __post_init__(self) -> None:
        check_output_file(self.png, "--png")


def main(argv: Sequence[str]) -> int:
    """Print the verdict of a run, draw it if asked to, and return 0."""
    options = parse(WhyOptions, argv, prog="gptscale why", about="Why a run is as slow as it is.")
    if options.run is None:
        raise ConfigError("no RUN is given", "in why", "give the folder of a run, such as results/runs/NAME")
    from gptscale.common.measure.evidence import EVIDENCE, VERDICT
    from gptscale.foresight.verdict.files import read_verdict

    if (options.run / EVIDENCE).exists() and not (options.run / VERDICT).exists():
        # No launcher did, as under torchrun.
        from gptscale.foresight.verdict.of_run import judge_run

        judge_run(options.run)
    verdict = read_verdict(options.run)
    show(verdict)
    if options.png:
        if not verdict.ranks:
            raise ConfigError("its steps have too many pieces to draw", "in --png", "look at trace.json (--profile)")
        print(f"wrote {visible(str(draw(verdict, options.png)))}")
    return 0


# A letter for each part of a step, where it fills most of a column.
LETTERS = {
    "forward": "F", "backward": "B", "optimizer": "O", "data": "D", "waiting": ".", "transfer": "~", "disk": "K", "bus": "U",
    "allocator": "A",
}  # fmt: skip
COLUMNS = 88


def gantt(ranks: Sequence[Sequence[tuple[str, float, float]]]) -> list[str]:
    """Return the step of each rank as a line of letters, with time to the right."""
    seconds = max((end for pieces in ranks for _, _, end in pieces), default=0.0)
    lines = []
    for rank, pieces in enumerate(ranks):
        cells = filled(pieces, COLUMNS, seconds)
        letters = (LETTERS.get(max(cell, key=lambda x: cell[x], default=""), "-") if cell else " " for cell in cells)
        lines.append(f"rank {rank:>2} {''.join(letters)}")
    return lines


def show(verdict: Verdict) -> None:
    """Print the line, the step by rank, the table of shares and that of causes."""
    from gptscale.results.render import console, table

    terminal = console(100, highlight=False)
    print(f"{visible(verdict.line())}\n")
    if verdict.ranks:
        print("\n".join(gantt(verdict.ranks)))
        used = {what for pieces in verdict.ranks for what, _, _ in pieces}
        words = [f"{letter} {what}" for what, letter in LETTERS.items() if what in used]
        print(f"        {', '.join([*words, '- other'])}\n")
    shares = [(name, f"{share:.1%}") for name, share in verdict.shares.items() if share >= 5e-4]
    terminal.print(table(("the slowest rank's time", "share"), shares, left=("the slowest rank's time",)))
    rows = [
        (cause.name, f"{cause.share:.1%}", f"{1e3 * cause.without_s:,.2f}", f"{verdict.gain(cause):.1%}")
        for cause in verdict.causes
        if verdict.gain(cause) >= 5e-4
    ]
    terminal.print()
    terminal.print(table(("cause", "share", "step without it, ms", "gain"), rows, left=("cause",)))
    print(
        f"\nstep {1e3 * verdict.step_s:,.2f} ms (median of the timed steps, spread {verdict.spread:.1%}); "
        f"a cause is named from 5 % on, if that is more than the spread"
    )
    if abs(verdict.traced_s / verdict.step_s - 1) > 0.25:
        print(f"the traced steps took {1e3 * verdict.traced_s:,.2f} ms, so that the gains are rough")
    if verdict.taken is not None:
        print(f"others took {verdict.taken:.1%} of the processors that the run wanted")
    for note in verdict.notes:
        print(note)
    if verdict.remedied_s is not None:
        print(f"with the remedy, which removes a part of the cause: {1e3 * verdict.remedied_s:,.2f} ms")


# Parts of a step that are no share of it have colours that no share has.
COLOUR_OF = {"forward": "#332288", "backward": "#9A8FD1", "waiting": "#555555"}


def draw(verdict: Verdict, path: Path) -> Path:
    """Draw the last traced step, a row per rank with time to the right, and below it the shares, and return the path."""
    from matplotlib.patches import Patch

    ranks = verdict.ranks
    figure, axes = subplots(2, 1, (13, 3.2 + 0.5 * len(ranks)), verdict.line(), height_ratios=[max(1, len(ranks)), 1])
    steps = axes[0, 0]
    used: dict[str, str] = {}
    for rank, pieces in enumerate(ranks):
        for what, begin, end in pieces:
            used[what] = COLOUR_OF.get(what) or SHARES.get(what, SHARES["host"])[0]
            steps.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (rank - 0.4, 0.8), color=used[what], linewidth=0)
    steps.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    steps.invert_yaxis()
    steps.set_xlabel("ms of the last traced step")
    handles = [Patch(color=colour, label=what) for what, colour in used.items()]
    steps.legend(handles=handles, ncols=8, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    shares = axes[1, 0]
    begin = 0.0
    for name, share in verdict.shares.items():
        if share >= 5e-4:
            shares.barh(0, share, left=begin, color=SHARES[name][0], label=f"{name} {share:.0%}")
            begin += share
    shares.set(xlim=(0, 1), yticks=[], ylabel="time of the\nslowest rank")
    shares.legend(ncols=6, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.25))
    figure.savefig(path, dpi=DPI)
    return path
