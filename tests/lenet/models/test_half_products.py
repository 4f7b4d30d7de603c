"""Products in short types where torch has no fast ones: computed in fp32, rounded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.common.measure import devices
from gptscale.lenet.models import half_products
from gptscale.lenet.models.half_products import (
    RoundedProducts,
    gradient_seconds,
    has_slow_gradients,
    rounded_products,
    rounding_note,
)
from gptscale.lenet.models.registry import ImageShape
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import world_from_environment
from gptscale.lenet.run.worker import train

CPU = torch.device("cpu")


@pytest.fixture
def old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"avx2"})


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_and_gradients_are_those_of_fp32_rounded_once(dtype: torch.dtype) -> None:
    x, w, b = drawn(4, 3, 8, 8, dtype=dtype), drawn(5, 3, 3, 3, dtype=dtype), drawn(5, dtype=dtype)
    v, c = drawn(180, 7, dtype=dtype), drawn(7, dtype=dtype)
    wide = [t.detach().float().requires_grad_() for t in (x, w, b)]
    with RoundedProducts(dtype):
        maps = F.conv2d(x, w, b)
        gradients = torch.autograd.grad(maps.sum(), (x, w, b))
        logits = torch.addmm(c, maps.detach().flatten(1), v)
    whole = F.conv2d(*wide)
    assert torch.equal(maps, whole.to(dtype))
    for ours, exact in zip(gradients, torch.autograd.grad(whole.sum(), wide), strict=True):
        assert torch.equal(ours, exact.to(dtype))
    assert torch.equal(logits, torch.addmm(c.float(), maps.float().flatten(1), v.float()).to(dtype))
    plain = F.conv2d(x, w, b)
    assert torch.allclose(maps, plain, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_a_product_beyond_the_range_of_fp16_is_infinite() -> None:
    with RoundedProducts(torch.float16):
        assert torch.isinf(torch.full((1, 2), 300.0).half() @ torch.full((2, 1), 300.0).half()).all()
        # fp32 stays what it is.
        assert (torch.full((1, 2), 300.0) @ torch.full((2, 1), 300.0)).item() == 180_000


def test_only_a_processor_without_the_instructions_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"avx512bw", "avx512_bf16"})
    monkeypatch.setattr(half_products, "has_slow_gradients", lambda dtype: False)
    assert not isinstance(rounded_products("bf16", torch.bfloat16, CPU), RoundedProducts)
    assert isinstance(rounded_products("fp16", torch.float16, CPU), RoundedProducts)
    assert not isinstance(rounded_products("fp16", torch.float16, torch.device("cuda")), RoundedProducts)
    assert rounding_note("fp32", CPU) == rounding_note("bf16", CPU) == []
    assert "no instructions for fp16" in rounding_note("fp16", CPU)[0]


def test_where_torch_is_slow_a_processor_with_the_instructions_rounds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"avx512bw", "avx512_bf16", "avx512_fp16"})
    seconds = {torch.float32: 1e-4, torch.bfloat16: 2e-4, torch.float16: 6e-3}
    monkeypatch.setattr(half_products, "gradient_seconds", seconds.__getitem__)
    monkeypatch.setattr(half_products, "has_slow_gradients", has_slow_gradients.__wrapped__)
    assert isinstance(rounded_products("fp16", torch.float16, CPU), RoundedProducts)
    assert "torch has no fast gradients of convolutions in fp16" in rounding_note("fp16", CPU)[0]
    assert not isinstance(rounded_products("bf16", torch.bfloat16, CPU), RoundedProducts)
    assert rounding_note("fp32", CPU) == rounding_note("fp16", torch.device("cuda")) == []


def test_the_choice_is_measured_and_is_the_faster_one() -> None:
    """A short type that does not round is not slow here, and fp32 is never slow."""
    n_threads = torch.get_num_threads()
    exact = gradient_seconds(torch.float32)
    assert exact > 0
    assert not has_slow_gradients(torch.float32)
    assert torch.get_num_threads() == n_threads
    for precision, dtype in half_products.SHORT_TYPES.items():
        with rounded_products(precision, dtype, CPU):
            # Without its own products this is what a step does. A busy machine may double it.
            assert gradient_seconds(dtype) < 20 * exact


@pytest.mark.parametrize("amp", [True, False])
def test_a_step_is_nearly_that_of_the_processors_own_fp16(amp: bool, old_processor: None) -> None:
    config = VisionConfig(device="cpu", precision="fp16", optimizer="sgd", amp=amp, loss_scale="1024")
    shape, world = ImageShape(1, 28, 10), world_from_environment(VisionConfig(device="cpu"))
    rounding, plain = (VisionEngine(config, shape, world) for _ in range(2))
    assert isinstance(rounding.products, RoundedProducts)
    plain.products = rounded_products("fp32", torch.float32, CPU)
    images, labels = torch.randn(16, 1, 28, 28), torch.arange(16) % 10
    images = images if amp else images.half()
    for step in range(3):
        a, b = (engine.train_step(step, images, labels, 0.01) for engine in (rounding, plain))
        assert abs(a - b) < 2e-3
    for a, b in zip(rounding.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3)


def test_a_run_says_that_it_rounds(
    old_processor: None, tmp_path: Path, idx_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"data": str(idx_folder), "epochs": 1, "batch_size": 16, "precision": "bf16"}
    config = VisionConfig(out=tmp_path, device="cpu", tensorboard=False, **options)
    assert train(config, world_from_environment(config)).exit_status == 0
    assert "bf16     products in fp32, rounded" in capsys.readouterr().out
