"""What a simulated program does not write or wait for, and what it need not have: weights, and batches after the first.

The program reads a copy of this file (on_path.py) in an environment without gptscale. So it imports torch alone.
"""

from __future__ import annotations

import copy
import ctypes
import json
import operator
import os
import shutil
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# AdamW reads and writes its parameter, gradient and two moments in fp32, and writes a weight in 16 bits.
STEP_BYTES = 30
# Tensors that torch.save would have written. They are not moved either.
_unwritten = set[str]()


def _asked(name: str) -> bool:
    return bool(json.loads(os.environ["GPTSCALE_SIMULATED_PROGRAM"])[name])


class NoWeights(dict[Any, Any]):
    """A checkpoint that is not there. Whatever is looked up in it is not there either."""

    def __missing__(self, key: Any) -> NoWeights:
        return self


class NothingRejected(TorchFunctionMode):
    """While a truncated distribution is drawn, no sample lies outside: torch 2.15 draws until it sees none.

    Neither the device nor large memory of the host, whose pages are shared, holds what was drawn.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return False if function is torch.Tensor.any else result


def wrap(owner: Any, name: str, around: Any) -> None:
    """Let `around` be called instead of a function, with that function as its first argument."""
    run = getattr(owner, name)
    setattr(owner, name, wraps(run)(lambda *args, **options: around(run, *args, **options)))


def begin(torch_module: Any) -> None:
    """Leave out what torch.save would write, and stand in for weights and batches as the task asks."""
    wrap(torch.nn.init, "_no_grad_trunc_normal_", _draw_once)
    wrap(torch, "save", _save_no_files)
    for owner, names in ((os, "rename replace link"), (shutil, "copy copy2 copyfile")):
        for name in names.split():
            wrap(owner, name, _move_if_written)
    # It would check values, which are zeros here.
    torch.distributions.Distribution.set_default_validate_args(False)
    # The mock has none of cuDNN's recurrent layers. Torch's own, step by step, take their place.
    torch.nn.RNNBase.flatten_parameters = lambda self: None  # type: ignore[method-assign]
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        wrap(torch._VF, name, _without_cudnn)
    wrap(torch, "ctc_loss", _ctc_loss)
    if _asked("no_weights"):
        wrap(torch, "load", _load_if_there)
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            wrap(kind, "load_state_dict", _load_unless_empty)
    if _asked("fake_batches"):
        wrap(torch.utils.data.DataLoader, "__iter__", _first_again)


def _draw_once(draw: Any, *args: Any, **options: Any) -> Any:
    with NothingRejected():
        return draw(*args, **options)


def _save_no_files(save: Any, value: Any, file: Any, *args: Any, **options: Any) -> None:
    if hasattr(file, "write"):
        save(value, file, *args, **options)
    else:
        _unwritten.add(os.path.abspath(file))


def _move_if_written(move: Any, source: Any, target: Any, *args: Any, **options: Any) -> Any:
    if os.path.abspath(source) not in _unwritten:
        return move(source, target, *args, **options)
    _unwritten.add(os.path.abspath(target))


def _without_cudnn(run: Any, *args: Any) -> Any:
    with torch.backends.cudnn.flags(enabled=False):
        return run(*args)


def _ctc_loss(run: Any, *args: Any) -> Any:
    """While operations are recorded, torch passes lengths on the host to a kernel that refuses them."""
    there = (each.to(args[0].device) if isinstance(each, torch.Tensor) else each for each in args)
    return _without_cudnn(run, *there)


def _load_if_there(load: Any, file: Any, *args: Any, **options: Any) -> Any:
    if isinstance(file, (str, os.PathLike)) and not Path(file).exists():
        return NoWeights()
    return load(file, *args, **options)


def _load_unless_empty(load: Any, owner: Any, state_dict: Any, *args: Any, **options: Any) -> Any:
    if state_dict:
        return load(owner, state_dict, *args, **options)
    return torch.nn.modules.module._IncompatibleKeys([], [])


def _first_again(iterate: Any, loader: Any) -> Iterator[Any]:
    """Yield a loader's first batch as often as the loader has batches, or without end if it cannot say."""
    for first in iterate(loader):
        for _ in range(operator.length_hint(loader, 2**62)):
            yield copy.copy(first)
        return


def load_nothing(module: Any) -> None:
    """Let safetensors load what is there."""
    if _asked("no_weights"):
        wrap(module, "load_file", _load_if_there)


def build_from_config(module: Any) -> None:
    """Let `from_pretrained` of transformers build the model that a configuration describes, with weights of any value."""

    def from_pretrained(cls: Any, name: Any, /, *args: Any, config: Any = None, **options: Any) -> Any:
        if options.get("quantization_config") or options.get("load_in_8bit") or options.get("load_in_4bit"):
            raise NotImplementedError("quantized weights cannot be left out by --no-weights")
        if not hasattr(config, "to_dict"):
            config = cls.config_class.from_pretrained(config or name)
        dtype = options.get("dtype", options.get("torch_dtype"))
        dtype = getattr(config, "torch_dtype", None) if dtype == "auto" else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        with torch.device("meta"):
            model = cls._from_config(config, attn_implementation=options.get("attn_implementation"))
        model = model.to(dtype or torch.float32).to_empty(device="cuda" if options.get("device_map") else "cpu")
        model.tie_weights()
        return model.eval()

    if _asked("no_weights"):
        module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def pack_nothing(module: Any) -> None:
    """Take each row for one sequence. Transformers reads positions on the device, which are zeros here, and would make a mask."""
    module.find_packed_sequence_indices = lambda position_ids: None


def pass_over(*arguments: Any) -> None:
    """Leave out the host's AdamW, and tell the mock, if it is there, the bytes that it would read and write."""
    parameter = next(each for each in arguments if isinstance(each, torch.Tensor))
    if hasattr(mock := ctypes.CDLL(None), "mock_mark"):
        mock.mock_mark(f"host step {STEP_BYTES * parameter.numel()}".encode())


def compile_nothing(module: Any) -> None:
    """Give DeepSpeed its Adam without a compiler: torch's on the device, which moves as many bytes, and none on the host."""

    def fused(chunk: int, flag: Any, tensors: Any, lr: float, beta1: float, beta2: float, *rest: Any) -> None:
        gradients, parameters, *moments = tensors
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": 0.0, "eps": 0.0}
        steps = [flag.float()] * len(parameters)
        adamw: Any = torch._fused_adamw_
        adamw(parameters, gradients, *moments, [], steps, amsgrad=False, maximize=False, **options)

    nothing = dict.fromkeys(("create_adam", "destroy_adam"), lambda *arguments: None)
    on_device, on_host = SimpleNamespace(multi_tensor_adam=fused), SimpleNamespace(adam_update=pass_over, **nothing)
    module.OpBuilder._loaded_ops.update(fused_adam=on_device, cpu_adam=on_host)


def write_nothing(module: Any) -> None:
    """Leave out what a module or its Trainer would save."""
    # torch.compile prints every tensor of its graph for save_graph_repro, which takes minutes.
    owners = dict.fromkeys(("save", "save_file", "save_graph_repro"), module)
    owners["_save_checkpoint"] = getattr(module, "Trainer", None)
    for name, owner in owners.items():
        if hasattr(owner, name):
            setattr(owner, name, lambda *args, **options: None)
