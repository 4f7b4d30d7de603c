"""Compare what two commits compute, bit for bit: `python tools/same_bits.py BASE`, run with the environment's Python.

Each side runs `gptscale parity` for ten steps: every recipe that runs here, AdamW and SGD, accumulation and clipping, two
ranks. The losses and gradient norms of each run must be the same text, and the files of its last checkpoint the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("common", "foresight", "launchers", "lenet", "ops", "recipes", "results")
TIMEOUT_S = 3600


def main() -> int:
    """Run both sides, print each run that differs, and return 1 if any does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("base", help="a commit, or the folder of another checkout")
    parser.add_argument("--recipes", default="all", help="names with commas between")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gptscale-bits-") as temporary:
        folder = Path(temporary)
        checkout = Path(arguments.base)
        if not checkout.is_dir():
            checkout = folder / "base"
            subprocess.run(["git", "worktree", "add", "--detach", "-q", checkout, arguments.base], cwd=ROOT, check=True)
        try:
            base = bits(checkout.resolve(), folder / "base-runs", arguments.recipes)
            head = bits(ROOT, folder / "head-runs", arguments.recipes)
        finally:
            if checkout == folder / "base":
                subprocess.run(["git", "worktree", "remove", "--force", checkout], cwd=ROOT, check=True)
    different = [name for name in sorted({*base, *head}) if base.get(name) != head.get(name)]
    for name in different:
        missing = [side for side, runs in (("BASE", base), ("HEAD", head)) if name not in runs]
        print(f"{name}: {f'no run at {missing[0]}' if missing else first_difference(base[name], head[name])}")
    print(f"{len(base)} runs at BASE, {len(head)} at HEAD: {len(different)} differ")
    return 1 if different or not base else 0


def bits(checkout: Path, folder: Path, recipes: str) -> dict[str, list[str]]:
    """Return the bits of each run of `gptscale parity` with the code of `checkout`: its steps, then its files' hashes."""
    package, out = folder / "package", folder / "out"
    (package / "gptscale").mkdir(parents=True)
    # These links come before the installed package, in the ranks too.
    for room in ROOMS:
        (package / "gptscale" / room).symlink_to(checkout / room)
    command = [
        sys.executable,
        "-m",
        "gptscale.launchers.cli",
        "parity",
        "--recipes",
        recipes,
        "--steps",
        "10",
        "--out",
        str(out),
    ]
    ended = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(package)}, timeout=TIMEOUT_S)
    if ended.returncode not in (0, 1):
        sys.exit(f"gptscale parity of {checkout} ended with {ended.returncode}")
    return {run.name: bits_of_run(run) for run in sorted((out / "runs").iterdir())}


def bits_of_run(run: Path) -> list[str]:
    """Return loss and norm of each step as they were written, and the hash of each file of the last checkpoint."""
    with (run / "steps.csv").open(newline="") as file:
        lines = [f"step {row['step']}: loss {row['loss']}, norm {row['grad_norm']}" for row in csv.DictReader(file)]
    last = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    files = json.loads((last / "manifest.json").read_text())["files"]
    return lines + [f"{entry['file']}: {entry['sha256']}" for entry in files]


def first_difference(base: list[str], head: list[str]) -> str:
    """Return the first line that differs, as each side has it."""
    pairs = zip(base + [""] * len(head), head + [""] * len(base), strict=False)
    return next(f"{one or 'nothing'} at BASE, {other or 'nothing'} at HEAD" for one, other in pairs if one != other)


if __name__ == "__main__":
    sys.exit(main())
