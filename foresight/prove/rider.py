"""What a program computes in its first steps, told by torch's own hooks: losses, gradients, norms, weights and moments.

A program of somebody else reads a copy of this file (foresight/mock_cuda/on_path.py) in an environment without gptscale. So it
imports torch alone. Each rank leaves RANK.jsonl, a line for each value, and RANK.bin, the bytes of those that are tensors.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import hashlib
import importlib
import json
import mmap
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# The task of a program, as JSON, which its starter (foresight/prove/program.py) writes.
TASK = "GPTSCALE_SIMULATED_PROGRAM"
# It lies beside this file, whose name differs in a program.
parts = importlib.import_module(f"{__name__.removesuffix('rider')}parts")
wrap = importlib.import_module(f"{__name__.removesuffix('rider')}no_cuda").wrap
# How long a rank waits for the others to say which samples they read.
PEERS_S = 30.0
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(torch.__file__), "gptscale_", "<")
LINE = "_gptscale_line"


class Notes:
    """The files of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        if (file := folder / f"{rank}.jsonl").exists():
            refuse(f"two processes compute as rank {rank}", "train in its ranks alone, not in their launcher")
        self.lines, self.values = file.open("w"), file.with_suffix(".bin").open("wb")

    def add(self, kind: str, tensor: Tensor | None = None, **facts: Any) -> None:
        """Note a value, and a tensor of it: floating ones with 4 bytes a number, or with 8."""
        if tensor is not None:
            facts |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            tensor = tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
            tensor = tensor.detach().cpu().contiguous()
            facts |= {"stored": str(tensor.dtype).removeprefix("torch."), "at": self.values.tell()}
            self.values.write(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b"")
        self.lines.write(json.dumps({"kind": kind, **facts}) + "\n")

    def flush(self) -> None:
        self.values.flush()
        self.lines.flush()


class Reference:
    """What the reference has left for the candidate: its first weights, and the batches that each of its loaders gave."""

    def __init__(self, folder: Path) -> None:
        # Steps that nobody asks for stay on the disk: all of the reference are there.
        with (folder / "0.bin").open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        facts = [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]
        self.weights: dict[str, dict[str, Any]] = {fact["name"]: fact for fact in facts if fact["kind"] == "start"}
        self.batches: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for fact in facts:
            if fact["kind"] == "batch":
                self.batches.setdefault(fact["loader"], {}).setdefault(fact["number"], []).append(fact)

    def tensor(self, fact: dict[str, Any]) -> Tensor:
        numel, kind = torch.Size(fact["shape"]).numel(), getattr(torch, fact["stored"])
        if not numel:
            return torch.empty(fact["shape"], dtype=kind)
        return torch.frombuffer(self.bytes, dtype=kind, count=numel, offset=fact["at"]).reshape(fact["shape"])

    def weight(self, name: str, own: Tensor) -> dict[str, Any] | None:
        """Return the line of a weight, or of the only one that ends alike, or of the only one that has its value."""
        alike = [name] if name in self.weights else []
        alike = alike or [n for n in self.weights if n.endswith(f".{name}") or name.endswith(f".{n}")]
        if len(alike) != 1:
            shaped = (n for n, f in self.weights.items() if f["shape"] == list(own.shape) and not f["tied"])
            alike = [n for n in shaped if torch.equal(self.tensor(self.weights[n]), own.float())]
        return self.weights[alike[0]] if len(alike) == 1 else None


@dataclass
class DealtLoader:
    """What a data loader has given. peers: how many ranks read other samples, and the number of this one among them."""

    number: int
    dataset: Any
    batches: int = 0
    samples: int = 0
    peers: tuple[int, int] | None = None


class Rider:
    """It rides in a program, notes what each of its steps computes, and holds it after the last.

    A step ends with the call of an optimizer's step(). Several optimizers are counted each for itself. Where DeepSpeed's engine
    steps, its own steps count.
    """

    def __init__(self) -> None:
        self._notes: Notes | None = None
        self.depth = self.in_step = self.in_backward = self.in_clip = 0
        # Modules that were made, and of each model the one that was called first: it itself or a part of it.
        self.made: list[weakref.ref[nn.Module]] = []
        self.roots: list[nn.Module] = []
        self.modules: set[int] = set()
        # The model that has a weight of a name.
        self.names: dict[str, int] = {}
        # The parts that a tensor holds, by its id. The tensors stay alive, so that no other has the number of one.
        self.parts: dict[int, list[Any]] = {}
        self.tensors: dict[int, Tensor] = {}
        self.steps: Counter[int] = Counter()
        self.optimizers: dict[int, Any] = {}
        self.loaders: dict[int, DealtLoader] = {}
        self.engine: Any = None
        self.counted: Any = None
        self.autocast = ""

    def take(self, task: dict[str, Any]) -> None:
        """Note for a task: before or after a fork, and before there is a model."""
        self.folder, self.last_step, self.own_data = Path(task["folder"]), int(task["steps"]), task["own_data"]
        self.reference = Reference(Path(task["reference"])) if task["reference"] else None

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def notes(self) -> Notes:
        """Return the files of this rank, which begin when something is to be noted: by then its rank is known."""
        if self._notes is None:
            self._notes = Notes(self.folder, self.rank)
            atexit.register(self._notes.flush)
        return self._notes

    @property
    def step(self) -> int:
        """Return the number of the step that the program is in, from 1."""
        return 1 + max(self.steps.values(), default=0)

    def begin(self) -> None:
        """Hang it into torch, whose own functions tell it what happens."""
        optimizer, clip = (importlib.import_module(f"torch.{n}") for n in ("optim.optimizer", "nn.utils.clip_grad"))
        optimizer.register_optimizer_step_pre_hook(self.begins)
        optimizer.register_optimizer_step_post_hook(lambda own, args, options: self.stepped(own))
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        wrap(nn.Module, "__init__", self._initialise)
        wrap(torch.autograd, "backward", self._backward)
        for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
            if hasattr(torch.nn.utils, name):
                wrap(torch.nn.utils, name, self._clip)
                setattr(clip, name, getattr(torch.nn.utils, name))
        for name in DROPOUTS:
            wrap(functional, name, self._no_dropout)
        wrap(functional, "scaled_dot_product_attention", self._attention)
        wrap(functional, "cross_entropy", self._count_targets)
        wrap(importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter, "__next__", self._next)

    # models

    def _initialise(self, run: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> None:
        """Note the innermost line of the user's own code that makes a module."""
        run(module, *args, **options)
        frame: Any = sys._getframe(2)
        while frame is not None and any(word in frame.f_code.co_filename for word in LIBRARIES):
            frame = frame.f_back
        module.__dict__.setdefault(LINE, frame and f"{frame.f_code.co_filename}:{frame.f_lineno}")
        self.made.append(weakref.ref(module))

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.depth += 1
        if not self.autocast and torch.is_autocast_enabled("cpu"):
            self.autocast = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
            self.notes.add("autocast", dtype=self.autocast)
        if self.depth == 1 and not self.in_backward:
            if id(module) not in self.modules:
                self._meet(module)
            if torch.is_grad_enabled() and module.training and module in self.roots:
                self._note_samples(inputs)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.depth -= 1

    def _whole(self, module: nn.Module) -> nn.Module:
        """Return the outermost module that a module is a part of: a program may call the parts of a model itself."""
        live = (holder for ref in self.made if (holder := ref()) is not None)
        holders = {id(part): holder for holder in live for part in holder._modules.values()}
        whole = module
        while (holder := holders.pop(id(whole), None)) is not None:
            whole = holder
        # Where its other parts are on the meta device, this one is all that is trained.
        return module if any(weight.is_meta for weight in whole.parameters()) else whole

    def _meet(self, called: nn.Module) -> None:
        """Learn the weights of a model that runs for the first time, note them, and give it those of the reference."""
        root = self._whole(called)
        self.modules |= {id(module) for module in root.modules()}
        # One on the meta device is only tried, by a launcher for example.
        if next(root.parameters(), None) is None or any(weight.is_meta for weight in root.parameters()):
            return
        self.roots.append(called)
        self.notes.add("model", world=self.world)
        lines = {parts.clean(f"{path}."): module.__dict__.get(LINE) for path, module in root.named_modules()}
        with torch.no_grad():
            for tensor, part in parts.weights_of(root):
                line = lines.get(part.name[: part.name.rfind(".") + 1]) or root.__dict__.get(LINE)
                # A second model has the names of the first.
                if self.names.setdefault(part.name, len(self.roots)) != len(self.roots):
                    part = replace(part, name=f"model{len(self.roots)}.{part.name}")
                self._learn(tensor, part, line)
        self.notes.flush()

    def _learn(self, tensor: Tensor, part: Any, line: str | None) -> None:
        """Note a weight as it is at the start, and give it the value that it has in the reference."""
        own, full = part.of(tensor), None
        if self.reference is not None:
            if (fact := self.reference.weight(part.name, own)) is None:
                names = ", ".join([*self.reference.weights][:4])
                refuse(f"the reference has no weight {part.name} (it has {names}, ...)", "build the same model in both")
            # One process of FSDP 1 holds it flat.
            full, part = self.reference.tensor(fact).reshape(fact["size"]), replace(part, name=fact["name"])
            if list(full.shape) != part.size and (part := parts.found_in(part, own, full)) is None:
                what = f"{fact['name']} has the shape {list(own.shape)} here and {list(full.shape)} in the reference"
                refuse(what, "build the same model in both")
            if part.cut(full).numel() != own.numel():
                refuse(f"{part.name} is not in memory (offloaded to a disk?)", "offload it to the CPU, or not at all")
        known = self.parts.setdefault(id(tensor), [])
        tied = next((other.name for other in known if (other.start, other.numel) == (part.start, part.numel)), None)
        self.tensors[id(tensor)] = tensor
        facts = {"name": part.name, "size": part.size, "where": part.where, "copy": id(tensor)}
        self.notes.add("start", own, **facts, line=line, tied=tied)
        if tied is None:
            known.append(part)
            if full is not None:
                own.copy_(part.cut(full).reshape(own.shape))

    def note(self, kind: str, tensor: Any, value: Any, step: int, place: str = "") -> None:
        """Note a value that belongs to a weight: itself, its gradient or a moment. place: names a weight of no model."""
        # FSDP 1 leaves an empty parameter where another rank has all of it.
        if not parts.local(tensor).numel():
            return
        if id(tensor) not in self.parts:
            with torch.no_grad():
                self._learn(tensor, parts.part_of(place, tensor), None)
        if value is not None and hasattr(tensor, "placements") and value.placements != tensor.placements:
            value = value.redistribute(placements=tensor.placements)
        for part in self.parts[id(tensor)]:
            facts = {"name": part.name, "size": part.size, "where": part.where, "step": step, "copy": id(tensor)}
            # A gradient that is not there is as one of zeros.
            own = part.of(torch.zeros_like(parts.local(tensor)) if value is None else value)
            self.notes.add(kind, own, **facts, none=value is None)

    # what a step does

    def _note_samples(self, inputs: Any) -> None:
        """Note a mark of each sample that a model gets."""
        for tensor in tensors_in(inputs)[:1]:
            rows = tensor.detach().cpu().reshape(len(tensor), -1)
            self.notes.add("samples", step=self.step, marks=[mark_of(row)[:12] for row in rows])

    def _backward(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Note the losses whose gradients are asked for. Stages of torch 2.15 give edges of a graph, which have no value."""
        losses = args[0] if args else options["tensors"]
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            if isinstance(loss, Tensor) and loss.numel() == 1 and not (self.in_backward or loss.is_meta):
                self.notes.add("loss", step=self.step, value=number(loss))
        self.in_backward += 1
        try:
            return run(*args, **options)
        finally:
            self.in_backward -= 1

    def _clip(self, run: Callable[..., Any], parameters: Any, *args: Any, **options: Any) -> Any:
        """Note the gradients before they are clipped, and the norm."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in parameters if not self.in_clip else ():
            if id(parameter) in self.parts:
                self.note("before clipping", parameter, parameter.grad, self.step)
        self.in_clip += 1
        try:
            result = run(parameters, *args, **options)
        finally:
            self.in_clip -= 1
        # The second function gets the norm, and returns nothing.
        norm = result if result is not None else options.get("total_norm", args[1] if len(args) > 1 else None)
        if not self.in_clip and norm is not None:
            self.notes.add("norm", step=self.step, value=number(norm))
        return result

    def _no_dropout(self, run: Callable[..., Any], x: Tensor, p: float = 0.5, training: bool = True, *args: Any) -> Any:
        if p and training and not torch.compiler.is_compiling():
            self.notes.add("dropout")
        return x

    def _attention(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return run(*args, **{key: value for key, value in options.items() if key != "dropout_p"})

    def _count_targets(self, run: Callable[..., Any], x: Tensor, target: Tensor, *args: Any, **options: Any) -> Any:
        if self.roots and torch.is_grad_enabled() and not (target.is_floating_point() or torch.compiler.is_compiling()):
            count = int((parts.local(target) != options.get("ignore_index", -100)).sum())
            self.notes.add("targets", step=self.step, value=count)
        return run(x, target, *args, **options)

    def begins(self, optimizer: Any, args: Any, options: Any) -> Any:
        """Note the gradients that an optimizer uses, or let the closure that makes them do so as it ends."""
        self.in_step += 1
        # An optimizer may step others within itself. The outermost is counted.
        if self.in_step == 1:
            self.counted = self.engine or optimizer
        closure = next((value for value in (*args[1:], *options.values()) if callable(value)), None)
        if closure is None:
            self._note_gradients(optimizer)
            return None

        def noted() -> Any:
            loss = closure()
            self._note_gradients(optimizer)
            return loss

        return mapped((args, options), lambda leaf: noted if leaf is closure else leaf)

    def _note_gradients(self, optimizer: Any) -> None:
        # One that shards its state has another of what it owns, and the gradients of all else may be used up.
        if isinstance(getattr(optimizer, "optim", None), torch.optim.Optimizer):
            return
        self.optimizers.setdefault(id(self.counted), self.counted)
        place = [*self.optimizers].index(id(self.counted))
        # Fused optimizers of torch divide by it as they read gradients.
        scale = getattr(optimizer, "grad_scale", None)
        for at, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            grad = parameter.grad if parameter.grad is None or scale is None else parameter.grad.detach() / scale
            self.note("gradient", parameter, grad, self.steps[id(self.counted)] + 1, f"optimizer{place}.{at}")

    def stepped(self, optimizer: Any) -> None:
        """Note the moments after a step."""
        self.in_step -= 1
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    self.note(f"moment {name}", parameter, value, self.steps[id(self.counted)] + 1)
        if not self.in_step and self.engine is None:
            self.end_step(self.counted)

    def end_step(self, counted: Any) -> None:
        """Note all weights that are trained, and wait for the end if this was the last step of all optimizers."""
        self.steps[id(counted)] += 1
        for tensor in list(self.tensors.values()):
            if tensor.requires_grad:
                self.note("weight", tensor, tensor, self.steps[id(counted)])
        self.notes.add("step", number=self.steps[id(counted)])
        self.notes.flush()
        if min(self.steps.values()) >= self.last_step:
            # The starter ends all ranks when each has come here: none leaves while another still needs it.
            self._leave_word(f"done.{self.rank}", str(self.world))
            sys.stdout.flush()
            time.sleep(10**6)

    def _leave_word(self, name: str, text: str) -> None:
        """Write a file that others look for, all of it at once."""
        part = self.folder / f"part.{name}"
        part.write_text(text)
        part.rename(self.folder / name)

    # data

    def _next(self, run: Callable[..., Any], iterator: Any) -> Any:
        """Give a batch of the reference in the place of the program's own, or note it if this is the reference."""
        batch = run(iterator)
        if self.own_data or not (tensors := tensors_in(batch)):
            return batch
        loader = self.loaders.setdefault(id(iterator._dataset), DealtLoader(len(self.loaders), iterator._dataset))
        if self.reference is None:
            for tensor in tensors:
                self.notes.add("batch", tensor, loader=loader.number, number=loader.batches)
            loader.batches += 1
            return batch
        size = len(tensors[0])
        peers, index = loader.peers = loader.peers or self._peers(loader, tensors[0])
        start, loader.samples = loader.samples + index * size, loader.samples + peers * size
        return self._dealt(batch, self.reference.batches.get(loader.number, {}), start, size)

    def _peers(self, loader: DealtLoader, own: Tensor) -> tuple[int, int]:
        """Return how many ranks read other samples, and the number of this one among them.

        Ranks that read the same samples are of one tensor group, or of one pipeline.
        """
        files = [self.folder / f"reads.{loader.number}.{rank}" for rank in range(self.world)]
        mark = mark_of(own)
        # A stage may read its first batch when the one before has sent. Then it reads what another has read.
        read = {file.read_text() for file in files if file.exists()}
        if [*self.folder.glob(f"late.{loader.number}.*")] and mark not in read:
            what = f"rank {self.rank} read its first batch {PEERS_S:g} s after the others"
            refuse(what, "run it on a calmer machine, or let both read their own, with --own-data")
        self._leave_word(files[self.rank].name, mark)
        deadline = time.monotonic() + PEERS_S
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not all(file.exists() for file in files):
            self._leave_word(f"late.{loader.number}.{self.rank}", "")
        marks = list(dict.fromkeys(file.read_text() for file in files if file.exists()))
        return len(marks), marks.index(mark)

    def _dealt(self, batch: Any, batches: dict[int, list[dict[str, Any]]], start: int, size: int) -> Any:
        """Return a batch with the samples `start` to `start + size` of those that the reference has read."""
        assert self.reference is not None
        taken: list[list[Tensor]] = []
        for stored in batches.values():
            length = stored[0]["shape"][0]
            low, high = max(0, start), min(length, start + size)
            if low < high:
                taken.append([self.reference.tensor(fact)[low:high] for fact in stored if fact["shape"][0] == length])
            start -= length
        own = [tensor for tensor in tensors_in(batch) if len(tensor) == size]
        if sum(len(tensors[0]) for tensors in taken) < size:
            # The reference has not come so far.
            return batch
        if len({tuple(t.shape[1:] for t in tensors) for tensors in taken}) != 1 or len(own) != len(taken[0]):
            refuse("the batches of the two programs are unlike in form", "let both read their own, with --own-data")
        given = {id(old): torch.cat(new).to(old.dtype) for old, *new in zip(own, *taken, strict=True)}
        if any(given[id(old)].shape != old.shape for old in own):
            self.notes.add("reshaped")
        return mapped(batch, lambda leaf: given.get(id(leaf), leaf))


def number(value: Any) -> float:
    """Return a tensor of one element as a number, whole if it is a DTensor."""
    value = value.detach() if isinstance(value, Tensor) else value
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def mark_of(tensor: Tensor) -> str:
    """Return a mark of a tensor's values."""
    return hashlib.blake2b(str(tensor.tolist()).encode(), digest_size=12).hexdigest()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors with samples in lists and dictionaries."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, MutableMapping):
            value = [value[key] for key in sorted(value, key=str)]
        if isinstance(value, list | tuple):
            for inner in value:
                yield from leaves(inner)
        else:
            yield value

    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.dim() > 0]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return lists and dictionaries with each of their leaves changed."""
    if isinstance(value, MutableMapping):
        value = copy.copy(value)
        for key in list(value):
            value[key] = mapped(value[key], change)
        return value
    if isinstance(value, list | tuple):
        inner = [mapped(each, change) for each in value]
        return value._make(inner) if hasattr(value, "_make") else type(value)(inner)
    return change(value)


def refuse(what: str, fix: str) -> NoReturn:
    """End this process with a line for the starter."""
    Path(json.loads(os.environ[TASK])["folder"], "refused.json").write_text(json.dumps([what, "in the program", fix]))
    os._exit(2)


rider: Rider


def begin(torch_module: Any) -> None:
    """Ride in this program, which has just imported torch."""
    global rider
    rider = Rider()
    rider.take(json.loads(os.environ[TASK]))
    rider.begin()


def watch_fsdp(module: Any) -> None:
    """Note what FSDP 1 clips, and the norm."""

    def clip(run: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
        return rider._clip(lambda parameters: run(model, *args, **options), model.parameters())

    wrap(module.FullyShardedDataParallel, "clip_grad_norm_", clip)


def watch_deepspeed(module: Any) -> None:
    """Count the steps of DeepSpeed's engine, whose optimizer steps several times in each."""
    # Only inference uses it, it compiles for a minute, and a compile that is ended leaves a lock on which all later ones wait.
    module.deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)

    def take_model_step(run: Callable[..., Any], engine: Any, *args: Any, **options: Any) -> None:
        rider.engine = engine
        run(engine, *args, **options)
        if engine.gradient_clipping() and engine.get_global_grad_norm() is not None:
            rider.notes.add("norm", step=rider.step, value=number(engine.get_global_grad_norm()))
        rider.end_step(engine)
        rider.engine = None

    wrap(module.DeepSpeedEngine, "_take_model_step", take_model_step)


def refuse_colossalai(module: Any) -> None:
    """Refuse what Colossal-AI computes on GPUs alone."""
    for name in {"LowLevelZeroOptimizer", "GeminiDDP"} & {*vars(module)}:
        refusal = f"{name} of Colossal-AI needs a GPU", "prove its TorchDDPPlugin or HybridParallelPlugin"
        wrap(getattr(module, name), "__init__", lambda *args, why=refusal, **options: refuse(*why))
