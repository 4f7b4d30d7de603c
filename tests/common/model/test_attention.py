"""Padding of heads, and the choice of the kernel: what can be seen of both on a CPU."""

import contextlib
import functools
import importlib.util
import typing

import pytest
import torch
from torch.nn.attention import sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gptscale.common.errors import ConfigError
from gptscale.common.model import attention
from gptscale.common.model import gpt as model
from gptscale.common.model.attention import apply_attention, check_attention
from gptscale.common.model.build import apply_activation_checkpointing
from gptscale.common.model.compilation import apply_compile
from gptscale.common.model.gpt import GPT, causal_attention
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run_config import RunConfig

# The heads of this model are 10 wide.
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=20, block_size=16, vocab_size=101)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# The torch of Colossal-AI's environment is 2.5.
OLD_TORCH = importlib.util.find_spec("torch.nn.attention._fa3") is None
NO_FLASH3 = "cannot take FlashAttention-3's kernels" if OLD_TORCH else "module flash_attn_interface is not installed"
FLASH_FOR_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class Operators(TorchDispatchMode):
    """Names and shapes of first arguments of what runs inside."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    # Else torch 2.15 compiles nothing under this mode, which sees the operators of compiled code all the same.
    ignore_compile_internals = classmethod(lambda cls: True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] = getattr(args[0], "shape", None) if args else None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("head_dim", [50, 56, 3])
def test_padded_heads_compute_what_unpadded_ones_do(head_dim):
    """In fp64, forward and gradient agree to rounding. The padding is there, and nothing outside of attention sees it."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 4, 3, head_dim, dtype=torch.float64, requires_grad=True)
    found = []
    for multiple in (1, 8):
        with Operators() as operators:
            y = causal_attention(qkv, multiple=multiple)
        assert operators.seen[FLASH_FOR_CPU][-1] == head_dim + (-head_dim % multiple)
        (grad,) = torch.autograd.grad(y.square().sum(), qkv)
        found.append((y, grad))
    assert found[0][0].shape == (2, 9, 4 * head_dim)
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(plain, padded, rtol=1e-12, atol=1e-12)


def test_a_model_pads_on_the_devices_that_want_it(monkeypatch):
    for width in (10, 16):
        with Operators() as operators:
            GPT(SMALL)(torch.zeros(2, 16, dtype=torch.long))
        assert operators.seen[FLASH_FOR_CPU][-1] == width
        # A CPU does not want it of itself.
        monkeypatch.setitem(model.HEAD_DIM_MULTIPLE, "cpu", 8)


@pytest.mark.parametrize("wrapped", ["eager", "checkpointed", "compiled"])
def test_the_kernel_asked_for_computes(wrapped, monkeypatch):
    """math on a CPU: no fused kernel is left, also where forward is traced or done again."""
    if wrapped == "compiled" and OLD_TORCH:
        pytest.skip("torch 2.5 compiles nothing while operators are watched, and never that code again")
    torch.manual_seed(0)
    ids = torch.randint(0, 101, (2, 17))
    losses = []
    for name in ("auto", "math"):
        torch.manual_seed(0)
        gpt = GPT(SMALL)
        apply_attention(gpt.blocks, name)
        if wrapped == "checkpointed":
            apply_activation_checkpointing(gpt.blocks, "selective")
        if wrapped == "compiled":
            with monkeypatch.context() as patch:
                patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
                apply_compile(gpt.blocks)
        with Operators() as operators:
            loss = gpt(ids[:, :-1], ids[:, 1:])
            loss.backward()
        losses.append(loss.detach())
        assert (FLASH_FOR_CPU in operators.seen) == (name == "auto")
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    torch._dynamo.reset()


def test_every_choice_of_the_option_has_its_kernel():
    assert typing.get_args(typing.get_type_hints(RunConfig)["attention"]) == ("auto", *attention.BACKENDS)


@pytest.mark.parametrize(
    ("options", "device", "capability", "said"),
    [
        ({"attention": "flash"}, CPU, None, "flash attention needs a CUDA device, in --attention, use auto or math"),
        ({"attention": "efficient"}, CPU, None, "efficient attention needs a CUDA device"),
        ({"attention": "efficient", "model": "llama-tiny"}, CUDA, None, "efficient attention shares no keys between heads"),
        ({"attention": "cudnn"}, CUDA, (9, 0), "cudnn attention computes in 16 bits"),
        ({"attention": "flash", "precision": "fp16"}, CUDA, (7, 5), r"flash attention needs Ampere \(8.0\) or newer, not 7.5"),
        ({"attention": "flash3", "precision": "bf16"}, CUDA, (10, 0), r"flash3 attention needs Hopper \(9.0\), not 10.0"),
        ({"attention": "flash3", "precision": "bf16", "dropout": 0.1}, CUDA, (9, 0), "FlashAttention-3 has no dropout"),
        ({"attention": "flash3", "precision": "bf16"}, CUDA, (9, 0), NO_FLASH3),
        ({"attention": "math"}, CPU, None, ""),
        ({"attention": "efficient"}, CUDA, (9, 0), ""),
        ({"attention": "flash", "precision": "bf16"}, CUDA, (8, 0), ""),
        ({"attention": "cudnn", "precision": "bf16"}, CUDA, (9, 0), ""),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_run_is_refused_and_no_other(options, device, capability, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        check_attention(RunConfig(**options), device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "flash", "cudnn", "efficient", "math"])
def test_every_kernel_of_a_gpu_computes_the_same(name):
    """Heads of 50, padded as the model pads them, in bf16, against fp64 on the CPU."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 128, 4, 3, 50, dtype=torch.float64, requires_grad=True)
    expected = causal_attention(qkv)
    grad = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, qkv, grad)
    narrow = qkv.detach().to("cuda", torch.bfloat16).requires_grad_()
    with sdpa_kernel(attention.BACKENDS[name]) if name != "auto" else contextlib.nullcontext():
        found = causal_attention(narrow, multiple=model.HEAD_DIM_MULTIPLE["cuda"])
    (found_grad,) = torch.autograd.grad(found, narrow, grad.to("cuda", torch.bfloat16))
    for a, b in ((found, expected), (found_grad, expected_grad)):
        assert (a.cpu().double() - b).abs().max() < 3e-2 * b.abs().max()
