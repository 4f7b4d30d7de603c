"""The end of a job whose ranks have ended: python -m gptscale.launchers.cluster.after_ranks FOLDER STATUS.

Ends with 0 if all steps of the run were done, else with 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gptscale.common.errors import StorageError
from gptscale.launchers.run.verdict import tell_verdict
from gptscale.results.columns import SUMMARY
from gptscale.results.record.files import warn
from gptscale.results.record.launch_with_row import leave_lost_row
from gptscale.results.record.run_folder import START


def main(folder: Path, status: int) -> int:
    """Tell the verdict of a run that ended well, or leave the row that a killed rank 0 could not, and return the exit status."""
    if status == 0:
        tell_verdict(folder)
        return 0
    try:
        return 0 if leave_lost_row(folder, os.environ[START], status, SUMMARY) else 1
    except StorageError as full:
        warn(str(full))
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
