"""The table of strategies: the name of each, the module that implements it, and the facts that others need to know.

Importing it loads no engine, and neither does importing a recipe's module: torch comes with `build`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from gptscale.common.errors import ConfigError
from gptscale.common.process import environments
from gptscale.common.process.environments import installed
from gptscale.common.settings.checks import check_name
from gptscale.common.settings.mesh import AXES

# Let through errors only: these loggers write some hundred lines around each run, at its imports too.
for _logger in ("DeepSpeed", "torch.utils.cpp_extension"):
    logging.getLogger(_logger).addFilter(lambda record: record.levelno >= logging.ERROR)
# It logs an exception that it also raises, with a page of the whole schedule.
logging.getLogger("torch.distributed.pipelining.schedules").addFilter(lambda record: False)

# Imports of every rank, whatever its recipe: the worker, what parses its options, and what rank 0 records with.
WORKER_IMPORTS = ("gptscale.launchers.run.worker", "tyro", "tensorboard.compat.proto.event_pb2", "numpy.ma")


class Recipe(NamedTuple):
    """One row: where a strategy lives, what it asks for, and what is true of it.

    config: the name of its frozen dataclass in `module`. what: one line for `gptscale run --help`.
    engine: distribution on the package index. axes: mesh axes it can split over, of dp, cp, tp, pp; () is one process.
    mesh: the axes in the order of its ranks, the outermost first.
    preset: fields of the config that this row fixes. needs_cuda: its engine refuses a CPU.
    torch: the versions that have what it calls. Those of the engine that were tried stand in setup.cfg alone.
    environment: which environment beside the running one holds the engine (common/process/environments.py); "" is none.

    casts_weights: it computes with weights cast to the compute type, so that in bf16 the residual stream is bf16 too;
    otherwise autocast casts for each product, and the stream is fp32. fp8: its products in float8 were compared with one
    process's. cuda_graphs: no tensor moves between steps, so that CUDA graphs, which replay at fixed addresses, are safe.
    own_work: why what it trains is not what the others do, unless its options say so; "" for all but the exercise's baseline.
    memory: how a rank holds the model and what it gathers and sends: a name of foresight/memory/bound.py.
    process_gib: resident memory before the first tensor of a model, measured with torch 2.11 and DeepSpeed 0.19.8 on a
    CPU; 0 where `python -m benchmarks.memory` does not need it.
    """

    module: str
    config: str
    what: str
    memory: str
    engine: str = "torch"
    axes: tuple[str, ...] = ("dp",)
    mesh: tuple[str, ...] = AXES
    preset: dict[str, object] = {}  # noqa: RUF012  (a NamedTuple default; never written to)
    needs_cuda: bool = False
    torch: str = ""
    environment: str = ""
    casts_weights: bool = False
    fp8: bool = False
    cuda_graphs: bool = False
    process_gib: float = 0.0
    own_work: str = ""

    @property
    def library_optimizer(self) -> bool:
        """Return whether the optimizer is a library's own, or one that a library takes apart, with fp32 state."""
        return self.engine != "torch"

    @property
    def imports(self) -> tuple[str, ...]:
        """Return the modules that each rank of a run imports: the worker, its options, the recipe and its engine."""
        return (*WORKER_IMPORTS, self.module, *self.engine_imports)

    @property
    def engine_imports(self) -> tuple[str, ...]:
        """Return the modules of the engine, and what it trains with."""
        model = ("gptscale.common.model.build", "gptscale.common.optim.fused")
        stages = ("gptscale.common.engines.pipeline.build",) if "pp" in self.axes else ()
        engines = {
            "torch": (*model, *stages),
            "deepspeed": (
                "deepspeed",
                "gptscale.common.engines.zero.library",
                "gptscale.common.engines.zero.operators",
                "gptscale.common.engines.zero.optimizer",
                *model,
            ),
            "colossalai": ("gptscale.common.engines.colossal.library",),
            "transformers": ("transformers.models.gpt2.modeling_gpt2",),
            # It imports DeepSpeed too, where that is installed.
            "accelerate": ("accelerate", *(("deepspeed",) if find_spec("deepspeed") else ()), *model),
        }
        return engines.get(self.engine, (self.engine.replace("-", "_"), *model))

    def load(self) -> ModuleType:
        """Import the module, which imports no engine, once the engine is known to be installed."""
        self.check_installed()
        return import_module(self.module)

    def check_installed(self) -> None:
        """Raise ConfigError, with the pip line, unless the engine is installed in a version that is known to work."""
        where = "in this environment"
        if self.environment:
            environments.require(self.engine, self.environment)
            return
        if not environments.is_among(torch := str(installed("torch")), self.torch):
            what = f"{self.module.rpartition('.')[2]} needs torch{self.torch}, not {torch}"
            raise ConfigError(what, where, f"pip install 'torch{self.torch}'")
        if (version := installed(self.engine)) is None:
            raise ConfigError(f"{self.engine} is not installed", where, f"pip install 'gptscale[{self.engine}]'")
        # Above the range nobody has tried it, which `gptscale doctor` says. An exact release has no such range.
        if not environments.is_among(version, tried := environments.tried(self.engine), or_newer=True):
            what = f"{self.engine} {version} is installed, this recipe is known to work with {tried}"
            raise ConfigError(what, where, f"pip install '{self.engine}{tried}'")

    def check_imports(self) -> None:
        """Import the engine, or raise ConfigError if that fails.

        An engine in another environment is left to the workers there.
        """
        if self.environment:
            return
        try:
            import_module(self.engine.replace("-", "_"))
        except Exception as error:
            # A broken installation raises whatever it likes when it is imported.
            what = f"{self.engine} is installed but does not import ({type(error).__name__}: {error})"
            fix = f"pip install --force-reinstall 'gptscale[{self.engine}]'"
            raise ConfigError(what, "in this environment", fix) from error


def _row(module: str, config: str, what: str, memory: str, **facts: Any) -> Recipe:
    return Recipe(f"gptscale.recipes.{module}", config, what, memory, **facts)


def _zero(what: str, process_gib: float = 0.0, **preset: object) -> Recipe:
    facts = {"preset": preset, "casts_weights": True, "process_gib": process_gib}
    return _row("zero", "ZeroConfig", what, "flat", engine="deepspeed", **facts)


def _colossal(module: str, config: str, what: str, axes: tuple[str, ...], needs_cuda: bool = False) -> Recipe:
    facts = {"engine": "colossalai", "environment": "colossalai", "casts_weights": True, "needs_cuda": needs_cuda}
    # The order of its ranks is that of booster/plugin/hybrid_parallel_plugin.py, dp_outside.
    mesh = ("dp", "pp", "tp")
    return _row(module, config, what, "chunks" if needs_cuda else "plugin", axes=axes, mesh=mesh, **facts)


RECIPES: dict[str, Recipe] = {
    "single": _row("single", "SingleConfig", "one device, the reference for all others", "replicas",
        axes=(), fp8=True, cuda_graphs=True, process_gib=0.63),
    "ddp": _row("ddp", "DDPConfig", "replicas; gradients all-reduced in buckets", "replicas", fp8=True, cuda_graphs=True),
    "fsdp": _row("fsdp", "FSDPConfig", "weights, gradients, optimizer sharded (fully_shard); HSDP", "rows",
        casts_weights=True, fp8=True, torch=">=2.7"),
    "fsdp_offload": _row("fsdp", "FSDPConfig", "fsdp with shards and optimizer kept in host memory", "rows",
        preset={"cpu_offload": True}, casts_weights=True, fp8=True, process_gib=0.64, torch=">=2.7"),
    "zero1": _zero("DeepSpeed ZeRO 1: fp32 weights and optimizer state sharded", stage=1),
    "zero2": _zero("DeepSpeed ZeRO 2: and gradients", stage=2),
    "zero3": _zero("DeepSpeed ZeRO 3: and the weights computed with", stage=3),
    "zero_offload": _zero("ZeRO (--stage) with the optimizer on the host, at stage 3 weights too", 0.71, offload="cpu"),
    "zero_infinity": _zero("ZeRO 3 with optimizer and weights on NVMe (--nvme-path)", 0.74, stage=3, offload="nvme"),
    "fairscale_sdp": _row("fairscale_sdp", "FairscaleSDPConfig", "OSS + ShardedDataParallel: ZeRO 2 by whole parameters",
        "owners", engine="fairscale"),
    "fairscale_fsdp": _row("fairscale_fsdp", "FairscaleFSDPConfig", "FullyShardedDataParallel, the ancestor of torch's",
        "rows", engine="fairscale", needs_cuda=True, casts_weights=True),
    "tensor_parallel": _row("tensor_parallel", "TensorParallelConfig",
        "matrices and vocabulary cut, sequence between layers (DTensor)", "matrices", axes=("tp",), torch=">=2.7"),
    "context_parallel": _row("context_parallel", "ContextParallelConfig",
        "each sequence cut (--cp-size), attention by ring or Ulysses (--cp-style); weights as fsdp", "rows", axes=("cp", "dp"),
        casts_weights=True, torch=">=2.7"),
    "pipeline": _row("pipeline", "PipelineConfig",
        "layers cut into stages; GPipe, 1F1B, interleaved, zero-bubble (--schedule)", "stages", axes=("pp",), torch=">=2.7"),
    "hybrid_3d": _row("hybrid_3d", "HybridConfig", "data x tensor x pipeline on one mesh, and --cp-size", "mesh",
        axes=("dp", "cp", "tp", "pp"), casts_weights=True, torch=">=2.7"),
    "accelerate_fsdp": _row("accelerate_fsdp", "AccelerateFSDPConfig", "fully_shard through Hugging Face Accelerate", "rows",
        engine="accelerate", casts_weights=True),
    "lightning_fabric": _row("fabric", "LightningFabricConfig", "a strategy by name through Lightning Fabric", "strategy",
        engine="lightning-fabric"),
    "handout": _row("handout", "HandoutConfig", "the exercise's baseline: transformers' model, its data loader and loss",
        "replicas", engine="transformers", own_work="its ids, its dropout of 0.1 and its loss are the exercise's"),
    "colossal_tensor": _colossal("colossal_hybrid", "ColossalTensorConfig", "Colossal-AI: matrices cut over tensor ranks",
        ("tp", "dp")),
    "colossal_pipeline": _colossal("colossal_hybrid", "ColossalPipelineConfig",
        "Colossal-AI: blocks over stages, 1F1B or interleaved, and tensor ranks", ("pp", "tp", "dp")),
    "colossal_gemini": _colossal("colossal_data", "ColossalGeminiConfig",
        "Colossal-AI's Gemini: weights and state in chunks, on the device or the host", ("dp",), needs_cuda=True),
    "colossal_zero": _colossal("colossal_data", "ColossalZeroConfig", "Colossal-AI's LowLevelZero: ZeRO 1 or 2 (--stage)",
        ("dp",), needs_cuda=True),
}  # fmt: skip


def names_with(fact: Callable[[Recipe], bool]) -> str:
    """Return the names of the recipes that have a fact, as an error says them: `single, ddp or fsdp`."""
    *others, last = (name for name, row in RECIPES.items() if fact(row))
    return f"{', '.join(others)} or {last}" if others else last


def get(name: str) -> Recipe:
    """Return the row of `name`, or raise ConfigError with the nearest name if there is none."""
    check_name(name, RECIPES, "recipe", "on the command line")
    return RECIPES[name]
