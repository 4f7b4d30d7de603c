"""Leave the row of a run whose rank 0 was killed: python -m gptscale.launchers.run.lost_row FOLDER STATUS.

Ends with 0 if all steps of the run were done before a rank died, else with 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gptscale.common.errors import StorageError
from gptscale.results.columns import SUMMARY
from gptscale.results.record.files import warn
from gptscale.results.record.launch_with_row import leave_lost_row
from gptscale.results.record.run_folder import START


def main(folder: Path, status: int) -> int:
    """Write the row of the start that the environment names, and return the exit status."""
    try:
        return 0 if leave_lost_row(folder, os.environ[START], status, SUMMARY) else 1
    except StorageError as full:
        warn(str(full))
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
