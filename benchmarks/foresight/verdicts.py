"""Causes put into runs: does `gptscale why` name each, and is what it promises gained when the cause is taken out?

    python -m benchmarks.foresight.verdicts --csv verdicts.csv [--recipes ddp,fsdp] [--causes "slow link,healthy"] [--repeats 3]

Each run with a cause stands between two without it. A row is written when it is measured, on a machine that nobody else uses.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.foresight.programs.slowed import MODULE
from benchmarks.measurement import collect, print_written, tell
from benchmarks.quiet import QuietOptions, taken_since
from gptscale.common.errors import INTERRUPTED_EXIT_STATUS, PREEMPTED_EXIT_STATUS, ConfigError, GptscaleError
from gptscale.common.measure.contention import MachineClock
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.process.fork_server import die_with_parent
from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch
from gptscale.common.settings.checks import check_output_file, check_ranges, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import VERDICT_STEPS_MIN
from gptscale.foresight.verdict.causes import CAUSES
from gptscale.foresight.verdict.judge import Verdict
from gptscale.foresight.verdict.of_run import judge_run
from gptscale.launchers.cli import start

if TYPE_CHECKING:
    import pandas as pd

SHAPE = "--model tiny --data synthetic --no-tensorboard --lr 1e-4"
# A step of some 100 ms. One of larger batches hardly does anything but compute, and one of small micro-batches asks the host.
BATCH = "--n-embd 256 --n-layer 1 --seq-len 128 --global-batch-size"
SMALL = "--n-layer 2 --seq-len 16 --n-embd 64 --global-batch-size 64"
# With many micro-batches of one size there is hardly a bubble, and with two of them it is a third of the step.
STAGES = "--n-embd 256 --n-layer 2 --micro-batch-size 1"
# A cause that takes a smaller share of the step was hardly put into it, and does not count.
COSTS_MIN = 0.2
# Threads of a rank that should have one.
THREADS_TOO_MANY = "32"
# A program beside the run, which keeps a processor busy.
BUSY = "while True: pass"
# A run is started anew so often until nobody disturbs it, and a case until the machine is as fast after it as before.
TRIES, APART_MAX, CASE_TRIES = 5, 0.10, 3


@dataclass(frozen=True)
class Setting:
    """A run. how: what its ranks do to themselves (programs/slowed.py). beside: processors that other programs keep busy."""

    recipe: str
    words: str
    nproc: int = 2
    how: Mapping[str, float] = field(default_factory=dict)
    threads: str = ""
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A cause, the word that a verdict should say ("" for none), the run that has it, and the run without it."""

    cause: str
    word: str
    slow: Setting
    cured: Setting | None = None


def cases() -> Iterator[Case]:
    """Yield every cause in every recipe that can have it. It costs at least as much as the rest of the step."""
    # The words of a step, of a step that only computes, and the seconds that a batch and each exchange take longer.
    for recipe, words, healthy, read_s, link_s in (
        ("ddp", f"{BATCH} 8", f"{BATCH} 64", 0.25, 0.06),
        ("fsdp", f"{BATCH} 8", f"{BATCH} 128", 0.25, 0.012),
        ("zero2", f"{BATCH} 8", f"{BATCH} 128", 0.3, 0.012),
        # On a CPU these sizes are bound by what tensor ranks exchange.
        ("tensor_parallel", f"{BATCH} 8", "", 0.3, 0.012),
        (
            "pipeline",
            f"{STAGES} --seq-len 128 --grad-accum-steps 8",
            f"{STAGES} --seq-len 512 --grad-accum-steps 24",
            0.4,
            0.01,
        ),
    ):
        run, last = Setting(recipe, words), 1
        if healthy:
            yield Case("healthy", "", Setting(recipe, healthy))
        yield from _of_anything(run, read_s, link_s)
        pinned = replace(run, how={"pinned": 1})
        yield Case("slow rank", "communication-bound (late rank)", replace(pinned, beside=(last,)), pinned)
        yield Case("wrong threads", "thread-bound", replace(run, threads=THREADS_TOO_MANY), run)
    # Its four ranks share two processors, so that no rank has one of its own.
    stages = f"{STAGES} --seq-len 128 --grad-accum-steps 4 --pp-size 2 --tp-size 2"
    yield from _of_anything(Setting("hybrid_3d", stages, nproc=4), 1.0, 0.005)
    for recipe, more in (("ddp", ""), ("fsdp", " --no-sync-every-micro-batch --no-reshard-after-forward")):
        many, one = (
            Setting(recipe, f"{SMALL}{more} {option} 1") for option in ("--micro-batch-size", "--grad-accum-steps")
        )
        yield Case("small micro-batch", "launch-bound", many, one)
    few, enough = (Setting("pipeline", f"{STAGES} --seq-len 512 --grad-accum-steps {n}") for n in (2, 8))
    yield Case("few micro-batches", "bubble-bound", few, enough)
    files = Setting("zero_infinity", f"{BATCH} 8")
    yield Case("slow disk", "offload-bound (disk)", replace(files, how={"disk_s": 0.15}), files)


def _of_anything(run: Setting, read_s: float, link_s: float) -> Iterator[Case]:
    yield Case("slow reader", "data-bound", replace(run, how={"read_s": read_s}), run)
    yield Case("slow link", "communication-bound (links)", replace(run, how={"link_s": link_s}), run)
    every = tuple(range(len(os.sched_getaffinity(0))))
    yield Case("machine in use", "contended", replace(run, beside=every), run)


@dataclass(frozen=True)
class VerdictOptions(QuietOptions):
    """Which causes in which recipes, and how often."""

    causes: str = "all"
    """Causes with commas between, such as 'slow reader,healthy'."""
    recipes: str = "all"
    """Recipes with commas between."""
    repeats: int = 3
    """Runs of each case."""
    csv: Path | None = None
    """A row for each case and repeat."""

    def __post_init__(self) -> None:
        check_ranges(self, {"repeats": (1, 1000)})
        check_output_file(self.csv, "--csv", "cannot be written")


@dataclass(frozen=True)
class Ran:
    """A run that has ended. token_s: the median seconds of its steps for each token. foreign: what others took of the machine."""

    verdict: Verdict
    token_s: float
    tokens: float
    foreign: float


def rows(options: VerdictOptions) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: what its verdict says, and what it promises beside the runs without the cause."""
    every = [*cases()]
    chosen = every
    for text, name, value in (
        (options.causes, "causes", lambda case: case.cause),
        (options.recipes, "recipes", lambda case: case.slow.recipe),
    ):
        known = list(dict.fromkeys(map(value, every)))
        wanted = known if text == "all" else parse_names(text, known, name.removesuffix("s"), f"--{name}")
        chosen = [case for case in chosen if value(case) in wanted]
    before: tuple[Setting, Ran] | None = None
    for repeat in range(options.repeats):
        for case in chosen:
            try:
                slow, cured, before = _measured(case, options, before)
            except GptscaleError as error:
                tell(f"{case.slow.recipe}: {case.cause}: {error}")
                continue
            said = slow.verdict.bound_by
            row = {
                "cause": case.cause,
                "recipe": case.slow.recipe,
                "repeat": repeat,
                "expected": case.word,
                "said": said,
            }
            words = [cause.word for cause in CAUSES]
            row |= {
                "right": said == case.word if case.word else said not in words,
                "wrong": said != case.word and said in words,
            }
            row |= {"step_s": slow.verdict.step_s, "spread": slow.verdict.spread, "foreign": slow.foreign}
            row |= dict.fromkeys(("promised_s", "cured_s", "apart", "promised_gain", "gain"), math.nan)
            sized = next((cause for cause in slow.verdict.causes if cause.name == case.word), None)
            if cured and sized:
                remedied_s = slow.verdict.remedied_s if said == case.word else None
                promised_s = sized.without_s if remedied_s is None else remedied_s
                times_s = [run.token_s * slow.tokens for run in cured]
                cured_s = statistics.fmean(times_s)
                row |= {"promised_s": promised_s, "cured_s": cured_s, "apart": (max(times_s) - min(times_s)) / cured_s}
                row |= {
                    "promised_gain": 1 - promised_s / slow.verdict.step_s,
                    "gain": 1 - cured_s / slow.verdict.step_s,
                }
            tell(f"{case.slow.recipe}: {case.cause}: {slow.verdict.line()[:110]}")
            yield row


def _measured(
    case: Case, options: VerdictOptions, before: tuple[Setting, Ran] | None
) -> tuple[Ran, list[Ran], tuple[Setting, Ran] | None]:
    """Return the run of a case, those without its cause before and after it, and the last of these for the next case."""
    if case.cured is None:
        return _quiet_run(case.slow, options), [], before
    for _ in range(CASE_TRIES):
        first = before[1] if before and before[0] == case.cured else _quiet_run(case.cured, options)
        slow, last = _quiet_run(case.slow, options), _quiet_run(case.cured, options)
        before = case.cured, last
        if abs(first.token_s - last.token_s) <= APART_MAX * min(first.token_s, last.token_s):
            break
        tell(f"... {first.token_s / last.token_s - 1:+.0%} before and after {case.cause}")
    return slow, [first, last], before


def _quiet_run(setting: Setting, options: VerdictOptions) -> Ran:
    for _ in range(TRIES):
        ran = run(setting)
        if options.allow_busy or ran.foreign <= TAKEN_MAX:
            return ran
        tell(f"... again, since other programs took {ran.foreign:.0%} of the machine")
    raise ConfigError(f"the machine stays busy in {TRIES} tries", "in this bench", "call again, or with --allow-busy")


def run(setting: Setting) -> Ran:
    """Run a setting in a folder of its own, and judge it. Raises GptscaleError if it fails."""
    import pandas as pd

    with tempfile.TemporaryDirectory(prefix="gptscale-verdict-") as out:
        words = f"{SHAPE} {setting.words} --steps {VERDICT_STEPS_MIN} --out {out} --run-name run".split()
        if setting.recipe == "zero_infinity":
            Path(out, "nvme").mkdir()
            words += ["--nvme-path", str(Path(out, "nvme"))]
        program = Program(MODULE, (json.dumps([setting.recipe, words, dict(setting.how)]),))
        environment = {"OMP_NUM_THREADS": setting.threads} if setting.threads else {}
        clock = MachineClock(threads=len(os.sched_getaffinity(0)))
        with _programs_beside(setting.beside), Path(out, "log").open("w") as log, _printing_to(log):
            status = launch(program, setting.nproc, environment=environment, fork=False)
        foreign = taken_since(clock)
        if status in (INTERRUPTED_EXIT_STATUS, PREEMPTED_EXIT_STATUS):
            raise KeyboardInterrupt
        if status:
            raise GptscaleError(Path(out, "log").read_text()[-300:], "in its run", "see gptscale doctor")
        verdict = judge_run(Path(out, "runs", "run"))
        row = pd.read_csv(Path(out, "summary.csv")).iloc[-1]
        tokens = row.tokens_total / row.steps
        return Ran(verdict, row.step_time_s_median / tokens, tokens, foreign)


@contextmanager
def _printing_to(log: Any) -> Iterator[None]:
    """Let ranks print to a file."""
    kept = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    try:
        yield
    finally:
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)


@contextmanager
def _programs_beside(cpus: Sequence[int]) -> Iterator[None]:
    """Keep these processors busy, each by a program of its own that ends with this one."""
    usable = sorted(os.sched_getaffinity(0))
    programs = [subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=die_with_parent) for _ in cpus]
    try:
        for cpu, program in zip(cpus, programs, strict=True):
            os.sched_setaffinity(program.pid, {usable[cpu % len(usable)]})
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main(argv: Sequence[str]) -> int:
    """Run the cases, print how often words and promises were right, and return 1 if nothing ran."""
    options = parse(
        VerdictOptions, argv, prog="python -m benchmarks.foresight.verdicts", about="Verdicts on injected causes."
    )
    os.environ.pop("OMP_NUM_THREADS", None)
    frame = collect(rows(options), options.csv)
    print_written(options.csv)
    if frame.empty:
        return 1
    show(frame)
    return 0


def show(frame: pd.DataFrame) -> None:
    """Print for each cause, and in all, how often the word was right and how far promised gains are off."""
    weak = frame.gain < COSTS_MIN
    for _, row in frame[weak].iterrows():
        print(f"not counted: {row.cause} costs {row.recipe} {row.gain:.0%}, and it said {row.said}")
    frame = frame[~weak].assign(off=(frame.promised_gain / frame.gain - 1).abs())
    for cause, of_cause in [*frame.groupby("cause", sort=False), ("all", frame)]:
        off = of_cause.off.dropna()
        gains = (
            f"; gains {off.median():.1%} off in the median, 95 % within {off.quantile(0.95):.1%}" if len(off) else ""
        )
        print(f"{cause}: {of_cause.right.sum()} of {len(of_cause)} right, {of_cause.wrong.sum()} wrong{gains}")


if __name__ == "__main__":
    sys.exit(start(main))
