"""A program of one file that trains a user's model with a split, as `gptscale fit` writes it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import threading
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gptscale.common.model.tensor_plan import STYLES
from gptscale.foresight.fit.python_text import Words, as_python
from gptscale.foresight.fit.splits import BLOCK_CLASS, BLOCK_CLASSES, DTYPE, ENDS, OF_ENDS, SHARED, TWIN, Split
from gptscale.foresight.fit.subject import Subject
from gptscale.foresight.fit.template import CHECK, PROGRAM, START
from gptscale.foresight.fit.twin import moved, touch, widen

# Imports of a program, if it uses the name.
IMPORTS = """\
import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, \
parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
"""


@dataclass(frozen=True)
class Choice:
    """How a program is started: the numbers that its options have as defaults."""

    gpus: int
    nodes: int
    global_batch_size: int
    micro_batch_size: int
    precision: str
    recompute: bool


# Python 3.11 ends in a SystemError where two threads parse at once.
parsing = threading.Lock()
INPUTS = {
    "tensor": "{batch}.to(DEVICE)",
    "list": "[each.to(DEVICE) for each in {batch}]",
    "dict": "{{name: value.to(DEVICE) for name, value in {batch}.items()}}",
    "nested": "moved({batch})",
}
SHALLOW = """\
for module in model.modules() if o.check else []:
    if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in BLOCK:
        del module[2:]"""
EACH_BLOCK = "for block in [m for m in model.modules() if type(m).__name__ in BLOCK]:\n"
TOUCH = f"{EACH_BLOCK}    block.register_forward_hook(touch)"
AGAIN = f"""\
{EACH_BLOCK}    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"""


def program(subject: Subject, split: Split, choice: Choice, file: str) -> str:
    """Return the text of a program."""
    own = {**SHARED, **split.own}
    if split.zero:
        own["before"] = _zero(subject, split, choice.gpus)
        if split.zero[0] == 3:
            # A weight that is cut has lost its shape.
            own["groups"] = own["groups"].replace("p.dim()", "len(p.ds_shape)")
    config = ", ".join(f"{name}={value}" for name, value in split.config.items())
    others = {"{config}": config} | ({} if subject.block else {BLOCK_CLASS: "()"})
    others |= {BLOCK_CLASS: f"tuple({BLOCK_CLASSES})"} if subject.beside else {}
    # A model that does not run with weights of bf16 keeps them in fp32.
    others |= {} if subject.is_bf16 else {DTYPE: "dtype = torch.float32\n"}
    for old, new in others.items():
        own = {name: text.replace(old, new) for name, text in own.items()}
    # Where a forward ends, tensor ranks and ZeRO 3 do not have its whole weights.
    touches = bool(subject.idle) and split.tensor == 1 and (split.zero or (0,))[0] < 3
    hooks = [TOUCH] * bool(touches and subject.block)
    loss = subject.loss_words.replace("outputs", f"model({subject.call_words})")
    loss = f"touch(model, (), {loss})" if touches and split.stages == 1 else loss
    if split.autocast or not (subject.is_bf16 or split.zero):
        loss = f'with torch.autocast(DEVICE.type, torch.bfloat16, enabled=o.precision == "bf16"):\n    return {loss}'
    else:
        loss = f"return {loss}"
    styles = {name: STYLES[style] for name, style in subject.plan.items()}
    plan = f"PLAN = {as_python(styles, indent=0)}" if split.tensor > 1 else ""
    block = f"BLOCK = {as_python([subject.block, *subject.beside])}"
    is_shallow = bool(subject.block) and subject.is_shallow
    option = 'parser.add_argument("--check", action="store_true")'
    if split.stages > 1:
        chain = {key: subject.chain[key] for key in ("blocks", "before", "after")}
        constants = {"CHAIN": chain, "HIDDEN": subject.chain["hidden"]}
        constants |= {"TIED": subject.chain["tied"]} if subject.chain["tied"] else {}
        lines = [f"{name} = {as_python(value)}" for name, value in constants.items()]
        own["constants"] = "\n".join([own["constants"], *lines])
        if subject.chain["tied"]:
            own |= {"micros": own["micros"] + OF_ENDS, "after": own["after"].replace("\nreturn", f"{ENDS}\nreturn")}
            own["step"] = TWIN + own["step"].replace("is not None]", "is not None and p is not twin]")
    start, text = START, PROGRAM.replace("$check\n", f"{CHECK}\n").replace("$check_option", option)
    if not split.recipe:
        start = "\n".join([*START.splitlines()[3:7], "train(o)"])
        text = PROGRAM.replace("$check\n\n\n", "").replace("    $check_option\n", "")
    places: dict[str, str] = own | {
        "title": f"Train {subject.title} {split.title}",
        "launch": launch(choice, file),
        "check_launch": f"python {file} --check    # every gradient, as one process computes it, on a CPU"
        * bool(split.recipe),
        "model": subject.definitions + "\n" * ("def " in subject.definitions),
        "constants": "\n".join(filter(None, [block * bool(subject.block), own["constants"], plan])),
        "shard": _shard(split) if split.recipe else "",
        "inputs": INPUTS[subject.kind].format(batch=f"batch({subject.batch_words})"),
        "loss": loss,
        "shallow_words": ", with two blocks of each list for a check" if is_shallow and split.recipe else "",
        "shallow": SHALLOW if is_shallow and split.recipe else "",
        "recompute": "\n".join(["widen(model)"] * subject.has_scalars + hooks + [AGAIN] * choice.recompute),
        "precision": choice.precision,
        "global_batch": str(choice.global_batch_size),
        "micro_batch": str(choice.micro_batch_size),
    }
    for function in [moved] * (subject.kind == "nested") + [widen] * subject.has_scalars + [touch] * touches:
        places["definitions"] += f"\n\n{inspect.getsource(function)}"
    text = text.replace("    $start", textwrap.indent(start, "    "))
    text = text.replace("    $micros", textwrap.indent(own["micros"], "    "))
    for name in ("DATA_RANKS", "DATA_RANK"):
        text = text.replace(name, own[name])
    text = _filled(text, places)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    with parsing:
        parsed = ast.parse(text.replace("$imports", ""))
    used = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
    imports = []
    for line in IMPORTS.splitlines():
        words, space, of_module = line.rpartition("import ")
        kept = [name for name in of_module.split(", ") if name.split(" as ")[-1] in used]
        imports += [words + space + ", ".join(kept)] if kept or not line else []
    return text.replace("$imports", "\n".join([*imports, *subject.imports]))


def launch(choice: Choice, file: str) -> str:
    """Return the command that starts a program."""
    if choice.gpus == 1:
        return f"python {file} --steps 1000 --save checkpoints"
    words = f"--nnodes {choice.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if choice.nodes > 1 else ""
    return f"torchrun {words}--nproc-per-node {choice.gpus // choice.nodes} {file} --steps 1000 --save checkpoints"


def _filled(template: str, places: dict[str, str]) -> str:
    """Return the template with its places filled. A place that is alone in its line takes many lines, or none."""
    lines = []
    for line in template.splitlines():
        alone = re.fullmatch(r"( *)\$(\w+)", line)
        if alone and alone[2] != "imports":
            text = places[alone[2]]
            lines += [alone[1] + each if each else "" for each in text.split("\n")] if text else []
        else:
            lines.append(re.sub(r"\$(\w+)", lambda found: places.get(found[1], found[0]), line))
    return "\n".join(lines) + "\n"


def _shard(split: Split) -> str:
    """Return the source of a recipe's `shard`, whose imports stand at the top of a program."""
    module = import_module(f"gptscale.recipes.{split.recipe}")
    text = inspect.getsource(module.shard)
    if "shard_data(" in split.own.get("before", ""):
        other = inspect.getsource(import_module("gptscale.recipes.hybrid_3d").shard)
        text += f"\n\n{other.replace('def shard(', 'def shard_data(')}"
    return re.sub(r"( {4}(from|import) .*\n)+\n", "", text).rstrip()


def _zero(subject: Subject, split: Split, gpus: int) -> str:
    """Return what cuts a model by DeepSpeed. Its JSON is the recipe's, but for batch and precision."""
    from gptscale.recipes.zero import ZeroConfig, ds_config

    assert split.zero is not None
    config = ZeroConfig(*split.zero)  # type: ignore[arg-type]
    pins: Any = Words('DEVICE.type == "cuda"')
    enabled = {"enabled": Words('o.precision == "bf16"')}
    # DeepSpeed casts weights, and no inputs.
    is_bf16 = subject.is_bf16 and not subject.has_floats
    json = {
        "train_batch_size": Words("o.global_batch_size"),
        "train_micro_batch_size_per_gpu": Words("o.micro_batch_size"),
        "gradient_clipping": Words("o.clip"),
        **({"bf16": enabled} if is_bf16 else {"torch_autocast": {**enabled, "dtype": "bfloat16"}}),
        **ds_config(config, subject.n_params, subject.largest_weight, gpus, pins),
    }
    cut = "model.to(DEVICE)"
    if config.stage == 3:
        # It cuts weights as they are.
        cut = 'model.to(torch.bfloat16 if o.precision == "bf16" else torch.float32)\n' * is_bf16
        # It moves no buffers.
        cut += "for buffer in model.buffers():\n    buffer.data = buffer.data.to(DEVICE)\n"
        cut += "deepspeed.zero.Init(module=model, config_dict_or_path=json)"
    return f"json: dict[str, Any] = {as_python(json, 0)}\n{cut}"
