"""`gptscale bench model`: the package's step between what no step can beat and what one would use instead, in one run.

Ceilings (the step's matrix products alone, copying), ours, the exercise's baseline, and a script written by hand run in turn,
A B C A B C, each in a process of its own; medians over rounds are compared. All train one model from the same weights on the
same batches, and the run ends with an error if their losses differ. The CSV is written as soon as there are figures, so that
one which is cut short leaves what it measured. docs/measurements/bench_model.md defines every figure.
"""

from __future__ import annotations

import importlib.util
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.process.task import run_worker
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.launchers.bench.model.loop_bench import CPU_SHAPE
from gptscale.launchers.bench.shape_options import ShapeOptions, check_bf16, check_file

WORKER = "gptscale.launchers.bench.model.contenders"
CEILINGS = "ceilings"
OURS = ("single", "single_gelu", "single_compiled", "single_gelu_compiled")
FP8 = "single_fp8"  # never the fastest of ours, whatever its time: its products are of another precision
IN_BF16 = ("single_epilogues", FP8)
ON_CUDA = ("single_autotuned", "single_graphs", *IN_BF16)
OTHERS = ("handout", "handout_best", "minimal", "minimal_compiled")
WARMUP_STEPS = 3
COMPARED_STEPS = 10  # rounding grows under AdamW: later losses of equal programs drift apart too
# nats; two programs round bf16 products and sums in different places
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-3}
FP8_TOLERANCE = 3e-2  # float8 has 3 bits of mantissa, 2 in gradients
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class ModelBenchOptions(ShapeOptions):
    """The model, the work, and what to hold it to; on CUDA the defaults are 1.6b, bf16, batch 33, 2 rounds of 25 steps, on a CPU
    hidden 384, 6 layers, 6 heads, sequence 256, vocabulary 50257, fp32, batch 8.
    """

    CPU_SHAPE = CPU_SHAPE
    HIGHEST: ClassVar[Mapping[str, int]] = {**ShapeOptions.HIGHEST, "steps": 10_000, "rounds": 100}

    dtype: Literal["fp32", "bf16"] | None = None
    """Of products; weights and optimizer state are fp32. Default fp32, on CUDA bf16."""
    data: Literal["random", "text"] = "random"
    """random ids, or text: Python's own standard library as bytes (a GPU draws another power on it)."""
    contenders: str = "all"
    """Names with commas between: single, single_gelu, single_compiled, single_gelu_compiled, handout, handout_best, minimal,
    minimal_compiled; on CUDA also single_autotuned, single_graphs, and beside --dtype bf16 single_epilogues, single_fp8. With
    --scale one, by default single."""
    steps: int | None = None
    """Timed steps of each turn; default 4, on CUDA 25."""
    rounds: int | None = None
    """Turns of each contender; default 3, on CUDA 2."""
    scale: Literal["none", "seq", "layers"] = "none"
    """Instead: ours at sequence 256 to 8192, or at 2 to 96 layers, each at the same number of tokens per step."""
    floors: Path | None = None
    """CSV of ratios (name,floor); exit status 1 if one of them is not reached."""
    csv: Path | None = None
    """File for all figures."""
    png: Path | None = None
    """File for the picture."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for word in self.names():
            if word not in OURS + ON_CUDA + OTHERS:
                known = did_you_mean(word, OURS + ON_CUDA + OTHERS)
                raise ConfigError(f"unknown contender {word!r}", "in --contenders", known)
        check_file("--csv", self.csv)
        check_file("--png", self.png)

    def names(self, bench: Bench | None = None) -> list[str]:
        """The contenders chosen, each once; `all` are those that `bench` can have, without it those of every machine."""
        if self.contenders != "all":
            return list(dict.fromkeys(self.contenders.split(",")))
        more = ON_CUDA if bench is not None and bench.device == "cuda" else ()
        return [name for name in OURS + more + OTHERS if name not in IN_BF16 or (bench and bench.precision == "bf16")]


@dataclass(frozen=True)
class Bench:
    """The options, resolved for a device: what every contender is told."""

    gpt: GPTConfig
    batch_size: int
    precision: str
    device: str
    steps: int
    rounds: int
    threads: int
    data: str
    warmup_steps: int = WARMUP_STEPS

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch_size * self.gpt.block_size

    def task(self, contender: str, profile: bool = False) -> dict[str, Any]:
        """What a worker of `contender` is told."""
        return {**asdict(self), "contender": contender, "profile": profile, "activation_checkpointing": "none"}


@dataclass
class Found:
    """One contender over all rounds.

    times_s: of each step, a list per round. losses: of the first round. failure: why there is nothing and will be.
    """

    name: str
    times_s: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    gpu: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def steps_s(self) -> list[float]:
        """All steps of all rounds."""
        return [t for times in self.times_s for t in times]

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)

    def take(self, result: dict[str, Any]) -> None:
        """Add one turn."""
        if result["status"] == "oom":
            self.failure = OUT_OF_MEMORY
            return
        self.times_s.append(result["step_times_s"])
        self.losses = self.losses or result["losses"]
        self.peak_gib = max(self.peak_gib, result["peak_gib"])
        self.gpu = result["gpu"]
        self.parts = result.get("parts", {})


def resolve(options: ModelBenchOptions) -> Bench:
    """The options with this machine's defaults; ConfigError for what it cannot do."""
    cuda, gpt = options.on_cuda(), options.gpt()
    precision = options.dtype or ("bf16" if cuda else "fp32")
    check_bf16(precision, cuda, "fp32")
    if options.data == "text" and gpt.vocab_size < 257:
        raise ConfigError("text needs a vocabulary of 257", "in --vocab-size", "use --vocab-size 257 or --data random")
    if any(name.startswith("handout") for name in options.names()) and not importlib.util.find_spec("transformers"):
        fix = "pip install transformers, or --contenders single,single_compiled,minimal,minimal_compiled"
        raise ConfigError("handout and handout_best need transformers", "in --contenders", fix)
    _check_on_cuda(options.names(), cuda, precision)
    return Bench(
        gpt=gpt,
        batch_size=options.batch_size or (33 if cuda else 8),
        precision=precision,
        device="cuda" if cuda else "cpu",
        steps=options.steps or (25 if cuda else 4),
        rounds=options.rounds or (2 if cuda else 3),
        threads=options.threads,
        data=options.data,
    )


def _check_on_cuda(names: Sequence[str], cuda: bool, precision: str) -> None:
    """ConfigError for contenders that need CUDA or bf16 without it, and for fp8 without anything in bf16 to lay it beside."""
    where = "in --contenders"
    if not cuda and (needing := [name for name in names if name in ON_CUDA]):
        raise ConfigError(f"{', '.join(needing)}: only on a CUDA device", where, "leave out what needs one")
    if precision != "bf16" and (needing := [name for name in names if name in IN_BF16]):
        what = f"{', '.join(needing)}: compared with bf16, not {precision}"
        raise ConfigError(what, where, "use --dtype bf16, or leave it out")
    if list(names) == [FP8]:
        raise ConfigError(f"{FP8} alone has nothing to be compared with", where, "use single_compiled,single_fp8")


def main(argv: Sequence[str]) -> int:
    """Measure, check, print, write."""
    about = "Our step, the exercise's, one written by hand, and what none can beat: in one run."
    options = parse(ModelBenchOptions, argv, prog="gptscale bench model", about=about)
    if options.scale != "none" and options.contenders == "all":
        options = replace(options, contenders="single")
    bench = resolve(options)
    command = "gptscale bench model " + shlex.join(argv)
    if options.scale != "none":
        from gptscale.launchers.bench.model.scale import scale

        return scale(options, bench, command)
    from gptscale.launchers.bench.model.floors import check_floors, read_floors
    from gptscale.launchers.bench.model.report import Report

    names = options.names(bench)
    floors = read_floors(options.floors, names) if options.floors else []

    def save(found: list[Found], ceilings: list[dict[str, Any]]) -> None:
        if options.csv:
            Report(bench, found, ceilings, command).write_csv(options.csv)

    found, ceilings = measure(bench, names, save)
    report = Report(bench, found, ceilings, command)
    report.show()
    report.write(options.csv, options.png)
    check_losses(report.found, LOSS_TOLERANCE[bench.precision])  # behind the figures: they took minutes
    broken = any(f.failure not in ("", OUT_OF_MEMORY) for f in found)
    return max(check_floors(report.ratios(), floors), int(broken))


def measure(
    bench: Bench, names: Sequence[str], save: Callable[[list[Found], list[dict[str, Any]]], None]
) -> tuple[list[Found], list[dict[str, Any]]]:
    """All contenders and the ceilings, in turn; one that fails is told of, and not tried again. `save` whenever comparable."""
    found: list[Found] = [Found(name) for name in names]
    ceilings: list[dict[str, Any]] = []
    for turn in range(bench.rounds):
        tell(f"round {turn + 1} of {bench.rounds}: {CEILINGS}")
        ceilings.append(run_worker(WORKER, bench.task(CEILINGS)))
        if ceilings[-1]["status"] == "oom":
            raise GptscaleError("the matrix products alone do not fit", "on this device", "use a smaller --batch-size")
        for contender in (f for f in found if not f.failure):
            tell(f"round {turn + 1} of {bench.rounds}: {contender.name}")
            profile = turn + 1 == bench.rounds and contender.name in OURS + ON_CUDA and contender.name != FP8
            try:
                contender.take(run_worker(WORKER, bench.task(contender.name, profile)))
            except GptscaleError as error:  # hours of other figures may depend on it; the exit status is 1
                contender.failure = error.what
                tell(f"gptscale: error: {error}")
            if comparable(found, rounds=turn + 1):
                save(found, ceilings)
    return found, ceilings


def comparable(found: Sequence[Found], rounds: int) -> bool:
    """Whether all that ran have had a turn in each of `rounds`, something other than fp8 among them."""
    turns = {f.name: len(f.times_s) for f in found if f.times_s and not f.failure}
    return set(turns.values()) == {rounds} and set(turns) != {FP8}


def check_losses(found: Sequence[Found], tolerance: float) -> None:
    """GptscaleError unless all contenders had the same losses: a comparison of different work says nothing."""
    for what in differing(found, tolerance).values():
        raise GptscaleError(what, "in bench model", "compare equal work only")


def differing(found: Sequence[Found], tolerance: float) -> dict[str, str]:
    """The contenders that had other losses than the first of them, and which."""
    differences: dict[str, str] = {}
    ordered = sorted(found, key=lambda f: f.name == FP8)  # fp8 last, since it is no measure of the others
    for other in ordered[1:]:
        limit = FP8_TOLERANCE if other.name == FP8 else tolerance
        pairs = zip(ordered[0].losses[:COMPARED_STEPS], other.losses[:COMPARED_STEPS], strict=True)
        for step, (a, b) in enumerate(pairs, start=1):
            if not abs(a - b) <= limit:  # NaN is no agreement
                what = f"step {step} has loss {b:.6f} in {other.name} and {a:.6f} in {ordered[0].name}"
                differences.setdefault(other.name, f"{what}: more than {limit:g} apart")
    return differences


def tell(line: str) -> None:
    """Progress, out of the way of the result."""
    print(line, file=sys.stderr, flush=True)
