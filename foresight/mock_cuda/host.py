"""Leave out what the host of a simulated rank would do with weights: to compute on them, or to keep them in files.

A model whose optimizer state lives on the host would otherwise need that host. The engines' own code runs, and calls these
stand-ins instead of its library's operators, which need not be compiled. The memory that they would use is counted, see
csrc/host.c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gptscale.common.engines.colossal import start as colossal_start
from gptscale.common.engines.zero import operators, swap_folder
from gptscale.common.model import initial_weights
from gptscale.common.model.precision import DTYPES
from gptscale.common.optim.stepper import Stepper
from gptscale.common.process.world import World
from gptscale.common.settings.run import Run
from gptscale.foresight.mock_cuda.boot import mark
from gptscale.foresight.mock_cuda.stand_ins import compile_nothing, pass_over, wrap


def leave_out() -> None:
    """Let this process leave out what no simulation reads. Call it before a recipe is imported."""
    # Nobody reads the weights, so their memory keeps what it has.
    _replace(initial_weights, "init_rows", lambda *name_shape_and_rows: iter(()))
    _replace(initial_weights, "init_tensor", lambda name, shape, gpt, seed: torch.empty(shape))
    # Losses and norms are leftovers of the device's memory. A run ends at a NaN, a simulation does not.
    wrap(Stepper, "is_finite", lambda is_finite, *arguments: is_finite(*arguments) or True)
    leave_out_steps()
    _replace(operators, "lack", lambda ops: None)
    _replace(operators, "load", _load_for_deepspeed)
    _replace(swap_folder, "check_space", lambda *folders_and_bytes: None)

    def start_without_kernels(start: Callable[..., None], *arguments: Any) -> None:
        start(*arguments)
        _stand_in_for_colossals_kernels()

    wrap(colossal_start, "start", start_without_kernels)


def leave_out_steps() -> None:
    """Let this process leave out the host's AdamW, and tell the mock how many bytes it would pass over."""
    wrap(torch, "_fused_adamw_", _fused_adamw)


def _replace(owner: Any, name: str, stand_in: Any) -> None:
    setattr(owner, name, stand_in)


def _fused_adamw(update: Callable[..., None], parameters: list[torch.Tensor], *state: Any, **options: Any) -> None:
    if parameters[0].is_cuda:
        update(parameters, *state, **options)
    else:
        for each in parameters:
            pass_over(each.to_local() if isinstance(each, DTensor) else each)


class NoFiles:
    """A handle of DeepSpeed's async_io whose files hold nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.pending = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("async_"):
            return partial(self._begin, name)
        # The others, as sync_pread or free_cpu_locked_tensor, end at once and successfully.
        return partial(self._do, name)

    def _begin(self, name: str, tensor: torch.Tensor, *path: Any) -> int:
        self.pending += 1
        mark(f"disk {'read' if name.endswith('read') else 'write'} {tensor.nbytes}")
        return 0

    def _do(self, name: str, *arguments: Any) -> int:
        if name.startswith("sync_"):
            self._begin(name, *arguments)
            self.wait()
        return 1

    def wait(self) -> int:
        """Return how many requests have ended since the last wait, which is all."""
        mark("disk wait 0")
        ended, self.pending = self.pending, 0
        return ended

    def new_cpu_locked_tensor(self, numel: int, example: torch.Tensor) -> torch.Tensor:
        return torch.empty(numel, dtype=example.dtype, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()


def _load_for_deepspeed(ops: Sequence[str]) -> None:
    from deepspeed.ops.op_builder import builder
    from deepspeed.runtime.zero import utils

    # Stage 3 asks whether rank 0 takes its parameters in the same order. Rank 0 is not there, and would.
    _replace(utils, "assert_lst_len_same_as_other_ranks", lambda numbers: None)
    _replace(utils, "get_lst_from_rank0", lambda numbers: numbers)
    compile_nothing(builder)
    builder.OpBuilder._loaded_ops["async_io"] = SimpleNamespace(aio_handle=NoFiles)


def _stand_in_for_colossals_kernels() -> None:
    """Give Gemini's HybridAdam operators that do nothing. Upstream compiles them by nvcc at first use."""
    from colossalai.kernel import kernel_loader
    from colossalai.shardformer.layer.utils import Randomizer

    # It compares what its peers have gathered on the device, which compares nothing.
    Randomizer.is_randomizer_index_synchronized = staticmethod(lambda process_group=None: True)

    on_host = SimpleNamespace(step=pass_over)
    for name in ("CPUAdamLoader", "FusedOptimizerLoader"):
        getattr(kernel_loader, name).load = lambda self, name=None: SimpleNamespace(
            CPUAdamOptimizer=lambda *options: on_host, multi_tensor_adam=lambda *arguments: None
        )


def begin_lone_group(world: World) -> None:
    """Begin a default process group of `world.world_size` ranks, of which only `world.rank` is there.

    There is no peer to say goodbye to. The end of the process frees everything.
    """
    torch.cuda.set_device(world.device)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=world.rank, world_size=world.world_size)


def know_what_peers_send(run: Run, engine: Any) -> None:
    """Tell a pipeline of Colossal-AI what its neighbours send. By itself it learns that from their first message."""
    from colossalai.pipeline.p2p import create_send_metadata

    shape = (run.batch.micro_batch_size, run.seq_len, run.gpt.n_embd)
    example = {"hidden_states": torch.empty(shape, dtype=DTYPES[run.config.precision], device="meta")}
    schedule = engine.plugin.scheduler
    schedule.grad_metadata_recv = create_send_metadata(example)
    example["hidden_states"].requires_grad_()
    schedule.tensor_metadata_recv = create_send_metadata(example)
