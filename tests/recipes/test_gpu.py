"""Every row on the GPUs of this machine, if it has any: the losses of one GPU, and a resume that changes no bit."""

import subprocess
import sys

import pandas as pd
import pytest
import torch

from gptscale.common.process.mock import is_mock
from gptscale.launchers.run.preflight import why_not_here
from gptscale.recipes import RECIPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(is_mock(), reason="a run does not start under a mock of CUDA"),
]
WORK = ["--steps", "8", "--grad-accum-steps", "2", "--global-batch-size", "16", "--save-every", "4", "--no-tensorboard"]


def run(out, recipe, name, *options):
    nproc = torch.cuda.device_count() if RECIPES[recipe].axes else 1
    command = [sys.executable, "-m", "gptscale.launchers.cli", "run", recipe, "--nproc", str(nproc), *WORK, *options]
    command += ["--out", str(out), "--run-name", name, *(["--same-work"] if RECIPES[recipe].own_work else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return pd.read_csv(out / "runs" / name / "steps.csv", float_precision="round_trip").set_index("step")


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), "single", "one")


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_as_one_gpu_does_and_resumes_bit_for_bit(recipe, one_gpu, tmp_path):
    if reason := why_not_here(recipe):
        pytest.skip(reason)
    if recipe == "colossal_gemini":
        pytest.skip("computes in 16 bits only")
    found = run(tmp_path, recipe, "whole")
    for column in ("loss", "grad_norm"):
        assert ((found[column] - one_gpu[column]).abs() / one_gpu[column]).max() <= 1e-5
    rest = run(tmp_path, recipe, "rest", "--resume", str(tmp_path / "runs" / "whole" / "checkpoints" / "step-4"))
    assert found.loc[5:, ["loss", "grad_norm"]].equals(rest[["loss", "grad_norm"]])


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "single"])
def test_bf16_stays_near_one_gpu_in_bf16(recipe, tmp_path):
    if reason := why_not_here(recipe):
        pytest.skip(reason)
    if recipe == "fairscale_fsdp" and torch.cuda.device_count() == 1:
        pytest.skip("one rank cannot accumulate in 16 bits")
    one, found = (run(tmp_path, name, name, "--precision", "bf16") for name in ("single", recipe))
    assert ((found.loss - one.loss).abs() / one.loss).max() <= 2e-3
