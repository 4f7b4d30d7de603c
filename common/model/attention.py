"""Which of torch's kernels computes attention: what each needs, and how a model is told."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from gptscale.common.errors import ConfigError
from gptscale.common.model.gpt import Attention
from gptscale.common.settings.run_config import RunConfig

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FLASH3 = "flash_attn_interface"  # the module that FlashAttention-3 is built as; torch finds its kernels there


def check_attention(config: RunConfig, device: torch.device) -> None:
    """ConfigError unless the kernel asked for runs on `device` in this run's precision; torch would say so in the first step."""
    name, where = config.attention, "in --attention"
    if name in ("auto", "math"):
        return
    if device.type != "cuda":
        raise ConfigError(f"{name} attention needs a CUDA device", where, "use auto or math")
    if name == "efficient":
        return
    if config.precision == "fp32":
        raise ConfigError(f"{name} attention computes in 16 bits", where, "use efficient or math, or --precision bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0) or (name == "flash3" and capability[0] != 9):
        needs = "Hopper (9.0)" if name == "flash3" else "Ampere (8.0) or newer"
        raise ConfigError(f"{name} attention needs {needs}, not {capability[0]}.{capability[1]}", where, "use auto")
    if name == "flash3":
        _check_flash3(config)


def _check_flash3(config: RunConfig) -> None:
    where = "in --attention"
    if config.dropout:
        raise ConfigError("FlashAttention-3 has no dropout", where, "use flash, or --dropout 0")
    if importlib.util.find_spec("torch.nn.attention._fa3") is None:
        raise ConfigError(f"torch {torch.__version__} cannot take FlashAttention-3's kernels", where, "use torch 2.11")
    if importlib.util.find_spec(FLASH3) is None:
        fix = "build the folder hopper of github.com/Dao-AILab/flash-attention, or use flash"
        raise ConfigError(f"flash3 needs FlashAttention-3, whose module {FLASH3} is not installed", where, fix)


def apply_attention(blocks: Iterable[nn.Module], name: str) -> None:
    """Make the attention of each block be computed by the kernel called `name`; `auto`: by torch's own choice, per shape."""
    if name == "auto":
        return
    if name == "flash3":
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")  # in the whole process: torch's flash attention is this one from now on
    for block in blocks:
        assert isinstance(block.attn, Attention)
        block.attn.backend = BACKENDS[name]
