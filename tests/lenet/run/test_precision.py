"""Tests of precisions: every mode of this processor trains, fp16 skips and counts overflows, and resumes without a trace."""

import pytest
import torch
from vision_runs import asked_to_stop, assert_same_end, harmed, run, table

from gptscale.common.engine import Batch
from gptscale.common.errors import ConfigError
from gptscale.common.measure import devices
from gptscale.lenet.models.registry import ImageShape
from gptscale.lenet.run import engine as engine_module
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import HalfSGD, VisionEngine
from gptscale.lenet.run.preflight import check_vision_precision, world_from_environment
from gptscale.lenet.studies.precision import MODES, PrecisionOptions, choose

LENET = ["--model", "lenet", "--batch-size", "32"]


@pytest.mark.slow
def test_every_mode_of_a_processor(study, monkeypatch, capsys):
    """Pretend that the processor multiplies bf16 and fp16, so that `auto` takes all modes but tf32."""
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"avx512bw", "avx512_fp16"})
    rows = study("precision", *LENET, "--max-steps", "20", "--lr", "0.1")
    assert rows.index.tolist() == [mode for mode in MODES if mode != "tf32"]
    assert rows.optimizer.eq("sgd").all()
    assert ((rows.loss_first - rows.loss_first["fp32"]).abs() < 0.01).all()
    fall = rows.loss_first - rows.loss_last
    assert fall["fp32"] > 0.15
    assert ((fall - fall["fp32"]).abs() < 0.25 * fall["fp32"]).all()
    # Each mode computes something else. Only two scales can agree: they are powers of two, and nothing underflows with either.
    assert rows.loss_last.drop("fp16-fixed").nunique() == len(rows) - 1
    assert rows.amp.to_dict() == {mode: "pure" not in mode for mode in rows.index}
    scales = rows.loss_scale.fillna("").to_dict()
    assert [mode for mode in rows.index if scales[mode] == "dynamic"] == ["fp16", "fp16-pure"]
    assert (scales["fp16-fixed"], scales["fp16-unscaled"], scales["bf16"]) == ("1024", "none", "")
    assert rows.skipped_steps.notna().to_dict() == {m: m in ("fp16", "fp16-fixed", "fp16-pure") for m in rows.index}
    # The kernel counts pages in batches, by thread, so the two may differ a little.
    assert (rows.avg_mem_gib < rows.peak_rss_gib + 0.02).all()
    assert (rows.avg_mem_gib > 0.1).all()
    assert (rows.cpu_util_percent > 0).all()
    said = capsys.readouterr().out
    assert "note: not run: tf32: needs a GPU of Ampere (8.0) or newer" in said
    assert "tf32 (not run: needs a GPU of Ampere (8.0) or newer)" in said
    assert "report C: VGG-19 on CIFAR-10, 200 epochs" in said


def test_what_a_machine_cannot_compute(monkeypatch):
    modes, missing = choose(PrecisionOptions(device="cpu"))
    assert modes == [mode for mode in MODES if mode != "tf32"]
    assert "needs a GPU of Ampere" in missing["tf32"]
    assert choose(PrecisionOptions(device="cpu", modes="fp16-pure,fp32")) == (["fp16-pure", "fp32"], {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    fp16, bf16 = (VisionConfig(**PrecisionOptions().run_options(mode)) for mode in ("fp16-pure", "bf16-pure"))
    check_vision_precision(fp16, torch.device("cuda"))
    with pytest.raises(ConfigError, match="bf16 needs Ampere"):
        check_vision_precision(bf16, torch.device("cuda"))


def engine(**options):
    config = VisionConfig(device="cpu", precision="fp16", **options)
    return VisionEngine(config, ImageShape(1, 28, 10), world_from_environment(config))


@pytest.mark.parametrize(("amp", "optimizer"), [(True, "sgd"), (True, "adam"), (False, "sgd")])
def test_a_step_that_overflows_changes_nothing(amp, optimizer):
    """It changes neither weights nor optimizer state nor the count of steps. The next step without overflow changes them."""
    tried = engine(amp=amp, optimizer=optimizer, loss_scale=str(2**24))
    images, labels = torch.randn(16, 1, 28, 28), torch.arange(16) % 10
    images = images if amp else images.half()
    before = {box.name: box.tensor.clone() for box in tried.state()}
    assert torch.isfinite(tried.train_step(Batch(0, images, labels), 0.01).loss)
    assert tried.skipped == 1
    assert all(torch.equal(box.tensor, before[box.name]) for box in tried.state())
    tried.fixed_scale = 128.0
    tried.scaler.update(128.0)
    tried.train_step(Batch(1, images, labels), 0.01)
    assert tried.skipped == 0
    assert not all(torch.equal(box.tensor, before[box.name]) for box in tried.state())


def test_the_scale_does_not_change_what_is_learnt():
    """Gradients are divided by the scale again, in fp32, even where they are fp16 themselves."""
    images, labels = torch.randn(16, 1, 28, 28).half(), torch.arange(16) % 10
    scaled, plain = (engine(amp=False, optimizer="sgd", loss_scale=scale) for scale in ("64", "none"))
    for step in range(3):
        a, b = (e.train_step(Batch(step, images, labels), 0.01).loss for e in (scaled, plain))
        assert abs(a - b) < 2e-3
    assert plain.skipped is None
    for ours, theirs in zip(scaled.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 64.0])
def test_sgd_of_half_weights_is_torchs_without_fusion(dtype, scale):
    """They agree within the rounding of weights and momentum. torch's fused SGD would not change most of these weights."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, generator=generator).to(dtype)
    gradients = [torch.randn(100, generator=generator).to(dtype) for _ in range(5)]
    ours, plain = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    half, torchs = HalfSGD([ours], **options), torch.optim.SGD([plain], foreach=False, **options)
    half.state[ours]["momentum_buffer"] = torch.zeros_like(ours)
    if scale is not None:
        half.grad_scale, half.found_inf = torch.tensor(scale), torch.tensor(0.0)
    for gradient in gradients:
        ours.grad, plain.grad = gradient * (scale or 1.0), gradient.clone()
        half.step()
        torchs.step()
    assert (plain - start).abs().mean() > 0.3
    assert torch.allclose(ours, plain, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_a_run_stopped_while_it_skips_continues_bit_identically(tmp_path, idx_folder, monkeypatch):
    """Begin with a scale that is far too high. It is halved step by step before and after the stop, then grows again."""

    def high(config, device):
        return torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4), None

    monkeypatch.setattr(engine_module, "make_scaler", high)
    options = {"data": str(idx_folder), "epochs": 4, "batch_size": 16, "save_every": 1, "log_every": 1}
    options |= {"precision": "fp16"}
    whole = run(tmp_path, "whole", **options)
    with asked_to_stop(2):
        assert run(tmp_path, "stopped", **options).row["skipped_steps"] == 3
    resumed = run(tmp_path, "stopped", resume="auto", **options)
    steps = [table(o) for o in (whole, resumed)]
    assert steps[0].skipped.tolist()[:4] == [1, 1, 1, 1]
    assert steps[0].skipped.tolist()[-1] == 0
    for column in ("loss", "skipped"):
        assert steps[0][column].equals(steps[1][column])
    assert whole.row["skipped_steps"] == resumed.row["skipped_steps"] == steps[0].skipped.sum()
    assert_same_end(whole.folder, resumed.folder)


def test_a_loss_that_overflows_is_a_result(study, undrawn, capsys):
    """It is in the rows and in a note, but in no median."""
    with harmed(2, seed=2):
        rows = study("precision", *LENET, "--modes", "fp32", "--repeats", "2", ends=("ok", "failed"))
    assert rows.status.tolist() == ["ok", "failed"]
    assert "note: fp32, seed 2: failed, loss nan, at step 3" in capsys.readouterr().out
