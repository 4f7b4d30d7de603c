"""One turn of `python -m benchmarks.engines` on one rank: the loop of a library and the recipe's. Argument: the recipe."""

import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

# Some library installs a package of the same name.
sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.engines.worker import compare
from gptscale.common.process.mock import is_mock, simulating
from gptscale.foresight.mock_cuda.host import leave_out
from gptscale.results.record.recorder import Recorder

if is_mock():
    leave_out()
    # A loss is what the device's memory happened to hold, and may be NaN.
    Recorder._check = lambda *arguments: None
with tempfile.TemporaryDirectory() as folder, simulating() if is_mock() else nullcontext():
    row = compare(sys.argv[1], 1, "tiny", 128, Path(folder))
sys.stdout.flush()
# At once, because a library's threads may hang in the interpreter's teardown.
os._exit(not row["ratio"] > 0)
