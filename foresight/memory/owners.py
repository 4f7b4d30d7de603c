"""Say to whom each allocation belongs: the module at work and the part of the step when it was made, and what it became.

A part and a module are noted as the allocation is made. What a storage is (a parameter, a gradient, a moment, a gathered
weight) is looked up where the engine has it: after it was built, before each optimizer step, and at the end.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gptscale.common.engine import Engine
from gptscale.common.measure.live_state import tensors_in
from gptscale.common.state import local
from gptscale.foresight.mock_cuda.counter import CudaCounter

PARAMETER, GRADIENT, STATE = "parameter", "gradient", "optimizer state"
GATHERED, BUCKET, LOGITS = "gathered shard", "bucket", "logits and loss"
# parts of a step
BUILD, FORWARD, BACKWARD, OPTIMIZER = "build", "forward", "backward", "optimizer"
# The meaning of an attribute's name in a library's optimizer, the first that matches. "averaged" and "partition" are DeepSpeed's
# words for reduced gradients.
NAMES = (
    (re.compile(r"grad|averaged"), GRADIENT),
    (re.compile(r"ipg|bucket|buffer"), BUCKET),
    (re.compile(r"fp32|single_partition|master|exp_avg"), STATE),
    (re.compile(r"bit16|bf16|fp16|lp_|params"), PARAMETER),
)
LIBRARIES = ("deepspeed", "fairscale", "colossalai")
OPTIMIZERS = re.compile(r"(deepspeed|fairscale|colossalai)\..* \w*(ptimizer|Bucket|Store)\w*$")
WRAPPERS = re.compile(r"(module|_fsdp_wrapped_module|_orig_mod|_forward_module)\.|\b\d+\.(?=blocks\.|ln_f|wte|wpe)")


class Owners:
    """What is known of allocations while they are logged.

    places: for each number that the counter logs, the part of the step and the module. labels: (time, address, what) for
    storages that were recognised. marks: (time, part) where a part of a step begins.
    """

    def __init__(self, counter: CudaCounter) -> None:
        self.counter = counter
        self.places: list[tuple[str, str]] = []
        self.labels: list[tuple[int, int, str]] = []
        self.marks: list[tuple[int, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._names: dict[int, str] = {}
        self._modules: list[str] = []
        self._part = BUILD
        self._resting = False
        self._is_parameter: set[int] = set()
        self._tell()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note modules and backward passes while the body runs."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run_backward(*arguments: Any, **options: Any) -> Any:
            with self.part(BACKWARD):
                return run(*arguments, **options)

        torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
            for hook in hooks:
                hook.remove()

    def rest(self) -> None:
        """Note nothing from now on.

        The hooks may stay: code that was compiled beside them would be compiled again without them.
        """
        self._resting = True

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Note that `part` of the step is at work."""
        if self._resting:
            yield
            return
        before, modules = self._part, self._modules
        self._part, self._modules = part, []
        self.marks.append((self.counter.now(), part))
        self._tell()
        try:
            yield
        finally:
            self._part, self._modules = before, modules
            self.marks.append((self.counter.now(), before))
            self._tell()

    def of_engine(self, engine: Engine) -> None:
        """Name the modules of a built engine, and watch its optimizer's step."""
        if (model := model_of(engine)) is not None:
            self._names = {id(module): plain_name(name) for name, module in model.named_modules()}
        self.label_state(engine)
        stepper: Any = getattr(engine, "optimizer", None)
        if stepper is None:
            return
        step: Callable[..., Any] = stepper.step

        def watched(*arguments: Any, **options: Any) -> Any:
            self.label_gradients(engine)
            with self.part(OPTIMIZER):
                return step(*arguments, **options)

        stepper.step = watched

    def label_state(self, engine: Engine) -> None:
        """Recognise the parameters, and what optimizers hold beside them."""
        parameters = {address(p) for p in _parameters(engine)} - {0}
        self._is_parameter |= parameters
        self._label(parameters, PARAMETER)
        states: set[int] = set()
        for optimizer in living(lambda kind: issubclass(kind, torch.optim.Optimizer)):
            for group in optimizer.param_groups:
                states |= {address(p) for p in group["params"]}
            states |= {address(t) for state in optimizer.state.values() for t in tensors_in(state)}
        self._label(states - parameters - {0}, STATE)
        for tensor, what in library_tensors():
            if (place := address(tensor)) and place not in parameters | states:
                self._label([place], what)

    def label_gradients(self, engine: Engine) -> None:
        """Recognise the gradients that the parameters have now."""
        if self._resting:
            return
        self._label({address(p.grad) for p in _parameters(engine) if p.grad is not None} - {0}, GRADIENT)

    def _label(self, addresses: Iterable[int], what: str) -> None:
        now = self.counter.now()
        self.labels += [(now, place, what) for place in addresses]

    def _enter(self, module: nn.Module, inputs: object) -> None:
        # A compiled block is one piece: this would be compiled into it.
        if torch.compiler.is_compiling() or self._resting:
            return
        self._modules.append(self._names.get(id(module), type(module).__name__))
        # Gathered weights of this module stand in the place of its shards.
        places = {address(p) for p in module._parameters.values() if p is not None}
        self._label(places - self._is_parameter - {0}, GATHERED)
        self._tell()

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or self._resting:
            return
        if self._modules:
            self._modules.pop()
        self._tell()

    def _tell(self) -> None:
        place = (self._part, self._modules[-1] if self._modules else "")
        if place not in self._numbers:
            self._numbers[place] = len(self.places)
            self.places.append(place)
        self.counter.set_owner(self._numbers[place])


def plain_name(name: str) -> str:
    """Return a module's name in the whole model, without the wrappers of a strategy."""
    return WRAPPERS.sub("", name + ".").removesuffix(".")


def address(tensor: Tensor) -> int:
    """Return where a tensor's storage begins, or 0 if it has no memory. Of a DTensor it is that of its shard."""
    own = local(tensor)
    if own.device.type == "meta":
        return 0
    try:
        return int(own.untyped_storage().data_ptr())
    except RuntimeError:
        # It is a library's stand-in for a tensor.
        return 0


def model_of(engine: Engine) -> nn.Module | None:
    """Return the module that an engine trains, in whatever wrapper, or None if it has none of torch's."""
    model: Any = getattr(engine, "model", None) or getattr(engine, "boosted", None)
    return model if isinstance(model, nn.Module) else None


def _parameters(engine: Engine) -> Iterable[Tensor]:
    model = model_of(engine)
    yield from model.parameters() if model is not None else ()


def living(wanted: Callable[[type], object]) -> list[Any]:
    """Return all living objects of the types for which `wanted` returns true."""
    # There are half a million objects of some thousand types: each type is asked once.
    objects = gc.get_objects()
    kinds = {id(type(thing)): type(thing) for thing in objects}
    chosen = {number for number, kind in kinds.items() if wanted(kind)}
    return [thing for thing in objects if id(type(thing)) in chosen]


def library_tensors() -> Iterator[tuple[Tensor, str]]:
    """Yield what libraries' optimizers hold beside torch's: flat gradients, buckets, weights in half precision.

    They lie in attributes whose names say what they are.
    """
    for holder in living(lambda kind: OPTIMIZERS.match(f"{kind.__module__} {kind.__name__}")):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            label = next((label for pattern, label in NAMES if pattern.search(name.lower())), None)
            if label is not None:
                yield from zip(tensors_in(value, LIBRARIES), repeat(label))
