"""Lines that cannot be written end no run."""

import json
import subprocess
import sys

import pytest

RUN = (
    "-m gptscale.launchers.cli run single --device cpu --n-layer 1 --n-embd 16 --n-head 2 --seq-len 16 --data synthetic "
    "--global-batch-size 2 --steps 30 --save-last --no-tensorboard --run-name r --out"
)


@pytest.mark.parametrize(
    ("redirection", "lost"),
    [
        ("> /dev/full", "standard output failed"),
        ("> /dev/full 2> /dev/full", "standard output failed"),
        ("| head -n 1", "standard output failed"),
        (">&- 2>&-", ""),
    ],
)
def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, redirection, lost):
    line = f"set -o pipefail; {sys.executable} {RUN} {tmp_path} {redirection}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "r"
    assert (run / "checkpoints" / "step-30" / "manifest.json").exists()
    end = json.loads((run / "status.json").read_text())
    assert end["status"] == "ok"
    assert end.get("lost_output", "").startswith(lost)
    if lost and "2> /dev/full" not in redirection:
        assert "the run went on without those lines" in ended.stderr + ended.stdout
