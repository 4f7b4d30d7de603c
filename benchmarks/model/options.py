"""The data of `python -m benchmarks.model`: its options, its contenders, their results, and when these are comparable."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from benchmarks.shape_options import ShapeOptions, check_bf16
from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.settings.checks import check_output_file, parse_names
from gptscale.common.settings.gpt_config import GPTConfig

# the default model on a CPU: small enough to run, with GPT-2's vocabulary
CPU_SHAPE = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=50257)
WORKER = "benchmarks.model.worker"
CEILINGS = "ceilings"
OF_THIS_PACKAGE = ("single", "single_gelu", "single_compiled", "single_gelu_compiled")
# never the fastest of ours, whatever its time, because its products are of another precision
FP8 = "single_fp8"
ON_CUDA = ("single_autotuned", "single_graphs", FP8)
OTHERS = ("handout", "handout_best", "minimal", "minimal_compiled")
WARMUP_STEPS = 3
# rounding errors grow under AdamW, so that later losses of equal programs drift apart too
COMPARED_STEPS = 10
# in nats: two programs round bf16 products and sums in different places
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-3}
# float8 has 3 bits of mantissa, and 2 in gradients
FP8_TOLERANCE = 3e-2
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class ModelBenchOptions(ShapeOptions):
    """The model, the work, and what to hold it to.

    On CUDA the defaults are 1.6b, bf16, batch 33, 2 rounds of 25 steps. On a CPU they are hidden 384, 6 layers, 6 heads,
    sequence 256, vocabulary 50257, fp32, batch 8.
    """

    CPU_SHAPE = CPU_SHAPE
    HIGHEST: ClassVar[Mapping[str, int]] = {**ShapeOptions.HIGHEST, "steps": 10_000, "rounds": 100}

    dtype: Literal["fp32", "bf16"] | None = None
    """Of products; weights and optimizer state are fp32. Default fp32, on CUDA bf16."""
    data: Literal["random", "text"] = "random"
    """random ids, or text: Python's own standard library as bytes (a GPU draws another power on it)."""
    contenders: str = "all"
    """Names with commas between: single, single_gelu, single_compiled, single_gelu_compiled, handout, handout_best, minimal,
    minimal_compiled; on CUDA also single_autotuned, single_graphs, and beside --dtype bf16 single_fp8.
    With --scale one, by default single."""
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
        if self.contenders != "all":
            parse_names(self.contenders, OF_THIS_PACKAGE + ON_CUDA + OTHERS, "contender", "--contenders")
        check_output_file(self.csv, "--csv", "cannot be written")
        check_output_file(self.png, "--png", "cannot be written")

    def names(self, bench: Bench | None = None) -> list[str]:
        """Return the names of the chosen contenders, each once.

        `all` means those that `bench` can have, and without `bench` those of every machine.
        """
        if self.contenders != "all":
            return list(dict.fromkeys(self.contenders.split(",")))
        on_cuda = ON_CUDA if bench is not None and bench.device == "cuda" else ()
        in_bf16 = bench is not None and bench.precision == "bf16"
        return [name for name in OF_THIS_PACKAGE + on_cuda + OTHERS if in_bf16 or name != FP8]


@dataclass(frozen=True)
class Bench:
    """The options resolved for a device, as every contender gets them."""

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
        """Return the tokens of one step."""
        return self.batch_size * self.gpt.block_size

    def task(self, contender: str, profile: bool = False) -> dict[str, Any]:
        """Return the task for a worker process that runs `contender`."""
        return {**asdict(self), "contender": contender, "profile": profile}


@dataclass
class ContenderResult:
    """What one contender measured in all rounds.

    times_s: seconds of each step, a list per round. losses: of the first round, in nats. failure: why the contender has no
    result and is not tried again.
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
        """Return the seconds of all steps of all rounds."""
        return [seconds for times in self.times_s for seconds in times]

    @property
    def median_s(self) -> float:
        """Return the median seconds of a step over all rounds."""
        return statistics.median(self.steps_s)

    def add_turn(self, turn: dict[str, Any]) -> None:
        """Add the result of one turn, as the worker process returned it."""
        if turn["status"] == "oom":
            self.failure = OUT_OF_MEMORY
            return
        self.times_s.append(turn["step_times_s"])
        self.losses = self.losses or turn["losses"]
        self.peak_gib = max(self.peak_gib, turn["peak_gib"])
        self.gpu = turn["gpu"]
        self.parts = turn.get("parts", {})


def resolve(options: ModelBenchOptions) -> Bench:
    """Return the options with this machine's defaults, or raise ConfigError for what it cannot do."""
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
    """Raise ConfigError for contenders that lack CUDA or bf16, and for fp8 without a contender in bf16 beside it."""
    where = "in --contenders"
    lacking_cuda = [] if cuda else [name for name in names if name in ON_CUDA]
    if lacking_cuda:
        raise ConfigError(f"{', '.join(lacking_cuda)}: only on a CUDA device", where, "leave out what needs one")
    if FP8 in names and precision != "bf16":
        raise ConfigError(f"{FP8}: compared with bf16, not {precision}", where, "use --dtype bf16, or leave it out")
    if list(names) == [FP8]:
        raise ConfigError(f"{FP8} alone has nothing to be compared with", where, "use single_compiled,single_fp8")


def comparable(results: Sequence[ContenderResult], rounds: int) -> bool:
    """Return whether all that ran had a turn in each of `rounds`, and at least one of them is not fp8."""
    turns = {result.name: len(result.times_s) for result in results if result.times_s and not result.failure}
    return set(turns.values()) == {rounds} and set(turns) != {FP8}


def check_losses(results: Sequence[ContenderResult], tolerance: float) -> None:
    """Raise GptscaleError unless all contenders had the same losses: a comparison of different work says nothing."""
    for difference in differing(results, tolerance).values():
        raise GptscaleError(difference, "in benchmarks.model", "compare equal work only")


def differing(results: Sequence[ContenderResult], tolerance: float) -> dict[str, str]:
    """Return the contenders whose losses differ from those of the first one, each with its first difference in words.

    tolerance: in nats, for all but fp8. fp8 is compared last, because the others must not be measured by it.
    """
    differences: dict[str, str] = {}
    ordered = sorted(results, key=lambda result: result.name == FP8)
    for other in ordered[1:]:
        first = ordered[0]
        limit = FP8_TOLERANCE if other.name == FP8 else tolerance
        pairs = zip(first.losses[:COMPARED_STEPS], other.losses[:COMPARED_STEPS], strict=True)
        for step, (expected, loss) in enumerate(pairs, start=1):
            # a comparison with NaN is false, so NaN counts as a difference
            agrees = abs(expected - loss) <= limit
            if not agrees:
                what = f"step {step} has loss {loss:.6f} in {other.name} and {expected:.6f} in {first.name}"
                differences.setdefault(other.name, f"{what}: more than {limit:g} apart")
    return differences
