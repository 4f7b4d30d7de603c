"""Nothing that was computed under the mock is a speed or a loss: whoever tries to make one is refused."""

import os
import subprocess
import sys

import pytest
from mocked import mock_variables

pytestmark = pytest.mark.slow

COMMANDS = ["run single", "sweep", "parity", "lenet train", "simulate fsdp"]
COMMANDS += ["benchmarks.model", "benchmarks.ops", "tools.soak"]


def under_mock(*command, **variables):
    environ = {**os.environ, **mock_variables("", "h200", 8), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_refuses(words, tmp_path):
    module = words if "." in words else f"gptscale.launchers.cli {words}"
    ended = under_mock(sys.executable, "-m", *module.split(), "--out", str(tmp_path / "out"))
    assert ended.returncode == 2
    what = "gptscale: error: CUDA is a mock that computes nothing, so it cannot carry out this command, in LD_PRELOAD"
    assert ended.stderr.startswith(what)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_rank_that_a_launcher_started_refuses(device, variables, tmp_path):
    words = ["single", "--device", device, "--model", "tiny", "--data", "synthetic", "--out", str(tmp_path / "out")]
    ended = under_mock(sys.executable, "-m", "gptscale.recipes", *words, **variables)
    assert ended.returncode == 2
    assert "CUDA is a mock that computes nothing, so it cannot train" in ended.stderr
    assert not list((tmp_path / "out").glob("*.csv"))


def test_no_row_and_no_other_name(tmp_path):
    """Neither inside a simulation, nor by a name in the environment."""
    code = f"""if True:
        from pathlib import Path
        import torch
        from gptscale.common.errors import StorageError
        from gptscale.common.process.mock import simulating
        from gptscale.results.columns import SUMMARY
        from gptscale.results.record.files import append_row
        with simulating():
            try:
                append_row(SUMMARY, Path({str(tmp_path)!r}), {{"status": "ok"}})
            except StorageError as error:
                print(error)
        print(torch.cuda.get_device_name(0))
        print(*(torch.tensor(byte, dtype=torch.uint8).cuda().view(torch.bool).item() for byte in (1, 7)))
        """
    ended = under_mock(sys.executable, "-c", code, GPTSCALE_MOCK_NAME="NVIDIA H200")
    first, name, bools = ended.stdout.splitlines()
    assert first.startswith("CUDA is a mock, and its figures are none")
    assert name == "mock of NVIDIA H200"
    # A bool that no kernel wrote is false.
    assert bools == "True False"
    assert not list(tmp_path.iterdir())
