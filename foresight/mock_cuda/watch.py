"""The steps of a program on mocked GPUs, and the owner of each of its allocations.

The program reads a copy of this file (on_path.py) in an environment without gptscale. So it imports torch alone. All that it sees
is left in the starter's folder: report.json, events.bin and calls.tsv.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import sys
import time
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import compress, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

# The task of a simulated program, as JSON, which its starter (foresight/simulate/program.py) writes.
TASK = "GPTSCALE_SIMULATED_PROGRAM"
# The file that the program of a recipe (foresight/simulate/recipe_program.py) adds to the report.
RECIPE_FACTS = "recipe.json"
# NCCL's watchdog lets go of the tensors of finished collectives ten times a second. A step on a GPU is longer than that.
WATCHDOG_S = 0.25
# They lie beside this file, whose name differs in a program.
record, experts, stand_ins = (
    importlib.import_module(f"{__name__.removesuffix('watch')}{name}") for name in ("record", "experts", "stand_ins")
)
# More than three steps make: 48 layers allocate some 3,000 blocks for each micro-batch.
ENTRIES_MAX = 10_000_000

PARAMETER, GRADIENT, STATE = "parameter", "gradient", "optimizer state"
GATHERED, BUCKET = "gathered shard", "bucket"
# parts of a step
BUILD, FORWARD, BACKWARD, OPTIMIZER = PARTS = "build", "forward", "backward", "optimizer"
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
WRAPPERS = re.compile(r"(module|_fsdp_wrapped_module|_orig_mod|_forward_module|_checkpoint_wrapped_module)\.")
# How deep the tensors of an optimizer lie in its lists and dictionaries.
DEPTH = 4


class Owners:
    """The owner of each allocation.

    The module at work and the part of the step are noted as it is made. Whether a storage is a parameter, a gradient, a moment or
    a gathered weight is looked up where torch has it: when a model first runs, around each optimizer step, and at the end.
    Times are counts of events: each is a block taken from torch's allocator or given back to it.

    places: the part and the module for each number in the log. labels: (time, address, what) of storages that were recognised.
    marks: (time, part) where a part begins. steps: the time when each step begins.
    """

    def __init__(self) -> None:
        self.places: list[tuple[str, str]] = []
        self.labels: list[tuple[int, int, str]] = []
        self.marks: list[tuple[int, str]] = []
        self.steps: list[int] = []
        self.resting = False
        self._before = 0
        self._changes: list[tuple[int, int]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._names: dict[int, str] = {}
        self._models: list[weakref.ref[nn.Module]] = []
        self._is_parameter: set[int] = set()
        self._outer: list[tuple[str, list[str]]] = []
        self._part, self._modules = BUILD, list[str]()
        self._tell()

    def begin(self) -> None:
        """Log every allocation from when the program first uses a device, and note modules and backward passes."""
        record_history = torch.cuda.memory._record_memory_history
        torch.cuda._lazy_call(lambda: record_history("all", context=None, stacks="python", max_entries=ENTRIES_MAX))
        register_module_forward_pre_hook(self._enter_module)
        register_module_forward_hook(self._leave_module, always_call=True)
        stand_ins.wrap(torch.autograd, "_engine_run_backward", self._backward)

    def _backward(self, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.enter(BACKWARD)
        try:
            return run(*arguments, **options)
        finally:
            self.leave()
            self._label_gradients([p for model in self._alive() for p in model.parameters()])

    @property
    def part(self) -> int:
        """Return the number of the part that the program is in."""
        return PARTS.index(self._part)

    def now(self) -> int:
        """Return the number of events so far."""
        if not torch.cuda.is_initialized():
            return 0
        blocks = vars(torch._C)["_cuda_memoryStats"](torch.cuda.current_device())["allocation"]["all"]
        return int(blocks["allocated"] + blocks["freed"]) - self._before

    def counts_restart(self) -> None:
        """Keep the number of events, which torch is about to set to 0."""
        self._before = -self.now()

    def enter(self, part: str) -> None:
        """Note that a part of the step begins."""
        self._outer.append((self._part, self._modules))
        self._set(part, [])

    def leave(self) -> None:
        """Note that the part ends, and that the one around it goes on."""
        if self._outer:
            self._set(*self._outer.pop())

    def _set(self, part: str, modules: list[str]) -> None:
        self._part, self._modules = part, modules
        if not self.resting:
            self.marks.append((self.now(), part))
            self._tell()

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        # A compiled block is one piece: this would be compiled into it.
        if torch.compiler.is_compiling() or self.resting:
            return
        if not self._modules and id(module) not in self._names:
            self._meet(module)
        if not self._modules and self._part == OPTIMIZER:
            # It is called by a closure of the optimizer's step, as Lightning has it.
            self.enter(FORWARD)
        self._modules.append(self._names.get(id(module), type(module).__name__))
        # Gathered weights of this module stand in the place of its shards.
        places = {address(p) for p in module._parameters.values() if p is not None}
        self._label(places - self._is_parameter, GATHERED)
        self._tell()

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or self.resting:
            return
        del self._modules[-1:]
        if not self._modules and self._outer and (self._part, self._outer[-1][0]) == (FORWARD, OPTIMIZER):
            self.leave()
        self._tell()

    def _meet(self, model: nn.Module) -> None:
        """Learn the names and parameters of a model that runs for the first time."""
        for name, module in model.named_modules():
            self._names.setdefault(id(module), WRAPPERS.sub("", f"{name}.").removesuffix(".") or type(module).__name__)
        if next(model.parameters(), None) is None:
            return
        self._models.append(weakref.ref(model))
        self.label_all()
        if not self.steps:
            self.steps.append(self.now())
            self._set(FORWARD, [])

    def _alive(self) -> list[nn.Module]:
        return [model for reference in self._models if (model := reference()) is not None]

    def label_all(self) -> None:
        """Recognise the parameters, and what optimizers hold beside them."""
        parameters = {address(p) for model in self._alive() for p in model.parameters()}
        self._is_parameter |= parameters
        self._label(parameters, PARAMETER)
        states: set[int] = set()
        for optimizer in living(lambda kind: issubclass(kind, torch.optim.Optimizer)):
            states |= {address(p) for group in optimizer.param_groups for p in group["params"]}
            states |= {address(t) for t in tensors_in(optimizer.state)}
        self._label(states - parameters, STATE)
        for tensor, what in library_tensors():
            if (place := address(tensor)) not in parameters | states:
                self._label([place], what)

    def label_optimizer(self, optimizer: Any) -> None:
        """Recognise the gradients that an optimizer uses, and the state that it has made so far."""
        self._label_gradients([p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]])
        state = {address(t) for t in tensors_in(getattr(optimizer, "state", None))}
        self._label(state - self._is_parameter, STATE)

    def _label_gradients(self, parameters: Iterable[Any]) -> None:
        if not self.resting:
            # Megatron-core sums gradients in main_grad.
            grads = (g for p in parameters for g in (p.grad, getattr(p, "main_grad", None)) if g is not None)
            self._label({address(g) for g in grads}, GRADIENT)

    def _label(self, addresses: Iterable[int], what: str) -> None:
        places = [*filter(None, addresses)]
        # To ask for the time takes as long as some operations.
        now = self.now() if places else 0
        self.labels += [(now, place, what) for place in places]

    def _tell(self) -> None:
        place = (self._part, self._modules[-1] if self._modules else "")
        if place not in self._numbers:
            self._numbers[place] = len(self.places)
            self.places.append(place)
        self._changes.append((self.now(), self._numbers[place]))

    def events(self) -> array[int]:
        """Return the log: the address, the bytes (negative where freed) and the number of the place of each event in turn."""
        traces = torch.cuda.memory._snapshot()["device_traces"]
        signs = {"alloc": 1, "free_completed": -1}
        blocks = [e for e in traces[torch.cuda.current_device()] if e["action"] in signs] if traces else []
        begins = [begin for begin, _ in self._changes]
        log = array("q")
        for time_, e in enumerate(blocks):
            place = self._changes[bisect_right(begins, time_) - 1][1]
            log.extend((e["addr"], signs[e["action"]] * e["size"], place))
        return log


def address(tensor: Tensor) -> int:
    """Return where a tensor's storage on a device begins, or 0 if it has none. Of a DTensor it is that of its shard."""
    own = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(own.untyped_storage().data_ptr()) if own.is_cuda else 0
    except (RuntimeError, TypeError, AttributeError):
        # It is a library's stand-in for a tensor.
        return 0


def living(wanted: Callable[[type], object]) -> list[Any]:
    """Return all living objects of the types for which `wanted` returns true."""
    # There are half a million objects of some thousand types: each type is asked once, and all loops are in C.
    objects = gc.get_objects()
    numbers = [*map(id, map(type, objects))]
    kinds = dict(zip(numbers, map(type, objects), strict=True))
    chosen = {number for number, kind in kinds.items() if wanted(kind)}
    return [*compress(objects, map(chosen.__contains__, numbers))]


def library_tensors() -> Iterator[tuple[Tensor, str]]:
    """Yield what libraries' optimizers hold beside torch's: flat gradients, buckets, weights in half precision.

    They lie in attributes whose names say what they are.
    """
    for holder in living(lambda kind: OPTIMIZERS.match(f"{kind.__module__} {kind.__name__}")):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            label = next((label for pattern, label in NAMES if pattern.search(name.lower())), None)
            if label is not None:
                yield from zip(tensors_in(value), repeat(label))


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in lists and dictionaries, and in objects of the libraries, at most `depth` deep."""
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif str(type(value).__module__).startswith(LIBRARIES):
        inner = vars(value).values() if hasattr(value, "__dict__") else ()
    for part in list(inner) if depth else ():
        yield from tensors_in(part, depth - 1)


class ProgramWatch:
    """It counts the steps of a program and leaves a report of its memory, after which the program ends, unless it may go on.

    A step ends with the call of an optimizer's step(), of whatever optimizer of torch.optim. Of several optimizers each has to
    come to the last step. Where DeepSpeed's engine steps, only its own steps count.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.owners = Owners()
        self.steps: dict[int, int] = {}
        # It keeps them, so that none has the number of another.
        self.optimizers: list[Any] = []
        self.in_engine = self.reported = False
        self.intervals: list[dict[str, int]] = []
        self.refused_bytes: list[int] = []
        self.error = ""
        self.mock = ctypes.CDLL(None)
        self.recorder = record.OperationRecorder(self.mock, lambda: self.owners.part)
        self.recording = self.capturing = False
        self.experts = record.push(experts.BalancedExperts()) if task["balanced_experts"] else None
        self.host_s: list[float] = []
        self._step_began = (0.0, 0.0)
        self.mock.mock_list.argtypes = self.mock.mock_mark.argtypes = [ctypes.c_char_p]
        for name in ("mock_peak_bytes", "mock_pinned_peak_bytes", "mock_host_peak_bytes"):
            getattr(self.mock, name).restype = ctypes.c_size_t

    def take(self, task: dict[str, Any]) -> None:
        """Report for a task: before or after a fork, and before the program computes."""
        self.folder, self.last_step, self.ends = Path(task["folder"]), int(task["steps"]), task["ends"]
        self.mock.mock_list(str(self.folder / "calls.tsv").encode() if task["folder"] else None)
        if task["share"] and self.mock.mock_share_host_memory():
            raise OSError("no address space for the host memory of a simulated rank")

    def begin(self) -> None:
        """Hang it into torch, whose own functions tell it what happens."""
        from torch.optim import optimizer

        self.owners.begin()
        self.mock.mock_watch_allocator()
        optimizer.register_optimizer_step_pre_hook(lambda optimizer, args, options: self.begins(optimizer))
        optimizer.register_optimizer_step_post_hook(lambda optimizer, args, options: self.stepped(optimizer))
        for name, tell in (
            ("_cuda_resetPeakMemoryStats", self._close_interval),
            ("_accelerator_resetPeakStats", self._close_interval),
            ("_cuda_resetAccumulatedMemoryStats", self.owners.counts_restart),
            ("_accelerator_resetAccumulatedStats", self.owners.counts_restart),
        ):
            if hasattr(torch._C, name):
                stand_ins.wrap(torch._C, name, partial(_tell_first, tell))
        stand_ins.wrap(torch.cuda.CUDAGraph, "capture_begin", self._capture_begins)
        stand_ins.wrap(torch.cuda.CUDAGraph, "capture_end", self._capture_ends)
        observe = vars(torch._C)["_cuda_attach_out_of_memory_observer"]
        torch.cuda._lazy_call(lambda: observe(lambda device, asked, *in_use: self.refused_bytes.append(asked)))
        print_error = sys.excepthook

        def note_error(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
            # A stage of torch says on further lines where it failed, and its cause why.
            cause = error.__cause__ if str(error).startswith("\n") and error.__cause__ else error
            self.error = f"{type(cause).__name__}: {cause}".splitlines()[0]
            print_error(kind, error, traceback)
            self._at_exit()

        sys.excepthook = note_error
        atexit.register(self._at_exit)

    def begins(self, optimizer: Any) -> None:
        """Note that an optimizer's step begins, and end the program if it is too much."""
        if self.in_engine or self.reported:
            return
        if self.steps.get(id(optimizer), 0) >= self.last_step:
            self.end()
        self.owners.label_optimizer(optimizer)
        self.owners.enter(OPTIMIZER)

    def stepped(self, optimizer: Any) -> None:
        """Count a step, list the calls of the last, and end the program after it."""
        if self.in_engine or self.reported:
            return
        passed = least_passed(self._step_began)
        self.owners.leave()
        self.owners.label_optimizer(optimizer)
        if id(optimizer) not in self.steps:
            self.optimizers.append(optimizer)
        count = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        if optimizer is self.optimizers[0]:
            if count == self.last_step > 1:
                if self.recording:
                    self.recorder.end()
                self.mock.mock_mark(b"step ends")
            self.host_s.append(passed)
            if dist.is_initialized():
                time.sleep(WATCHDOG_S)
            if count != self.last_step:
                self.owners.steps.append(self.owners.now())
            if count == self.last_step - 1:
                self.mock.mock_listen()
                self.mock.mock_mark(b"step begins")
                self.recording = self.recorder.begin()
            self._step_began = clocks()
        if min(self.steps.values()) >= self.last_step:
            self.end()

    def _capture_begins(self, begin: Callable[..., None], *args: Any, **options: Any) -> None:
        """Record what a CUDA graph captures. Each of its launches runs that."""
        begin(*args, **options)
        self.capturing = not self.recording and self.recorder.begin()

    def _capture_ends(self, end: Callable[..., None], *args: Any, **options: Any) -> None:
        if self.capturing:
            self.recorder.end()
        end(*args, **options)

    def end(self) -> None:
        """Leave the report, and end the process, whatever it has planned, unless it may go on."""
        self._write("its last step")
        if self.ends:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _at_exit(self) -> None:
        if (self.steps or self.refused_bytes or self.error) and not self.reported:
            self._write("its own end")

    def _close_interval(self) -> None:
        if torch.cuda.is_initialized():
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            steps = max(self.steps.values(), default=0)
            self.intervals.append({"steps": steps, "allocated": allocated, "reserved": reserved})

    def _write(self, ended_by: str) -> None:
        self.reported = True
        self._close_interval()
        self.mock.mock_list(None)
        used, owners, events = torch.cuda.is_initialized(), self.owners, 0
        if used:
            owners.label_all()
            with (self.folder / "events.bin").open("wb") as file:
                log = owners.events()
                log.tofile(file)
                events = owners.now()
            torch.cuda.memory._record_memory_history(None)
        owners.resting = True
        device = torch.cuda.current_device() if used else 0
        report = {
            "ended_by": ended_by,
            "steps": max(self.steps.values(), default=0),
            "error": self.error,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if used else None,
            "device_memory": torch.cuda.get_device_properties(device).total_memory if used else 0,
            "rank": int(os.environ.get("RANK", "0")),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "intervals": self.intervals,
            "refused_bytes": self.refused_bytes,
            "taken": self.mock.mock_peak_bytes(device),
            "communicators": self.mock.mock_communicators(),
            "pinned": self.mock.mock_pinned_peak_bytes(),
            "host": self.mock.mock_host_peak_bytes() + _own_bytes(),
            "events": events,
            "step_host_s": self.host_s,
            "recorded": self.last_step,
            "experts": self.experts and self.experts.dealt,
            "owners": {name: getattr(owners, name) for name in ("places", "labels", "marks", "steps")},
        }
        written = self.folder / f"report.{os.getpid()}"
        written.write_text(json.dumps(report))
        written.rename(self.folder / "report.json")


def _tell_first(tell: Callable[[], None], reset: Callable[..., Any], *device: Any) -> Any:
    tell()
    return reset(*device)


def clocks() -> tuple[float, float]:
    """Return the seconds of the wall's clock and of this process, in which it had a processor."""
    return time.monotonic(), time.process_time()


def least_passed(since: tuple[float, float]) -> float:
    """Return the seconds since then, the fewer of both clocks: others may have used the processor."""
    return min(now - then for now, then in zip(clocks(), since, strict=True))


def _own_bytes() -> int:
    """Return the bytes of this process in memory, without what it shares with others and without its files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


watch: ProgramWatch


def begin(torch_module: Any) -> None:
    """Watch this program, which has just imported torch."""
    global watch
    task = json.loads(os.environ[TASK])
    watch = ProgramWatch(task)
    if not task["folder"]:
        # Programs will be forked from this process. Torch's own function would forbid them CUDA.
        setattr(torch._C, "_cuda_getDeviceCount", lambda: int(os.environ["GPTSCALE_MOCK_DEVICES"]))  # noqa: B010
    watch.take(task)
    watch.begin()


def watch_deepspeed(module: Any) -> None:
    """Count the steps of DeepSpeed's engine, whose optimizer steps several times in each."""

    def take_model_step(take: Callable[..., Any], engine: Any, *args: Any, **options: Any) -> None:
        optimizer = getattr(engine, "basic_optimizer", engine)
        watch.begins(optimizer)
        watch.in_engine = True
        take(engine, *args, **options)
        watch.in_engine = False
        watch.stepped(optimizer)

    def has_no_overflow(ask: Callable[..., Any], *args: Any, **options: Any) -> bool:
        ask(*args, **options)
        return False

    stand_ins.wrap(module.DeepSpeedEngine, "_take_model_step", take_model_step)
    # ZeRO takes its step whatever gradients are: they are leftovers of memory.
    for name, optimizer in (("stage_1_and_2", "DeepSpeedZeroOptimizer"), ("stage3", "DeepSpeedZeroOptimizer_Stage3")):
        zero: Any = importlib.import_module(f"deepspeed.runtime.zero.{name}")
        stand_ins.wrap(getattr(zero, optimizer), "has_overflow", has_no_overflow)
        if hasattr(zero, "is_invalid_grad_norm"):
            zero.is_invalid_grad_norm = lambda norm: False
