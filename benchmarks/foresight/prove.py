"""Programs with a planted bug, and healthy ones, under `gptscale prove`: how many are caught, named, and wrongly accused?

    python -m benchmarks.foresight.prove [--only WORD] [--variants N] [--healthy N]

One program (tests/foresight/prove/programs/train.py) is split by many engines, with bugs that somebody reported. Its ranks are
forked off one process that has imported torch and the engines, so that a mutant takes seconds. What notes and compares its values
is what the command uses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.settings.command_line import parse
from gptscale.foresight.prove import program
from gptscale.foresight.prove.causes import finding
from gptscale.foresight.prove.compare import Proof
from gptscale.foresight.prove.program import Recording
from gptscale.launchers.cli import start

PROGRAM = Path(__file__).parents[2] / "tests/foresight/prove/programs/train.py"
SERVER = Path(__file__).with_name("prove_ranks.py")
STEPS = 3
# The bugs that can be planted under each engine, of two ranks or @4, and those that need gradients to be clipped.
EVERYWHERE = "late-clear same-batch padding not-held rate"
BUGS = {
    "plain": f"{EVERYWHERE} zero accumulation no-reduce sum divided-twice wrong-group skipped stale no-broadcast",
    "ddp": f"{EVERYWHERE} zero accumulation no-reduce",
    "fsdp2": f"{EVERYWHERE} zero accumulation sum",
    "fsdp1": "late-clear same-batch padding rate accumulation",
    "accelerate": f"{EVERYWHERE} accumulation",
    "fabric": EVERYWHERE,
    "zero2": "same-batch padding not-held sum",
    "zero3": "same-batch padding sum",
    "tensor": "half-zero late-clear not-held rate zero",
    "pipeline": "tied not-held",
    "trainer": "late-clear padding not-held rate zero accumulation",
    "lightning": f"{EVERYWHERE} zero accumulation",
    "sharded": "late-clear same-batch padding rate accumulation no-reduce",
    "redundancy": "late-clear same-batch padding rate",
    "plain@4": f"{EVERYWHERE} no-reduce sum divided-twice wrong-group stale",
    "ddp@4": f"{EVERYWHERE} zero no-reduce",
    "fsdp2@4": "same-batch padding rate zero sum",
    "zero3@4": "same-batch padding sum",
    "tensor@4": "half-zero late-clear rate",
}
CLIPPED = {
    "plain": "norm-by-root norm-omits drift",
    "ddp": "norm-by-root norm-omits drift",
    "fsdp2": "local-norm norm-by-root norm-omits",
    "tensor": "local-norm",
    "plain@4": "norm-by-root drift",
    "fsdp2@4": "local-norm norm-by-root norm-omits",
}
# The causes by which a bug is named.
CAUSES = {
    "no-reduce": "no reduction",
    "sum": "sum for mean",
    "divided-twice": "divided twice",
    "wrong-group": "no reduction",
    "local-norm": "norm of a shard",
    "norm-by-root": "norm by root",
    "norm-omits": "norm omits",
    "tied": "tied weight",
    "late-clear": "late clear",
    "same-batch": "same batch",
    "skipped": "no reduction",
    "half-zero": "zero",
    "not-held": "not held",
    "no-broadcast": "no broadcast",
    "drift": "clipped otherwise",
}
# Where the update comes before the exchange, each rank has its own part.
ALSO = {"stale": "no reduction"}
VARIANTS = (
    *("", "--optimizer SGD", "--tie", "--seed 1 --freeze", "--accumulate 2", "--two", "--bf16", "--clip 0.5", "--pad"),
    *("--seed 2 --optimizer Adagrad", "--pad --accumulate 2 --optimizer RMSprop", "--seed 3 --clip 0.5", "--compile"),
)


class Forks:
    """A server (prove_ranks.py) that forks the ranks of the program."""

    def __init__(self, folder: Path, task: program.ProveTask | None = None) -> None:
        command = [sys.executable, str(SERVER), str(PROGRAM)]
        self.folder, self.task = folder, task or program.ProveTask(command, STEPS, 10**5)
        environ = program.environment(self.task, folder)
        self.process = subprocess.Popen(
            self.task.command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        )

    def record(self, name: str, reference: str | None, ranks: int, words: str) -> Recording:
        """Return what a program noted. Raises RuntimeError if it did not make its steps."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        folder = self.folder / name
        task = [str(folder), str(self.folder / reference) if reference else None, ranks, words.split()]
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        statuses = self.process.stdout.readline()
        if (refused := folder / "refused.json").exists():
            raise RuntimeError(refused.read_text())
        if not program.all_done(folder):
            log = max(folder.glob("log.*"), key=lambda file: file.stat().st_size).read_text()
            raise RuntimeError(f"{statuses.strip()} {log.strip().splitlines()[-1:]}")
        return Recording(folder, False)

    def candidate(self, name: str, reference: Recording, engine: str, words: str, bug: str) -> Recording:
        """Return what the ranks of an engine noted, as many as it has behind an @, or two."""
        engine, _, ranks = engine.partition("@")
        # Ranks that split no batch read all of it.
        batch = 8 if engine in ("tensor", "pipeline") else 8 // int(ranks or 2)
        own = f"{words} --engine {engine} --batch {batch}" + (f" --bug {bug}" if bug else "")
        return self.record(name, reference.folder.name, int(ranks or 2), own)


@dataclass(frozen=True)
class MutantOptions:
    """Which mutants."""

    only: str = ""
    """Words with commas between, of which their names hold one."""
    variants: int = 3
    """How many ways to vary each: the first is the plain program."""
    healthy: int = len(VARIANTS)
    """How many ways to vary a program without a bug."""


def cases(variants: int, right: int = len(VARIANTS)) -> Iterator[tuple[str, str, str]]:
    """Yield each program: its engine, its bug or nothing, and further words."""
    for engine, bugs in BUGS.items():
        healthy = [v for v in VARIANTS if works(engine, v)]
        yield from ((engine, "", variant) for variant in healthy[:right])
        for bug in bugs.split():
            words = {"padding": "--pad", "accumulation": "--accumulate 2", "tied": "--tie"}.get(bug, "")
            allowed = [
                v
                for v in healthy
                if "bf16" not in v and not (words and v == words) and not (bug == "not-held" and "freeze" in v)
            ]
            yield from ((engine, bug, f"{words} {variant}".strip()) for variant in allowed[:variants])
        for bug in CLIPPED.get(engine, "").split():
            yield from ((engine, bug, f"--clip {limit}") for limit in (0.05, 0.1)[:variants])


def works(engine: str, variant: str) -> bool:
    """Return whether an engine, or the small program that uses it, has an option."""
    lacks = {
        "fabric": "--two --accumulate --compile",
        "accelerate": "--two --compile",
        "fsdp1": "--two --freeze --clip --compile",
        "fsdp2": "--tie",
        "tensor": "--tie --clip",
        "pipeline": "--freeze --two --accumulate --bf16 --clip --compile",
        "zero2": "--two --bf16 --compile",
        "zero3": "--two --bf16 --tie --compile",
        "trainer": "--two",
        "lightning": "--two --compile",
        "sharded": "--two --compile --clip",
        "redundancy": "--two --accumulate --compile --clip",
    }.get(engine.partition("@")[0], "")
    needs_tie = engine == "pipeline" and "--tie" not in variant
    return not needs_tie and not any(word in variant for word in lacks.split())


def main(argv: Sequence[str]) -> int:
    """Run all programs, print each that was not as it should be, and the shares, and return 1 if a goal is missed."""
    options = parse(MutantOptions, argv, prog="python -m benchmarks.foresight.prove")
    caught = named = mutants = alarms = healthy = failed = 0
    with tempfile.TemporaryDirectory(prefix="gptscale-mutants-") as temporary:
        forks = Forks(Path(temporary))
        references: dict[str, Recording] = {}
        for number, (engine, bug, words) in enumerate(cases(options.variants, options.healthy)):
            name = f"{engine} {bug} {words}".strip()
            if not any(word in f"{name} " for word in options.only.split(",")):
                continue
            try:
                if words not in references:
                    references[words] = forks.record(f"reference-{number}", None, 1, f"{words} --batch 8")
                reference = references[words]
                candidate = forks.candidate(f"{number}", reference, engine, words, bug)
            except RuntimeError as error:
                failed += 1
                print(f"failed   {name}: {error}", flush=True)
                continue
            comparison = Proof(reference, candidate, STEPS, None)
            found = finding(comparison, comparison.differences[0]) if comparison.differences else None
            if bug:
                mutants, caught = mutants + 1, caught + bool(found)
                right = found is not None and found[0] in (CAUSES.get(bug, bug), ALSO.get(bug))
                named += right
            else:
                healthy, alarms = healthy + 1, alarms + bool(found)
                right = not found
            word = "healthy" if not found else "alarm" if not bug else "named" if right else "other"
            word = "missed" if bug and not found else word
            worst = max(value for kind, value in comparison.worst.items() if kind != "loss")
            said = f"{worst:.1e} of {comparison.tolerance:g}"
            if found:
                first = comparison.differences[0]
                said = f"{first.kind} of {first.name} at step {first.step}, {first.unlike} of {first.of}: {found[0]}, {found[1]}"
            print(f"{word:8} {name}: {said}", flush=True)
        forks.process.kill()
    print(f"caught {caught} of {mutants} mutants, named {named}, false alarms {alarms} of {healthy}, failed {failed}")
    return int(caught < 0.99 * mutants or named < 0.9 * mutants or alarms > 0)


if __name__ == "__main__":
    sys.exit(start(main))
