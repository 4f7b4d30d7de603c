"""The operations of a program's last step: what each computes, the bytes that it touches, and the ranks that it talks to.

They join the list of the mock (csrc/state.c), around the kernels, products and collectives that they start: foresight/price reads
both. The program reads a copy of this file (on_path.py) in an environment without gptscale. So it imports torch alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch

# These read only the rows that they give back.
LOOK_UPS = ("embedding", "index_select", "index", "gather")
# These write what they do not read.
FILLS = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "_foreach_zero_", "_foreach_copy_")
# The backward of attention multiplies five times where the forward does twice: it computes the scores again.
BACKWARD_PRODUCTS = 2.5
# Bytes of an operation that cannot be told.
UNKNOWN = 2**63

PLAIN = Tensor.__torch_dispatch__

_recorder: OperationRecorder | None = None
# The modes of this program that are not its own, the lowest first.
modes: list[_python_dispatch.TorchDispatchMode] = []
_paused = threading.local()


class OperationRecorder(_python_dispatch.TorchDispatchMode):
    """It tells the mock of each operation of torch that runs within it. part: the number of the part of the step."""

    supports_higher_order_operators = True
    # Else torch compiles nothing in the recorded step, or not in its backward what it has compiled in its forward.
    ignore_compile_internals = classmethod(lambda cls: True)

    def __init__(self, mock: ctypes.CDLL, part: Callable[[], int]) -> None:
        super().__init__()
        mock.mock_operation.argtypes = [ctypes.c_char_p, *4 * [ctypes.c_uint64]]
        self.tell, self._part = mock.mock_operation, part

    def begin(self) -> bool:
        """Record from now on, unless the program has a mode of its own, which would not find itself on top when it ends."""
        global _recorder
        if vars(torch._C)["_len_torch_dispatch_stack"]() > len(modes):
            return False
        _recorder = self
        push(self)
        return True

    def end(self) -> None:
        global _recorder
        _recorder = None
        modes.remove(self)
        vars(_python_dispatch)["_pop_mode"]()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor | FunctionalTensor) for kind in types):
            # torch.compile only asks for shapes: a mode below answers.
            return func(*args, **(kwargs or {}))
        # A DTensor and its like ask for operations on their shards, which come here in turn.
        if any(getattr(kind, "__torch_dispatch__", PLAIN) is not PLAIN for kind in types):
            return NotImplemented
        if not isinstance(func, torch._ops.OpOverload):
            # The operations of a higher-order one, such as FlexAttention, come here in turn.
            return func(*args, **(kwargs or {}))
        self.tell(b"", 0, 0, 0, 0)
        # Below this point torch asks no tensor of a library for a function of its own.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **(kwargs or {}))
            except BaseException:
                self.tell(b"failed ", 0, 0, 0, 0)
                raise
            name, flops, nbytes, ranks = _facts(func, args, kwargs or {}, result)
        self.tell(name.encode(), flops, nbytes, ranks, self._part())
        return result


def push(mode: Any) -> Any:
    """Let a mode see all operations from now on, and return it."""
    modes.append(mode)
    vars(_python_dispatch)["_push_mode"](mode)
    return mode


def _facts(func: Any, args: Any, options: Mapping[str, Any], result: Any) -> tuple[str, int, int, int]:
    """Return an operation's name and precision, what it computes, its bytes, and the ranks of its group on this machine."""
    name = func._schema.name.partition("::")[2]
    arguments = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **options}
    try:
        tensors = [*_on_device(arguments.values())]
        told = f"{name} {_precision(tensors)}"
        ranks = _ranks_on_node(arguments.values()) if "c10d" in func.namespace else 0
        if not tensors:
            return told, 0, 0, ranks
        return told, _flops(name, arguments, result), _bytes(func, name, arguments, result), ranks
    except (RuntimeError, TypeError, AttributeError):
        # It is a stand-in for a tensor, without a storage. The program goes on, and its kernels are guessed.
        return f"{name} ", 0, UNKNOWN, 0


def _on_device(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            yield value
        elif isinstance(value, list | tuple):
            yield from _on_device(value)


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor, an expanded one's without its copies."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _bytes(func: Any, name: str, arguments: Mapping[str, Any], result: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    results = [*_on_device([result])]
    made, total, places = sum(map(_size, results)), 0, set()
    for argument in func._schema.arguments:
        tensors = [*_on_device([arguments.get(argument.name)])]
        places |= {tensor.data_ptr() for tensor in tensors}
        once = argument.kwarg_only or name in FILLS
        writes = argument.alias_info is not None and argument.alias_info.is_write
        size = sum(map(_size, tensors)) * (2 if writes and not once else 1)
        total += min(size, made) if name in LOOK_UPS and not writes else size
    return total + sum(_size(tensor) for tensor in results if tensor.data_ptr() not in places)


def _flops(name: str, arguments: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of an attention, a convolution or a grouped product, and 0 for others.

    The mock sees the shapes of all other products.
    """

    def tensor(*names: str) -> Tensor | None:
        return next((arguments[each] for each in names if isinstance(arguments.get(each), Tensor)), None)

    query, key, weight = tensor("query", "q"), tensor("key", "k"), tensor("weight")
    if query is not None and key is not None and query.dim() > 2:
        return _attention_flops(name, query, key, arguments)
    if "convolution" in name and weight is not None:
        out = arguments["input"] if arguments.get("transposed") else tensor("grad_output")
        out = next(_on_device([result])) if out is None else out
        return int(2 * out.numel() * weight[0].numel() * (2 if "backward" in name else 1))
    if "grouped_mm" in name:
        return int(2 * arguments["self"].numel() * arguments["mat2"].shape[-1])
    return 0


def _attention_flops(name: str, query: Tensor, key: Tensor, arguments: Mapping[str, Any]) -> int:
    """Return the operations of attention of (batch, heads, tokens, width), or (tokens, heads, width) of sequences in one."""
    if query.dim() == 4:
        # flash-attention's own package, and torch's call of it, have the tokens before the heads.
        keys = key.shape[-3 if "q" in arguments or name.startswith("_flash_attention") else -2]
    else:
        keys = int(arguments.get("max_k") or arguments.get("max_seqlen_k") or key.shape[0])
    products = 2 * math.prod(query.shape) * keys * 2
    causal = arguments.get("is_causal") or arguments.get("causal")
    return int(products * (BACKWARD_PRODUCTS if "backward" in name else 1) / (2 if causal else 1))


def _precision(tensors: Sequence[Tensor]) -> str:
    """Return the precision in which a device multiplies these tensors: the lowest of them, whatever it sums in."""
    dtypes = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    dtype = min(dtypes, key=lambda kind: kind.itemsize, default=None)
    if dtype == torch.float32:
        products = torch.backends.cuda.matmul
        # Where a program has set the newer name, torch refuses to tell the older one.
        newer = getattr(products, "fp32_precision", None)
        return "tf32" if (newer == "tf32" if newer else products.allow_tf32) else "fp32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", None: ""}.get(dtype, "fp8")


def _ranks_on_node(values: Any) -> int:
    """Return how many ranks of a collective's group are on this rank's machine, 0 if that is not known."""
    for value in values:
        try:
            group = (
                vars(distributed_c10d)["_resolve_process_group"](value)
                if isinstance(value, str)
                else dist.ProcessGroup.unbox(value)  # type: ignore[attr-defined]
                if isinstance(value, torch.ScriptObject)
                else None
            )
            if group is not None:
                local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                return sum(rank // local == dist.get_rank() // local for rank in dist.get_process_group_ranks(group))
        except (AttributeError, KeyError, RuntimeError, ValueError):
            continue
    return 0


def _around(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the launch of compiled kernels, so that it tells the bytes of its tensors, each read or written once.

    Where torch.compile updates a tensor in place, it calls the argument so, and the kernel does both.
    """

    def run_and_tell(self: Any, *args: Any, **options: Any) -> Any:
        if _recorder is None:
            return run(self, *args, **options)
        tell = _recorder.tell
        tell(b"", 0, 0, 0, 0)
        try:
            return run(self, *args, **options)
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                named = zip(getattr(self.fn, "arg_names", ()), args, strict=False)
                both = [arg for name, arg in named if name.startswith("in_out_ptr")]
                tensors = [*_on_device([args, *options.values(), both])]
                name = getattr(self.fn, "__name__", "triton")
                tell(f"{name} {_precision(tensors)}".encode(), 0, sum(map(_size, tensors)), 0, 0)

    return run_and_tell


def pause_for_guards(module: Any) -> None:
    """Leave our modes while torch.compile looks up its compiled code, which was made without them and would not match."""
    depth, at = (vars(torch._C)[f"_{name}"] for name in ("len_torch_dispatch_stack", "get_dispatch_stack_at"))
    enter, leave = (vars(_python_dispatch)[f"_{name}_mode"] for name in ("push", "pop"))

    def following(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_eval_frame(callback: Any) -> Any:
            # It calls no function of Python while torch.compile looks on: that would be compiled.
            paused = _paused.__dict__.setdefault("modes", [])
            # Modes that are back return anew: torch 2.13 has restored its thread's state since, in which it sees no mode.
            while depth() and at(depth() - 1) in modes:
                paused.append(leave())
            prior = original(callback)
            while paused and not callback:
                enter(paused.pop())
            return prior

        module.skip_code(set_eval_frame.__code__)
        return set_eval_frame

    for name in filter(vars(module).__contains__, ("set_eval_frame", "_maybe_set_eval_frame")):
        setattr(module, name, following(getattr(module, name)))


def watch_inductor(module: Any) -> None:
    """Tell of the kernels that torch.compile has made, each in the first of its forms: all of them take as long here."""
    kind = module.CachingAutotuner
    kind.run = _around(kind.run)
    begin = kind.__init__

    def begin_with_one(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.configs = self.configs[:1]

    kind.__init__ = begin_with_one


def choose_first(module: Any) -> None:
    """Let torch.compile take the first of several kernels, without compiling all of them for a race."""
    kind = module.AlgorithmSelectorCache
    choose = kind.__call__
    kind.__call__ = lambda self, name, choices, *args, **options: choose(self, name, choices[:1], *args, **options)


def watch_triton(module: Any) -> None:
    """Tell of the kernels that a program has written in Triton's language."""
    kind = module.JITFunction
    kind.run = _around(kind.run)
