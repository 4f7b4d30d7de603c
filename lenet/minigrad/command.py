"""The command `gptscale minigrad`."""

from __future__ import annotations

from collections.abc import Sequence

from gptscale.common.settings.command_line import parse
from gptscale.lenet.minigrad.options import MinigradOptions


def main(argv: Sequence[str]) -> int:
    """Read the options, carry out the experiment, and return its exit status."""
    options = parse(MinigradOptions, argv, prog="gptscale minigrad", about=str(MinigradOptions.__doc__))
    # After the options are parsed, because it imports torch and pandas.
    from gptscale.lenet.minigrad.experiment import run

    return run(options)
