"""Tell what limited a run that has ended.

A lab judges the run by the evidence in its folder. It is found by its name, because nothing here depends on it.
"""

from __future__ import annotations

import traceback
from importlib import import_module
from pathlib import Path

from gptscale.common.errors import GptscaleError
from gptscale.common.measure.evidence import EVIDENCE
from gptscale.results.record.files import warn

# Its `judge_run` takes the folder of a run, keeps the verdict there and in the run's row, and returns it.
LAB = "gptscale.foresight.verdict.of_run"


def tell_verdict(folder: Path) -> None:
    """Ask the lab for the verdict on a run and print its line. A run without evidence has none.

    The run is over, and its exit status stands. What goes wrong here is said, and the row has no verdict.
    """
    if not (folder / EVIDENCE).exists():
        return
    try:
        print(f"  verdict {import_module(LAB).judge_run(folder).line()}    (gptscale why {folder})", flush=True)
    except GptscaleError as error:
        warn(f"{folder.name} has no verdict ({error})")
    except Exception as error:
        traceback.print_exc()
        warn(f"{folder.name} has no verdict, by a defect of gptscale ({type(error).__name__}, see above)")
