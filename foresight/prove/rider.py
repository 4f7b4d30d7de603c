"""What a program computes in its first steps, told by torch's own hooks: losses, gradients, norms, weights and moments.

A program of somebody else reads a copy of this file (foresight/mock_cuda/on_path.py) in an environment without gptscale. So it
imports torch alone. Each rank leaves RANK.jsonl, a line for each value, and RANK.bin, the bytes of those that are tensors.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# The task of a program, as JSON, which its starter (foresight/prove/program.py) writes.
TASK = "GPTSCALE_SIMULATED_PROGRAM"
# They lie beside this file, whose name differs in a program.
parts = importlib.import_module(f"{__name__.removesuffix('rider')}parts")
# How long a rank waits for the others to say which samples they read.
PEERS_S = 20.0
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep, os.path.dirname(torch.__file__))
LINE = "_gptscale_line"


class Notes:
    """The file of one rank: a line of JSON for each value, and the bytes of its tensors beside it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.lines = (folder / f"{rank}.jsonl").open("w")
        self.values = (folder / f"{rank}.bin").open("wb")

    def add(self, kind: str, tensor: Tensor | None = None, **facts: Any) -> None:
        """Note a value, and a tensor of it: floating ones with 4 bytes a number, or with 8."""
        if tensor is not None:
            facts |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            if tensor.is_floating_point() and tensor.dtype != torch.float64:
                tensor = tensor.float()
            tensor = tensor.detach().cpu().contiguous()
            facts["at"] = self.values.tell()
            self.values.write(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b"")
            facts["stored"] = str(tensor.dtype).removeprefix("torch.")
        self.lines.write(json.dumps({"kind": kind, **facts}) + "\n")

    def flush(self) -> None:
        """Let others read all that was noted."""
        self.values.flush()
        self.lines.flush()


class Reference:
    """What the reference has left for the candidate: its first weights, and the batches that it read."""

    def __init__(self, folder: Path) -> None:
        self.bytes = bytearray((folder / "0.bin").read_bytes())
        self.weights: dict[str, dict[str, Any]] = {}
        self.batches: dict[int, list[list[dict[str, Any]]]] = {}
        for line in (folder / "0.jsonl").read_text().splitlines():
            fact = json.loads(line)
            if fact["kind"] == "start":
                self.weights[fact["name"]] = fact
            elif fact["kind"] == "batch":
                batches = self.batches.setdefault(fact["loader"], [])
                batches += [[] for _ in range(fact["number"] + 1 - len(batches))]
                batches[fact["number"]].append(fact)

    def tensor(self, fact: dict[str, Any]) -> Tensor:
        """Return the tensor of a line."""
        numel, kind = torch.Size(fact["shape"]).numel(), getattr(torch, fact["stored"])
        if not numel:
            return torch.empty(fact["shape"], dtype=kind)
        return torch.frombuffer(self.bytes, dtype=kind, count=numel, offset=fact["at"]).reshape(fact["shape"])


class Loader:
    """What a data loader has given so far. peers: how many ranks read other samples, and this rank's number among them."""

    def __init__(self, number: int) -> None:
        self.number, self.batches, self.samples = number, 0, 0
        self.peers: tuple[int, int] | None = None


class Rider:
    """It rides in a program, notes what each of its steps computes, and stops it after the last.

    A step ends with the call of an optimizer's step(). Several optimizers are counted each for itself. Where DeepSpeed's engine
    steps, its own steps count.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.folder, self.last_step, self.own_data = Path(task["folder"]), int(task["steps"]), task["own_data"]
        self.reference = Reference(Path(task["reference"])) if task["reference"] else None
        self._notes: Notes | None = None
        self.depth = self.in_step = self.in_backward = self.in_clip = 0
        self.roots: list[nn.Module] = []
        self.known: set[int] = set()
        self.names: dict[str, int] = {}
        # The parts that a tensor holds, by its id. The tensors stay alive, so that no other has the number of one.
        self.parts: dict[int, list[Any]] = {}
        self.tensors: dict[int, Tensor] = {}
        self.steps: Counter[int] = Counter()
        self.optimizers: dict[int, Any] = {}
        self.loaders: dict[int, tuple[Any, Loader]] = {}
        self.engine: Any = None
        self.autocast = ""

    @property
    def rank(self) -> int:
        """Return this process's number."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def notes(self) -> Notes:
        """Return the file of this rank, which begins when something is to be noted: by then its rank is known."""
        if self._notes is None:
            self._notes = Notes(self.folder, self.rank)
        return self._notes

    @property
    def step(self) -> int:
        """Return the number of the step that the program is in, from 1."""
        return 1 + max(self.steps.values(), default=0)

    # hooks

    def begin(self) -> None:
        """Hang it into torch, whose own functions tell it what happens."""
        optimizer = importlib.import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_pre_hook(lambda own, args, options: self.begins(own))
        optimizer.register_optimizer_step_post_hook(lambda own, args, options: self.stepped(own))
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        initialise = nn.Module.__init__

        def note_line(module: nn.Module, *args: Any, **options: Any) -> None:
            initialise(module, *args, **options)
            module.__dict__.setdefault(LINE, user_line())

        nn.Module.__init__ = note_line  # type: ignore[method-assign]
        _wrap(torch.autograd, "backward", self._backward)
        clip = importlib.import_module("torch.nn.utils.clip_grad")
        for module in (clip, torch.nn.utils):
            for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
                if hasattr(module, name):
                    _wrap(module, name, self._clip)
        for name in DROPOUTS:
            _wrap(functional, name, self._no_dropout)
        _wrap(functional, "scaled_dot_product_attention", self._attention)
        _wrap(functional, "cross_entropy", self._count_targets)
        data = importlib.import_module("torch.utils.data.dataloader")
        _wrap(data._BaseDataLoaderIter, "__next__", self._next)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.depth += 1
        if not self.autocast and torch.is_autocast_enabled("cpu"):
            self.autocast = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
            self.notes.add("autocast", dtype=self.autocast)
        if self.depth == 1 and not self.in_backward:
            if id(module) not in self.known:
                self._meet(module)
            if torch.is_grad_enabled() and module.training and module in self.roots:
                self._note_samples(inputs)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.depth -= 1

    # models

    def _meet(self, root: nn.Module) -> None:
        """Learn the weights of a model that runs for the first time, note them, and give it those of the reference."""
        self.known |= {id(module) for module in root.modules()}
        if next(root.parameters(), None) is None:
            return
        self.roots.append(root)
        self.notes.add("model", number=len(self.roots) - 1, world=self.world, type=type(root).__name__)
        lines = {
            parts.clean(f"{path}.{name}" if path else name): module.__dict__.get(LINE)
            for path, module in root.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        with torch.no_grad():
            for tensor, part in parts.weights_of(root):
                # A second model has the names of the first.
                if self.names.setdefault(part.name, len(self.roots)) != len(self.roots):
                    part = replace(part, name=f"model{len(self.roots) - 1}.{part.name}")
                self._learn(tensor, part, lines.get(part.name) or root.__dict__.get(LINE))
        self.notes.flush()

    def _learn(self, tensor: Tensor, part: Any, line: str | None) -> None:
        """Note a weight as it is at the start, and give it the value that it has in the reference."""
        own = part.of(tensor)
        fact = None
        if self.reference is not None:
            fact = self.reference.weights.get(part.name) or self._renamed(part.name, own)
            if fact is None:
                names = ", ".join([*self.reference.weights][:4])
                refuse(f"the reference has no weight {part.name} (it has {names}, ...)", "build the same model in both")
            full = self.reference.tensor(fact)
            if fact["name"] != part.name:
                part = replace(part, name=fact["name"])
            if list(full.shape) != part.size:
                fitting = parts.found_in(part, own, full)
                if fitting is None:
                    what = f"{part.name} has the shape {part.size} here and {list(full.shape)} in the reference"
                    refuse(what, "build the same model in both")
                part = fitting
        known = self.parts.setdefault(id(tensor), [])
        tied = [other.name for other in known if (other.start, other.numel) == (part.start, part.numel)]
        known += [] if tied else [part]
        self.tensors[id(tensor)] = tensor
        facts = {"line": line, "tied": tied[0] if tied else None, "trained": tensor.requires_grad}
        self.notes.add("start", own, name=part.name, size=part.size, where=part.where, copy=id(tensor), **facts)
        if fact is not None and not tied:
            own.copy_(part.cut(full).reshape(own.shape))

    def _renamed(self, name: str, own: Tensor) -> dict[str, Any] | None:
        """Return the weight of the reference that has another name here: the one that ends alike, or has the same value."""
        assert self.reference is not None
        weights = self.reference.weights
        alike = [f for n, f in weights.items() if n.endswith(f".{name}") or name.endswith(f".{n}")]
        if len(alike) != 1:
            same_shape = (f for f in weights.values() if f["shape"] == list(own.shape) and not f["tied"])
            alike = [f for f in same_shape if torch.equal(self.reference.tensor(f), own.float())]
        return alike[0] if len(alike) == 1 else None

    def _parts_of(self, tensor: Tensor, place: str) -> list[Any]:
        """Return the parts of a tensor that an optimizer holds. One of no model is named by its place."""
        if id(tensor) not in self.parts:
            with torch.no_grad():
                part = parts.box_of(place, tensor) if hasattr(tensor, "device_mesh") else parts.whole(place, tensor)
                self._learn(tensor, part, None)
        return self.parts[id(tensor)]

    def note(self, kind: str, tensor: Tensor, value: Tensor | None, step: int, place: str = "") -> None:
        """Note a value that belongs to a weight: itself, its gradient or a moment."""
        for part in self._parts_of(tensor, place):
            facts = {"name": part.name, "size": part.size, "where": part.where, "step": step, "copy": id(tensor)}
            self.notes.add(kind, None if value is None else part.of(value), **facts)

    # what a step does

    def _note_samples(self, inputs: Any) -> None:
        """Note a mark of each sample that a model gets."""
        tensors = [t for t in leaves(inputs) if isinstance(t, Tensor) and t.dim() > 0]
        if tensors:
            rows = tensors[0].detach().cpu().reshape(len(tensors[0]), -1)
            marks = [hashlib.blake2b(str(row.tolist()).encode(), digest_size=6).hexdigest() for row in rows]
            self.notes.add("samples", step=self.step, marks=marks)

    def _backward(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Note the losses whose gradients are asked for."""
        losses = args[0] if args else options["tensors"]
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            if loss.numel() == 1 and not self.in_backward:
                # It is noted as a number, so that what follows is not held up by a graph.
                value = float(loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach())
                self.notes.add("loss", step=self.step, value=value)
        self.in_backward += 1
        try:
            return run(*args, **options)
        finally:
            self.in_backward -= 1

    def _clip(self, run: Callable[..., Any], parameters: Any, *args: Any, **options: Any) -> Any:
        """Note the gradients before they are clipped, and the norm."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.in_clip:
            for parameter in parameters:
                if id(parameter) in self.parts:
                    self.note("before clipping", parameter, parameter.grad, self.step)
        self.in_clip += 1
        try:
            result = run(parameters, *args, **options)
        finally:
            self.in_clip -= 1
        norm = result
        if result is None:
            norm = options.get("total_norm", args[1] if len(args) > 1 else None)
        if not self.in_clip and norm is not None:
            self.note_norm(norm)
        return result

    def note_norm(self, norm: Any) -> None:
        """Note the norm by which gradients were clipped."""
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.notes.add("norm", step=self.step, value=value)

    def _no_dropout(self, run: Callable[..., Any], x: Tensor, p: float = 0.5, training: bool = True, *args: Any) -> Any:
        if p and training and not torch.compiler.is_compiling():
            self.notes.add("dropout")
        return x

    def _attention(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if len(args) > 4 or options.get("dropout_p"):
            args, options = (*args[:4], 0.0, *args[5:]), {k: v for k, v in options.items() if k != "dropout_p"}
        return run(*args, **options)

    def _count_targets(self, run: Callable[..., Any], x: Tensor, target: Tensor, *args: Any, **options: Any) -> Any:
        ignored = options.get("ignore_index", -100)
        noted = self.roots and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if noted and not target.is_floating_point() and not self.in_backward:
            self.notes.add("targets", step=self.step, value=int((parts.local(target) != ignored).sum()))
        return run(x, target, *args, **options)

    def begins(self, optimizer: Any) -> None:
        """Note the gradients that an optimizer uses."""
        self.in_step += 1
        counted = self.engine if self.engine is not None else optimizer
        self.optimizers.setdefault(id(counted), counted)
        place = [*self.optimizers].index(id(counted))
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            step = self.steps[id(counted)] + 1
            self.note("gradient", parameter, parameter.grad, step, f"optimizer{place}.{number}")

    def stepped(self, optimizer: Any) -> None:
        """Note the weights and the moments after a step, and stop after the last one."""
        self.in_step -= 1
        counted = self.engine if self.engine is not None else optimizer
        step = self.steps[id(counted)] + 1
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    self.note(f"moment {name}", parameter, value, step)
        if not self.in_step and self.engine is None:
            self.end_step(counted)

    def end_step(self, counted: Any) -> None:
        """Note all weights that are trained, and stop if this was the last step of all optimizers."""
        self.optimizers.setdefault(id(counted), counted)
        self.steps[id(counted)] += 1
        for tensor in list(self.tensors.values()):
            if tensor.requires_grad:
                self.note("weight", tensor, tensor, self.steps[id(counted)])
        self.notes.add("step", number=self.steps[id(counted)])
        self.notes.flush()
        if min(self.steps.values()) >= self.last_step:
            # The starter ends all ranks when each has come here: none leaves while another still needs it.
            (self.folder / f"done.{self.rank}").write_text(str(self.world))
            sys.stdout.flush()
            time.sleep(10**6)

    # data

    def _next(self, run: Callable[..., Any], iterator: Any) -> Any:
        """Give a batch of the reference in the place of the program's own, and note which the reference read."""
        batch = run(iterator)
        if self.own_data or self.step > self.last_step:
            return batch
        dataset = iterator._dataset
        _, loader = self.loaders.setdefault(id(dataset), (dataset, Loader(len(self.loaders))))
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        if not tensors:
            return batch
        size = len(tensors[0])
        if self.reference is None:
            for tensor in tensors:
                self.notes.add("batch", tensor, loader=loader.number, number=loader.batches)
        else:
            loader.peers = loader.peers or self._peers(loader, tensors[0])
            number, index = loader.peers
            start = loader.samples + index * size
            loader.samples += number * size
            batch = self._dealt(batch, self.reference.batches.get(loader.number, []), start, size)
        loader.batches += 1
        return batch

    def _peers(self, loader: Loader, own: Tensor) -> tuple[int, int]:
        """Return how many ranks read other samples, and the number of this one among them.

        Ranks that read the same samples are of one tensor group, or of one pipeline.
        """
        mark = hashlib.blake2b(str(own.tolist()).encode()).hexdigest()
        file = self.folder / f"reads.{loader.number}"
        written = file.with_suffix(f".{self.rank}.part")
        written.write_text(mark)
        written.rename(file.with_suffix(f".{self.rank}.mark"))
        names = [file.with_suffix(f".{rank}.mark") for rank in range(self.world)]
        deadline = time.monotonic() + PEERS_S
        while not all(name.exists() for name in names) and time.monotonic() < deadline:
            time.sleep(0.01)
        marks = list(dict.fromkeys(name.read_text() for name in names if name.exists()))
        return len(marks), marks.index(mark)

    def _dealt(self, batch: Any, batches: list[list[dict[str, Any]]], start: int, size: int) -> Any:
        """Return a batch with the samples `start` to `start + size` of those that the reference has read."""
        assert self.reference is not None
        taken: list[list[Tensor]] = []
        for stored in batches:
            length = stored[0]["shape"][0]
            low, high = max(0, start), min(length, start + size)
            if low < high:
                taken.append([self.reference.tensor(fact)[low:high] for fact in stored if fact["shape"][0] == length])
            start -= length
        if sum(len(tensors[0]) for tensors in taken) < size:
            # The reference has not come so far.
            return batch
        own = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size]
        same = len({tuple(t.shape[1:] for t in tensors) for tensors in taken}) == 1
        if not same or len(own) != len(taken[0]):
            refuse("the batches of the two programs are unlike in form", "let both read their own, with --own-data")
        values = [torch.cat(column) for column in zip(*taken, strict=True)]
        given = {id(leaf): value.to(leaf.dtype) for leaf, value in zip(own, values, strict=True)}
        return mapped(batch, lambda leaf: given.get(id(leaf), leaf))


def leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in lists and dictionaries."""
    if isinstance(value, MutableMapping):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return lists and dictionaries with each of their leaves changed."""
    if isinstance(value, MutableMapping):
        value = copy.copy(value)
        for key in list(value):
            value[key] = mapped(value[key], change)
        return value
    if isinstance(value, list | tuple):
        inner: Iterable[Any] = [mapped(each, change) for each in value]
        return value._make(inner) if hasattr(value, "_make") else type(value)(inner)
    return change(value)


def user_line() -> str | None:
    """Return the innermost line of the user's own code that is being carried out."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<") and not any(part in name for part in LIBRARIES) and "gptscale_" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def refuse(what: str, fix: str) -> NoReturn:
    """End this process with a line for the starter."""
    (Path(json.loads(os.environ[TASK])["folder"]) / "refused.json").write_text(
        json.dumps([what, "in the program", fix])
    )
    os._exit(2)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around` in the place of a function, which gets it as its first argument."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    setattr(owner, name, wrapped)


_rider: Rider


def begin(torch_module: Any) -> None:
    """Ride in this program, which has just imported torch."""
    global _rider
    _rider = Rider(json.loads(os.environ[TASK]))
    _rider.begin()


def watch_fsdp(module: Any) -> None:
    """Note the norm that FSDP 1 clips by."""

    def clip(run: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
        for parameter in model.parameters():
            _rider.note("before clipping", parameter, parameter.grad, _rider.step)
        _rider.in_clip += 1
        norm = run(model, *args, **options)
        _rider.in_clip -= 1
        _rider.note_norm(norm)
        return norm

    _wrap(module.FullyShardedDataParallel, "clip_grad_norm_", clip)


def watch_deepspeed(module: Any) -> None:
    """Count the steps of DeepSpeed's engine, whose optimizer steps several times in each."""

    def take_model_step(run: Callable[..., Any], engine: Any, *args: Any, **options: Any) -> None:
        _rider.engine = engine
        run(engine, *args, **options)
        if engine.gradient_clipping() and engine.get_global_grad_norm() is not None:
            _rider.note_norm(engine.get_global_grad_norm())
        _rider.end_step(engine)
        _rider.engine = None

    _wrap(module.DeepSpeedEngine, "_take_model_step", take_model_step)
