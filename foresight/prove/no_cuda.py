"""The CPU in the place of CUDA, for a program that names it: tensors, models and process groups come to the CPU and gloo.

A program of somebody else reads a copy of this file (foresight/mock_cuda/on_path.py) in an environment without gptscale. So it
imports torch alone.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NOTHING = (
    "set_device set_device_index set_stream synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all "
    "is_current_stream_capturing set_rng_state"
).split()
ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved current_device current_device_index"


def on_cpu(value: Any) -> Any:
    """Return the CPU for a device of CUDA, and any other value as it is."""
    return "cpu" if isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda" else value


class CpuForCuda(TorchFunctionMode):
    """It turns each device of CUDA that a function of torch gets into the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory") and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "record_stream":
            return None
        # A bare number is a device of CUDA in `tensor.to(rank)` and `torch.device(rank)`.
        bare = name == "to" or (name == "device" and len(args) == 1)
        args = ["cpu" if bare and type(value) is int else on_cpu(value) for value in args]
        kwargs = {k: "cpu" if k == "device" and type(v) is int else on_cpu(v) for k, v in (kwargs or {}).items()}
        return function(*args, **kwargs)


@dataclass(init=False, unsafe_hash=True)
class NoStream(nullcontext[None]):
    """A stream, an event or a current device of CUDA, which is always through, and like any other."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def is_capturing(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: True


def begin(torch_module: Any) -> None:
    """Put the CPU in the place of CUDA in this program, which has just imported torch."""
    # Dynamo does not trace through what stands in for CUDA.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    device = torch.device("cuda")
    CpuForCuda().__enter__()
    cuda: Any = torch.cuda
    # A torch before 2.6 has none. Since 2.15 optimizers ask it for the stream.
    accelerator: Any = getattr(torch, "accelerator", cuda)
    accelerator.current_accelerator = lambda *args, **options: device
    cuda.is_available = accelerator.is_available = cuda.is_bf16_supported = lambda *args, **options: True
    # FSDP 1 asks the CPU how many ranks a node has, to shard within nodes.
    cuda.device_count = torch.cpu.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    accelerator.device_count = cuda.device_count
    for owner, name in product((cuda, accelerator), (*NOTHING, *ZERO.split())):
        setattr(owner, name, lambda *args, none=None if name in NOTHING else 0, **options: none)
    cuda.Stream = cuda.Event = cuda.stream = cuda.current_stream = cuda.default_stream = NoStream
    cuda.device = accelerator.device_index = accelerator.current_stream = NoStream
    # A loader pins in a thread of its own, where CpuForCuda is not.
    wrap(import_module("torch.utils.data._utils.pin_memory"), "pin_memory", lambda run, data, *args: data)
    # Those of an A100: on newer GPUs programs ask for kernels that a CPU does not have.
    known = SimpleNamespace(name="CPU", major=8, minor=0, total_memory=2**40, multi_processor_count=1)
    cuda.get_device_properties, cuda.get_device_capability = lambda *args: known, lambda *args: (8, 0)
    cuda.mem_get_info, cuda.memory_stats = lambda *args: (known.total_memory, known.total_memory), lambda *args: {}
    cuda.get_device_name = cuda.memory_summary = lambda *args, **options: "CPU"
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    module, ddp = torch.nn.Module, torch.nn.parallel.DistributedDataParallel
    # Dynamo traces nothing here, and torch.compile(fullgraph=True) is refused then.
    wrap(torch, "compile", lambda run, own=None, **options: (lambda made: made) if own is None else own)
    wrap(module, "compile", lambda *args, **options: None)
    wrap(module, "cuda", lambda run, own, *args, **options: own)
    wrap(module, "to", lambda run, own, *args, **options: run(own, *map(_device, args), **_named(options)))
    devices = ("device_ids", "output_device")
    wrap(ddp, "__init__", lambda run, own, model, *args, **options: run(own, model, **_without(options, *devices)))
    wrap(torch.autocast, "__init__", lambda run, own, *args, **options: run(own, *map(on_cpu, args), **_named(options)))
    # Gloo wants the input flat.
    flat = lambda run, output, own, *args, **options: run(output, own.reshape(-1), *args, **options)  # noqa: E731
    wrap(torch.distributed, "_reduce_scatter_base", flat)
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
        wrap(torch.distributed, name, _at_once)
    wrap(torch.nn.functional, "scaled_dot_product_attention", _attention_of_a_rank)
    meshes = import_module("torch.distributed.device_mesh")
    wrap(torch.distributed, "init_process_group", _with_gloo)
    # A mesh begins the communication that no one has begun.
    wrap(meshes, "init_process_group", _with_gloo)
    wrap(meshes, "init_device_mesh", lambda run, *args, **options: run(*map(on_cpu, args), **_named(options)))


def _at_once(run: Any, output: Any, *args: Any, async_op: bool = False, **options: Any) -> Any:
    """Exchange, and only then go on: gloo has no future. Before torch 2.15 it has no mean either: it is a sum, divided."""
    is_mean = options.get("op") == torch.distributed.ReduceOp.AVG
    work = run(output, *args, **options | ({"op": torch.distributed.ReduceOp.SUM} if is_mean else {}))
    if is_mean:
        output.div_(torch.distributed.get_world_size(options.get("group")))
    future = torch.futures.Future[None]()
    future.set_result(None)
    done = SimpleNamespace(wait=lambda *args: True, is_completed=future.done, get_future=lambda: future)
    return done if async_op else work


def sums_of_fsdp(module: Any) -> None:
    """Let FSDP 2 sum and then divide: gloo has no reduction that multiplies before it sums."""
    wrap(module, "_get_gradient_divide_factors", lambda run, *args, **o: run(*args[:5], *(True for _ in args[5:]), **o))


def _attention_of_a_rank(run: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Attend with the samples and heads that a rank has: DTensor knows the kernels of CUDA, and not that of the CPU."""
    placements = getattr(query, "placements", ())
    if not placements or not all(p.is_replicate() or p.is_shard(0) or p.is_shard(1) for p in placements):
        return run(query, key, value, *args, **options)
    output = run(*(each.to_local() for each in (query, key, value)), *args, **options)
    return type(query).from_local(output, query.device_mesh, placements, run_check=False)


def plain_flex_attention(module: Any) -> None:
    """Give flex attention a form that has gradients on a CPU: torch's own has none there."""
    module.flex_attention = partial(flex_attention, module)


def flex_attention(
    module: Any, query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, **options: Any
) -> Any:
    """Return softmax(score_mod(q k^T * scale)) v of all heads, as torch defines it."""
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (options.get("scale") or query.size(-1) ** -0.5)
    # Both functions are of one score, and broadcast.
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = score_mod(scores, *at) if score_mod else scores
    keep = block_mask.mask_mod(*at) if block_mask is not None else torch.ones_like(scores, dtype=torch.bool)
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    # A query that sees nothing has zeros.
    output = (scores.softmax(-1) * keep).to(value.dtype) @ value
    if options.get("return_aux") is not None:
        return output, module.AuxOutput(scores.logsumexp(-1), scores.amax(-1))
    return (output, scores.logsumexp(-1)) if options.get("return_lse") else output


def _with_gloo(run: Any, *args: Any, **options: Any) -> Any:
    """Begin communication, whatever backend was named first."""
    return run("gloo", *args[1:], **_without(options, "device_id", "backend"))


def _device(value: Any) -> Any:
    return "cpu" if type(value) is int else on_cpu(value)


def _named(options: dict[str, Any]) -> dict[str, Any]:
    return {key: on_cpu(value) for key, value in options.items()}


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in names}


def wrap(owner: Any, name: str, around: Any) -> None:
    """Let `around` be called instead of a function, with that function as its first argument."""
    run = getattr(owner, name)
    setattr(owner, name, wraps(run)(lambda *args, **options: around(run, *args, **options)))
