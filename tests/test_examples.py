"""The examples run as their docstrings say, and learn something."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", ended.stdout)]
    assert len(losses) >= 3
    assert losses[-1] < 0.8 * losses[0]


def test_there_are_three_ways():
    assert [e.stem for e in EXAMPLES] == ["copy_shard", "import_build", "import_shard"]


def test_the_copy_imports_nothing_of_the_package():
    assert "import gptscale" not in EXAMPLES[0].read_text()
    assert "from gptscale" not in EXAMPLES[0].read_text()
