"""The choice of the kernel that computes attention: what each kernel needs, and how a model is switched to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The module that FlashAttention-3 is installed as. torch looks for the kernels there.
FLASH3 = "flash_attn_interface"


def check_attention(run: Run) -> None:
    """Raise ConfigError unless the run's device and options suit the kernel that it asks for.

    torch would raise an error too, but only in the first step.
    """
    config, device, where = run.config, run.world.device, "in --attention"
    name = config.attention
    if name in ("auto", "math"):
        return
    if device.type != "cuda":
        raise ConfigError(f"{name} attention needs a CUDA device", where, "use auto or math")
    if name == "efficient":
        if run.gpt.n_kv_head < run.gpt.n_head:
            raise ConfigError("efficient attention shares no keys between heads", where, "use flash or math")
        return
    if config.precision == "fp32":
        raise ConfigError(f"{name} attention computes in 16 bits", where, "use efficient or math, or --precision bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0) or (name == "flash3" and capability[0] != 9):
        needed = "Hopper (9.0)" if name == "flash3" else "Ampere (8.0) or newer"
        raise ConfigError(f"{name} attention needs {needed}, not {capability[0]}.{capability[1]}", where, "use auto")
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


def apply_attention(blocks: Iterable[Any], name: str) -> None:
    """Set the kernel that computes attention in each block.

    name: a key of BACKENDS, or `auto`, which leaves the choice to torch for each shape. `flash3` replaces the flash attention of
    torch in the whole process.
    """
    if name == "auto":
        return
    if name == "flash3":
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    for block in blocks:
        block.attn.backend = BACKENDS[name]
