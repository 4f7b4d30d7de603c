"""Draw the picture of docs/guides/why.md from a made-up trace of two ranks: `python -m tools.why_picture`."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from gptscale.common.measure.evidence import RunFacts
from gptscale.foresight.verdict.files import write_verdict
from gptscale.foresight.verdict.judge import judge
from gptscale.launchers.cli import main as gptscale
from tests.worlds.made_traces import HEALTHY, Part, evidence_of, trace

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "why.png"


def main(path: Path = PICTURE) -> None:
    """Judge the trace and draw it. Rank 1 computes 70 ms longer, and rank 0 waits for it."""
    exchange = ("all_reduce", (0, 1), 4096)
    end = [Part("backward", True, 0.02, 0, exchange), Part("optimizer", False, 0.005)]
    work = HEALTHY[:-1]
    late = [*work, Part("backward", False, 0.07), *end]
    early = [*work, end[0]._replace(seconds=0.09), end[1]]
    verdict = judge(evidence_of([trace(0, early), trace(1, late)], RunFacts("ddp")))
    with tempfile.TemporaryDirectory() as run:
        write_verdict(Path(run), dataclasses.replace(verdict, remedy="a made-up trace"))
        gptscale(["why", run, "--png", str(path)])


if __name__ == "__main__":
    main()
