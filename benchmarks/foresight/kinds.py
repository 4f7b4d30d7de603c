"""Small models that are no language models, by every split that `gptscale fit` writes, on CPU ranks, against one process.

    python -m benchmarks.foresight.kinds --csv kinds.csv [--kinds vit,unet] [--splits all] [--ranks 2,4]

A row for each pair of model and split: the ranks on which every gradient and every update is right and the largest relative
deviation of a gradient, or the reason why it is refused or wrong. Programs and proofs are those of `fit`.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.foresight.fit.splits import splits
from gptscale.foresight.fit.subject import subject_of
from gptscale.foresight.fit.trials import FitRow, Trials
from gptscale.foresight.fit.write import Choice
from gptscale.foresight.plan.question import gpu_cluster
from gptscale.foresight.simulate.interpreters import prepare_mock
from gptscale.launchers.cli import start

FILE = Path(__file__).parent / "programs" / "kinds.py"
KINDS = "vit bert t5 whisper resnet resnet_bn unet lstm graphs mixture pairs".split()
SPLITS = splits(8, 8)
COLUMNS = ("model", "split", "ranks", "gradient", "in_double", "why")


@dataclass(frozen=True)
class KindsOptions:
    """Which models, by which splits, on how many ranks."""

    csv: Path
    """The file for the rows."""
    kinds: str = ",".join(KINDS)
    """Names with commas between."""
    splits: str = ",".join(name for name in SPLITS if "4" not in name and "8" not in name)
    """Splits of `gptscale fit` with commas between."""
    ranks: str = "2,4"
    """Numbers of CPU ranks with commas between. A split whose smallest world is larger runs on that alone."""

    def __post_init__(self) -> None:
        parse_names(self.kinds, KINDS, "model", "--kinds")
        parse_names(self.splits, SPLITS, "split", "--splits")


def rows(kind: str, options: KindsOptions) -> Iterator[FitRow]:
    """Yield what each split of a model is: proved on some ranks, or left out for a reason."""
    with tempfile.TemporaryDirectory(prefix="gptscale-kinds-") as folder:
        subject = subject_of(f"{FILE}:{kind}", f"{FILE}:{kind}_batch", "", None, Path(folder))
        trials = Trials(subject, gpu_cluster("h100-80", 1, 8, None), Path(folder), lambda _: None)
        reasons = {"blocks": "" if subject.block else "no block that is repeated", "chain": subject.no_chain}
        reasons["plan"] = "" if subject.plan else "no plan for tensor ranks"
        try:
            trials.reference = Future()
            trials.reference.set_result(trials.record(splits(1, 1)["single"], 1, "reference"))
            for name in options.splits.split(","):
                split = SPLITS[name]
                row = FitRow(name, split, Choice(8, 1, 8, 1, "fp32", False), 0)
                if why := next(filter(None, (reasons[need] for need in split.needs)), ""):
                    yield FitRow(name, split, row.choice, 0, why=f"refused: {why}")
                    continue
                for ranks in (n for n in map(int, options.ranks.split(",")) if n >= split.least):
                    row = row if row.why else trials.proved(row, ranks)
                yield row
        finally:
            trials.close()


def main(argv: Sequence[str]) -> int:
    """Try all pairs, write a row when it is known, and return 1 if one is wrong."""
    options, wrong = parse(KindsOptions, argv, prog="python -m benchmarks.foresight.kinds"), False
    prepare_mock()
    # Where the programs find the models.
    os.environ["PYTHONPATH"] = ":".join(filter(None, (str(FILE.parent), os.environ.get("PYTHONPATH"))))
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for kind in options.kinds.split(","):
            for row in rows(kind, options):
                wrong |= bool(row.why) and not row.why.startswith("refused")
                ranks = " and ".join(map(str, row.proved))
                cells = (kind, row.name, ranks, f"{row.worst:.1e}" if row.proved else "", row.in_double, row.why)
                writer.writerow(cells)
                file.flush()
                print(*cells, flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(start(main))
