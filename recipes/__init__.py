"""The table of strategies: a name, the module that implements it, the engine it needs. Importing it loads no engine."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NamedTuple

from gptscale.common.errors import ConfigError
from gptscale.common.process import environments
from gptscale.common.settings.checks import did_you_mean

# Only errors: by themselves these write some hundred lines around each run, at its imports too.
for _logger in ("DeepSpeed", "torch.utils.cpp_extension"):
    logging.getLogger(_logger).addFilter(lambda record: record.levelno >= logging.ERROR)
# Tells an exception that it raises too, over a page of the whole schedule.
logging.getLogger("torch.distributed.pipelining.schedules").addFilter(lambda record: False)


class Recipe(NamedTuple):
    """One row: where a strategy lives and what it asks for.

    config: the name of its frozen dataclass in `module`. preset: fields of it that this row fixes.
    engine: distribution on the package index. axes: mesh axes it can split over, of dp, tp, pp; () is one process.
    needs_cuda: its engine refuses a CPU. series: versions of the engine that are known to work, as they begin; "" is any.
    environment: the one beside the running one that the engine lives in (common/process/environments.py); "" is the running one.
    what: one line for `gptscale list`.
    """

    module: str
    config: str
    what: str
    engine: str = "torch"
    axes: tuple[str, ...] = ("dp",)
    preset: dict[str, object] = {}  # noqa: RUF012  (a NamedTuple default; never written to)
    needs_cuda: bool = False
    series: str = ""
    environment: str = ""

    def load(self) -> ModuleType:
        """Import the module, and with it the engine; ConfigError, with the pip line, if it is missing, other, or broken."""
        where = "in this environment"
        if self.environment:
            environments.require(self.engine, self.series, self.environment)
            return import_module(self.module)  # which imports no engine: options are checked here, workers run there
        try:
            installed = version(self.engine)
        except PackageNotFoundError:
            raise ConfigError(
                f"{self.engine} is not installed", where, f"pip install 'gptscale[{self.engine}]'"
            ) from None
        if not installed.startswith(self.series):
            raise ConfigError(
                f"{self.engine} {installed} is installed, this recipe works with {self.series}*",
                where,
                f"pip install 'gptscale[{self.engine}]'",
            )
        try:
            return import_module(self.module)
        except Exception as error:  # whatever a broken installation raises when it is imported
            reason = f"{self.engine} is installed but does not import ({type(error).__name__}: {error})"
            raise ConfigError(reason, where, f"pip install --force-reinstall 'gptscale[{self.engine}]'") from error


def _zero(what: str, **preset: object) -> Recipe:
    return Recipe("gptscale.recipes.zero", "ZeroConfig", what, "deepspeed", preset=preset, series="0.19.")


def _colossal(module: str, config: str, what: str, axes: tuple[str, ...], needs_cuda: bool = False) -> Recipe:
    module = f"gptscale.recipes.{module}"
    return Recipe(
        module, config, what, "colossalai", axes=axes, series="0.5.0", environment="colossalai", needs_cuda=needs_cuda
    )


RECIPES: dict[str, Recipe] = {
    "single": Recipe("gptscale.recipes.single", "SingleConfig", "one device, the reference for all others", axes=()),
    "ddp": Recipe("gptscale.recipes.ddp", "DDPConfig", "replicas; gradients all-reduced in buckets"),
    "fsdp": Recipe("gptscale.recipes.fsdp", "FSDPConfig", "weights, gradients, optimizer sharded (fully_shard); HSDP"),
    "fsdp_offload": Recipe(
        "gptscale.recipes.fsdp",
        "FSDPConfig",
        "fsdp with shards and optimizer kept in host memory",
        preset={"cpu_offload": True},
    ),
    "zero1": _zero("DeepSpeed ZeRO 1: fp32 weights and optimizer state sharded", stage=1),
    "zero2": _zero("DeepSpeed ZeRO 2: and gradients", stage=2),
    "zero3": _zero("DeepSpeed ZeRO 3: and the weights computed with", stage=3),
    "zero_offload": _zero("ZeRO (--stage) with the optimizer on the host, at stage 3 weights too", offload="cpu"),
    "zero_infinity": _zero("ZeRO 3 with optimizer and weights on NVMe (--nvme-path)", stage=3, offload="nvme"),
    "fairscale_sdp": Recipe(
        "gptscale.recipes.fairscale_sdp",
        "FairscaleSDPConfig",
        "OSS + ShardedDataParallel: ZeRO 2 by whole parameters",
        "fairscale",
        series="0.4.13",
    ),
    "fairscale_fsdp": Recipe(
        "gptscale.recipes.fairscale_fsdp",
        "FairscaleFSDPConfig",
        "FullyShardedDataParallel, the ancestor of torch's",
        "fairscale",
        needs_cuda=True,
        series="0.4.13",
    ),
    "tensor_parallel": Recipe(
        "gptscale.recipes.tensor_parallel",
        "TensorParallelConfig",
        "matrices and vocabulary cut, sequence between layers (DTensor)",
        axes=("tp",),
    ),
    "pipeline": Recipe(
        "gptscale.recipes.pipeline",
        "PipelineConfig",
        "layers cut into stages; GPipe, 1F1B, interleaved, zero-bubble (--schedule)",
        axes=("pp",),
    ),
    "hybrid_3d": Recipe(
        "gptscale.recipes.hybrid_3d",
        "HybridConfig",
        "data x tensor x pipeline on one mesh (--tp-size, --pp-size)",
        axes=("dp", "tp", "pp"),
    ),
    "accelerate_fsdp": Recipe(
        "gptscale.recipes.accelerate_fsdp",
        "AccelerateFSDPConfig",
        "fully_shard through Hugging Face Accelerate",
        "accelerate",
    ),
    "lightning_fabric": Recipe(
        "gptscale.recipes.fabric",
        "LightningFabricConfig",
        "a strategy by name through Lightning Fabric",
        "lightning-fabric",
    ),
    "colossal_tensor": _colossal(
        "colossal_hybrid",
        "ColossalTensorConfig",
        "Colossal-AI: matrices cut over tensor ranks",
        ("tp", "dp"),
    ),
    "colossal_pipeline": _colossal(
        "colossal_hybrid",
        "ColossalPipelineConfig",
        "Colossal-AI: blocks over stages, 1F1B or interleaved, and tensor ranks",
        ("pp", "tp", "dp"),
    ),
    "colossal_gemini": _colossal(
        "colossal_data",
        "ColossalGeminiConfig",
        "Colossal-AI's Gemini: weights and state in chunks, on the device or the host",
        ("dp",),
        needs_cuda=True,
    ),
    "colossal_zero": _colossal(
        "colossal_data",
        "ColossalZeroConfig",
        "Colossal-AI's LowLevelZero: ZeRO 1 or 2 (--stage)",
        ("dp",),
        needs_cuda=True,
    ),
}


def get(name: str) -> Recipe:
    """The row of `name`; ConfigError with the nearest name if there is none."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}", "on the command line", did_you_mean(name, RECIPES))
    return RECIPES[name]
