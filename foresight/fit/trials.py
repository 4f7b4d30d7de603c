"""Each program tried: on CPU ranks for its proof, and under the mock of CUDA for its memory and time."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from gptscale.common.errors import GptscaleError
from gptscale.common.settings.checks import parse_names
from gptscale.foresight.fit.options import FitOptions
from gptscale.foresight.fit.splits import Split, splits
from gptscale.foresight.fit.subject import Subject
from gptscale.foresight.fit.write import Choice, program
from gptscale.foresight.memory.timeline import ACTIVATION
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.plan.question import Cluster
from gptscale.foresight.plan.rows import Tried
from gptscale.foresight.plan.trials import RECORDED, tried
from gptscale.foresight.prove.causes import finding
from gptscale.foresight.prove.compare import Proof
from gptscale.foresight.prove.program import ProveTask, Recording, record
from gptscale.foresight.simulate.interpreters import torch_of
from gptscale.foresight.simulate.processes import ProgramError
from gptscale.foresight.simulate.program import ProgramTask
from gptscale.foresight.simulate.simulation import kept_simulation

# Steps, samples and micro-batch of a proof, and what it may take.
STEPS, SAMPLES, MICRO, PROOF_S = 3, 8, 2, 300
SIMULATED_STEPS, SIMULATION_S = 2, 900
LACKS = {
    "blocks": "the model has no block that is repeated",
    "plan": "the model has no tp_plan of colwise and rowwise modules (docs/guides/fit.md)",
}
VALUELESS = """

from gptscale.foresight.fit.twin import without_values

build_with_values = build


def build():
    return without_values(build_with_values)"""


@dataclass(frozen=True)
class FitRow:
    """A split that was tried.

    choice: how its program is started. found: its memory and time at full size, None if it did not run. proved: the CPU ranks on
    which it computed what one process computes. why: the reason if it is left out. lines: of its program.
    """

    name: str
    split: Split
    choice: Choice
    lines: int
    found: Tried | None = None
    proved: tuple[int, ...] = ()
    worst: float = 0.0
    why: str = ""

    @property
    def fits(self) -> bool:
        """Return whether its rank fits into the device."""
        return bool(self.found and self.found.memory and not self.found.memory.is_too_large)


class Trials:
    """The trials of a subject on a cluster. folder: for programs and what they leave."""

    def __init__(self, subject: Subject, cluster: Cluster, folder: Path) -> None:
        self.subject, self.cluster, self.folder = subject, cluster, folder
        self.small = replace(subject, imports=(), definitions=subject.small)
        self.valueless = replace(subject, definitions=subject.definitions + VALUELESS)
        self.reference: Recording | None = None

    def row(self, name: str, split: Split, choice: Choice) -> FitRow:
        """Return a row whose program was not tried."""
        return FitRow(name, split, choice, program(self.subject, split, choice, "train.py").count("\n"))

    def simulated(self, row: FitRow) -> FitRow:
        """Return a row with its memory and time at full size, or why it has none."""
        choice, ranks = row.choice, self.cluster.ranks
        n = choice.global_batch_size * row.split.tensor // (choice.micro_batch_size * ranks)
        written = min(n, RECORDED)
        few = replace(choice, global_batch_size=choice.micro_batch_size * ranks * written // row.split.tensor)
        text = program(self.valueless, row.split, few, "train.py")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            Path(folder, "train.py").write_text(text)
            Path(folder, "left").mkdir()
            command = [sys.executable, "-W", "ignore", "train.py", "--steps", str(SIMULATED_STEPS)]
            task = ProgramTask(
                command,
                ranks,
                "0",
                device_named(self.cluster.device),
                self.cluster.per_node,
                SIMULATED_STEPS,
                SIMULATION_S,
                folder=Path(folder),
                keep=Path(folder, "left"),
                torch_folder=torch_of(sys.executable),
            )
            content = hashlib.sha256(f"{text}{self.subject.sources}".encode()).hexdigest()
            try:
                simulation = kept_simulation(task, content)
                found = tried([simulation], self.cluster, choice.precision, n, written)
            except GptscaleError as error:
                return replace(row, why=f"not simulated: {error.what}")
        why = "" if not found.memory or not found.memory.is_too_large else "does not fit"
        return replace(row, found=found, why=why)

    def prove(self, row: FitRow, ranks: int) -> FitRow:
        """Return a row with the proof on so many CPU ranks, or why there is none."""
        assert self.reference is not None
        try:
            candidate = self._record(row.split, ranks, f"{row.name}-{ranks}".replace(" ", "-"))
        except (ProgramError, GptscaleError) as error:
            return replace(row, why=f"not proved on {ranks} ranks: {error.what}")
        proof = Proof(self.reference, candidate, STEPS, None)
        if proof.differences:
            first = proof.differences[0]
            cause = finding(proof, first)[0]
            return replace(row, why=f"WRONG on {ranks} ranks: {first.kind} of {first.name}, {cause}")
        worst = max(row.worst, proof.worst.get("gradient", 0.0))
        return replace(row, proved=(*row.proved, ranks), worst=worst)

    def begin_proofs(self) -> None:
        """Run the reference of all proofs: one process with all samples. Raises GptscaleError if it fails."""
        self.reference = self._record(splits(1, 1)["single"], 1, "reference")

    def _record(self, split: Split, ranks: int, name: str) -> Recording:
        text = program(self.small, split, Choice(ranks, 1, SAMPLES, MICRO, "fp32", False), "train.py")
        folder = self.folder / name
        folder.mkdir()
        (folder / "train.py").write_text(text)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        reference = self.reference.folder if self.reference else None
        command = [sys.executable, *words, str(folder / "train.py"), "--warmup", "1"]
        task = ProveTask(command, STEPS, PROOF_S, True, reference)
        return record(task, folder / "noted")


def act_bytes(row: FitRow) -> int:
    """Return the bytes of activations and of the loss at the peak."""
    assert row.found is not None
    assert row.found.memory is not None
    timeline = row.found.memory.timeline
    owners = timeline.by_owner(timeline.peak_at)
    return sum(nbytes for owner, nbytes in owners.items() if owner.startswith((ACTIVATION, "logits")))


def largest(row: FitRow, most: int) -> int:
    """Return the micro-batch that a row with a simulated one should fit with: a power of two times that."""
    memory = row.found.memory if row.found else None
    assert memory is not None
    free, size = (memory.capacity or 0) * 0.94 - memory.needed, row.choice.micro_batch_size
    act = max(act_bytes(row), 1)
    while 2 * size <= most and most % (2 * size) == 0 and free >= act * (2 * size / row.choice.micro_batch_size - 1):
        size *= 2
    return size


def try_all(trials: Trials, options: FitOptions, tell: Callable[[str], None]) -> list[FitRow]:
    """Return a row for each split: those that fit and are proved first, by their time. Raises ConfigError for no such split."""
    gpus, cluster, subject = options.gpus, trials.cluster, trials.subject
    known = splits(gpus, cluster.per_node)
    names = names_of(options, known)
    share = options.samples // gpus

    def with_micro_batch(name: str, size: int, recompute: bool) -> FitRow:
        tell(f"{name}, micro-batch {size}: memory and time")
        choice = Choice(gpus, cluster.nodes, options.samples, size, options.precision, recompute)
        return trials.simulated(trials.row(name, known[name], choice))

    def size_for(name: str, size: int) -> int:
        """Return the largest part of a size by which the share of a data rank can be divided."""
        share = options.samples * known[name].tensor // gpus
        return next(n for n in range(size, 0, -1) if share % n == 0)

    def best(name: str, size: int) -> FitRow:
        """Return a split with the largest micro-batch that fits, up to a size, recomputing blocks if none does."""
        lacks = {"blocks": not subject.block, "plan": not subject.plan}
        if missing := [LACKS[need] for need in known[name].needs if lacks[need]]:
            return FitRow(
                name, known[name], Choice(gpus, cluster.nodes, options.samples, 1, "fp32", False), 0, why=missing[0]
            )
        size = size_for(name, size)
        row = with_micro_batch(name, size, False)
        while row.why == "does not fit" and size > 1:
            size //= 2
            row = with_micro_batch(name, size, False)
        if row.why == "does not fit" and subject.block:
            row = with_micro_batch(name, 1, True)
        return row

    # What fits by the split that needs least is the most that others are tried with.
    first = "fsdp" if "fsdp" in names and subject.block else names[0]
    probe = best(first, 1)
    size = largest(probe, share) if probe.fits else 1
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        rows = list(pool.map(lambda name: best(name, size), names))
        rows = [probe if row.name == first and not row.fits else row for row in rows]
        fitting = sorted(
            (row for row in rows if row.fits), key=lambda row: row.found.timing.seconds if row.found else 0.0
        )
        if fitting:
            tell("one process, for the proofs")
            trials.begin_proofs()
            fitting = list(pool.map(lambda row: proved(trials, row, row.split.least, tell), fitting))
            right = [row for row in fitting if row.proved]
            if right and right[0].split.least == 2:
                fitting[fitting.index(right[0])] = proved(trials, right[0], 4, tell)
    return [*fitting, *(row for row in rows if not row.fits)]


def names_of(options: FitOptions, known: Mapping[str, Split]) -> list[str]:
    """Return the splits to try. Raises ConfigError for one that there is not."""
    return list(known) if options.splits == "all" else parse_names(options.splits, known, "split", "--splits")


def proved(trials: Trials, row: FitRow, ranks: int, tell: Callable[[str], None]) -> FitRow:
    """Return a row with its proof on so many ranks."""
    tell(f"{row.name}: proof on {ranks} ranks")
    return trials.prove(row, ranks)
