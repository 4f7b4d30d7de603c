"""Which contenders there are on a machine, and when their results are comparable."""

from __future__ import annotations

import pytest
import torch

from benchmarks.model import contenders as model_contenders
from benchmarks.model import options as model_options
from benchmarks.model.options import ContenderResult, ModelBenchOptions, check_losses, comparable, resolve
from gptscale.common.errors import GptscaleError
from gptscale.common.settings.gpt_config import PRESETS


def test_fp8_alone_is_not_comparable_yet():
    fp8, single = ContenderResult("single_fp8", times_s=[[1.0]]), ContenderResult("single")
    assert not comparable([fp8, single], rounds=1)
    single.times_s.append([1.0])
    assert comparable([fp8, single], rounds=1)
    assert not comparable([fp8, single], rounds=2)
    single.failure = "out of memory"
    assert not comparable([fp8, single], rounds=1)


def test_no_loss_is_not_the_same_loss():
    a, b = ContenderResult("single", losses=[1.0, 2.0]), ContenderResult("minimal", losses=[1.0, float("nan")])
    with pytest.raises(Exception, match="step 2 has loss nan in minimal"):
        check_losses([a, b], 1e-4)


def test_fp8_may_be_further_apart_and_is_no_measure():
    fp8, a = ContenderResult("single_fp8", losses=[5.02, 4.02]), ContenderResult("single", losses=[5.0, 4.0])
    check_losses([fp8, a, ContenderResult("minimal", losses=[5.001, 4.001])], 3e-3)
    with pytest.raises(GptscaleError, match=r"loss 4\.100000 in minimal and 4\.000000 in single: more than 0\.003"):
        check_losses([fp8, a, ContenderResult("minimal", losses=[5.0, 4.1])], 3e-3)
    fp8.losses[1] = 4.04
    with pytest.raises(GptscaleError, match=r"loss 4\.040000 in single_fp8 and .*: more than 0\.03 apart"):
        check_losses([fp8, a], 3e-3)
    check_losses([], 3e-3)


def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    bench = resolve(ModelBenchOptions())
    assert bench.gpt == PRESETS["1.6b"]
    assert (bench.batch_size, bench.precision, bench.device) == (33, "bf16", "cuda")
    assert bench.steps * bench.rounds >= 50
    assert set(ModelBenchOptions().names(bench)) == {
        *model_options.OF_THIS_PACKAGE,
        *model_options.ON_CUDA,
        *model_options.OTHERS,
    }
    assert set(model_contenders.CONTENDERS) == {
        *model_options.OF_THIS_PACKAGE,
        *model_options.ON_CUDA,
        *model_options.OTHERS,
    }
    in_fp32 = resolve(ModelBenchOptions(dtype="fp32"))
    assert "single_fp8" not in ModelBenchOptions().names(in_fp32)
    with pytest.raises(GptscaleError, match="single_fp8: compared with bf16, not fp32, in --contenders"):
        resolve(ModelBenchOptions(dtype="fp32", contenders="single,single_fp8"))
    with pytest.raises(GptscaleError, match="single_fp8 alone has nothing to be compared with"):
        resolve(ModelBenchOptions(contenders="single_fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(Exception, match="bf16 needs Ampere"):
        resolve(ModelBenchOptions())
