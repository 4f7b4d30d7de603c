"""Each program tried: on CPU ranks for its proof, and under the mock of CUDA for its memory and time."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gptscale.common.errors import GptscaleError
from gptscale.foresight.fit.options import FitOptions
from gptscale.foresight.fit.parents import COMMAND, Parent
from gptscale.foresight.fit.splits import Split, splits
from gptscale.foresight.fit.subject import SMOOTH, Subject
from gptscale.foresight.fit.write import Choice, program
from gptscale.foresight.memory.timeline import ACTIVATION, LOGITS
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.plan.question import Cluster
from gptscale.foresight.plan.rows import Tried
from gptscale.foresight.plan.trials import RECORDED, tried
from gptscale.foresight.prove.causes import finding
from gptscale.foresight.prove.compare import Proof
from gptscale.foresight.prove.program import ProveTask, Recording, record
from gptscale.foresight.prove.program import environment as proof_environment
from gptscale.foresight.simulate import simulation
from gptscale.foresight.simulate.interpreters import torch_of
from gptscale.foresight.simulate.program import ProgramTask, Simulation
from gptscale.foresight.simulate.program import environment as program_environment

# Steps, samples and micro-batch of a proof, and its longest time.
STEPS, SAMPLES, MICRO, PROOF_S = 3, 8, 2, 300
# Steps of a simulation: one makes the optimizer's state, DeepSpeed learns the order of weights in two, the last is recorded.
SIMULATED = 4
# The share of a device that a micro-batch may fill, by a straight line from one sample.
FILLED = 0.94
# Programs that run at once: each may need the host's memory for its weights.
AT_ONCE = 4
# A machine with GPUs proves on its CPU, too. There it compiles nothing: dropout inside would stay.
ON_A_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
TOO_LARGE = "does not fit"
# Memory of malloc is zero. In a fork it would hold what imports have left, and squares of that are too large for a float.
ZEROS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=255"}
# Micro-batches of a pipeline that are recorded beside one for each stage: by then each takes as long as the last.
IN_TURN = 4
# Micro-batches of a pipeline for each of its stages, if the batch has so many. With as many it idles a fifth of the time.
FEW_IDLE = 4
VALUELESS = """

from gptscale.foresight.fit.twin import NoFills
from gptscale.foresight.mock_cuda.host import leave_out_steps

build_with_values = build
leave_out_steps()


def build():
    with NoFills():
        return build_with_values()"""


@dataclass(frozen=True)
class FitRow:
    """A split that was tried.

    choice: how its program is started. found: its memory and time at full size, None if it did not run. proved: the CPU ranks on
    which it computed what one process computes. in_double: whether that needed fp64, as fp32 rounds by more than the tolerance.
    why: the reason if it is left out. lines: of its program.
    """

    name: str
    split: Split
    choice: Choice
    lines: int
    found: Tried | None = None
    proved: tuple[int, ...] = ()
    worst: float = 0.0
    in_double: bool = False
    why: str = ""

    @property
    def fits(self) -> bool:
        return bool(self.found and self.found.memory and not self.found.memory.is_too_large)


class Trials:
    """The trials of a subject on a cluster. folder: for programs and what they leave. tell: is told what is tried."""

    def __init__(self, subject: Subject, cluster: Cluster, folder: Path, tell: Callable[[str], None]) -> None:
        self.subject, self.cluster, self.folder, self.tell = subject, cluster, folder, tell
        chain = subject.chain and {**subject.chain, "hidden": subject.chain["small"]}
        self.small = replace(subject, imports=(), definitions=subject.small, chain=chain)
        # Files that the model reads are named from here.
        here = f"os.chdir({os.getcwd()!r})\n"
        self.valueless = replace(subject, definitions=here + subject.definitions + VALUELESS)
        self.reference: Future[Recording] | None = None
        folders = [Path(tempfile.mkdtemp(dir=folder)) for _ in range(2)]
        proof = ProveTask((), STEPS, PROOF_S, True, environ=ON_A_CPU)
        self._on_cpu = Parent(proof_environment(proof, folders[0]), folders[0], subject.imports)
        environ = program_environment(self._task(0), torch_of(sys.executable), folders[1]) | ZEROS
        self._under_mock = Parent(environ, folders[1], subject.imports)

    def simulated(self, row: FitRow) -> FitRow:
        """Return a row with its memory and time at full size, or why it has none. A pipeline is that of all its stages."""
        choice, split, ranks = row.choice, row.split, self.cluster.ranks
        n = choice.global_batch_size * split.sharers // (choice.micro_batch_size * ranks)
        written = min(n, RECORDED if split.stages == 1 else split.stages + IN_TURN)
        few = replace(choice, global_batch_size=choice.micro_batch_size * ranks * written // split.sharers)
        text = program(self.valueless, split, few, "train.py")
        try:
            each = [self._simulation(text, stage * ranks // split.stages) for stage in range(split.stages)]
            found = tried(each, self.cluster, choice.precision, n, written)
        except GptscaleError as error:
            return replace(row, why=f"not simulated: {error.what}")
        why = TOO_LARGE if found.memory and found.memory.is_too_large else ""
        return replace(row, found=found, why=why)

    def _simulation(self, text: str, rank: int) -> Simulation:
        """Return what a rank of a program needs at full size. Raises GptscaleError if it fails."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            Path(folder, "train.py").write_text(text)
            task = self._task(rank, folder=Path(folder), start=self._under_mock.start)
            content = hashlib.sha256(f"{text}{self.subject.sources}".encode()).hexdigest()
            return simulation.kept_simulation(task, content)

    def _task(self, rank: int, **options: Any) -> ProgramTask:
        words = (*COMMAND, "1", "train.py", "--steps", str(SIMULATED))
        device, numbers = device_named(self.cluster.device), (self.cluster.per_node, SIMULATED, simulation.LIMIT_S)
        options |= {"torch_folder": torch_of(sys.executable), "balanced_experts": self.subject.has_decisions}
        return ProgramTask(words, self.cluster.ranks, str(rank), device, *numbers, **options)

    @cached_property
    def doubled(self) -> Recording:
        """Return what one process computes in fp64."""
        return self.record(splits(1, 1)["single"], 1, "reference", in_double=True)

    def proved(self, row: FitRow, ranks: int) -> FitRow:
        """Return a row with the proof on so many CPU ranks, or why there is none. A wrong one keeps no proof.

        What differs in fp32 is rounding if it does not in fp64: both programs run again, with the same tolerance.
        """
        assert self.reference is not None
        wrong = ""
        for in_double in (False, True):
            self.tell(f"{row.name}: proof on {ranks} ranks{' in fp64' * in_double}")
            try:
                reference = self.doubled if in_double else self.reference.result()
                candidate = self.record(row.split, ranks, row.name, reference, in_double)
            except GptscaleError as error:
                why = f"WRONG on {ranks} ranks: {wrong}; in fp64" if wrong else f"not proved on {ranks} ranks"
                return replace(row, proved=() if wrong else row.proved, why=f"{why}: {error.what}")
            proof = Proof(reference, candidate, STEPS, None)
            first = next(iter(proof.differences), None)
            wrong = f"{first.kind} {first.name}".strip() + f", {finding(proof, first)[0]}" if first else ""
            shutil.rmtree(candidate.folder)
            if not wrong:
                worst, in_double = max(row.worst, proof.worst.get("gradient", 0.0)), row.in_double or in_double
                return replace(row, proved=(*row.proved, ranks), worst=worst, in_double=in_double)
        renewed = f"; its forward {self.subject.renewed}" * bool(self.subject.renewed)
        return replace(row, proved=(), why=f"WRONG on {ranks} ranks: {wrong}{renewed}")

    def record(
        self, split: Split, ranks: int, name: str, reference: Recording | None = None, in_double: bool = False
    ) -> Recording:
        """Return what a program computes on CPU ranks, given what the reference was. Raises GptscaleError if it fails."""
        # Each rank notes its weights, and five values of each at every step.
        needed = (8 if in_double else 4) * self.subject.n_small * (1 + 5 * STEPS) * (1 + ranks)
        if needed > (free := shutil.disk_usage(self.folder).free):
            what = f"notes of {self.subject.n_small / 1e6:,.0f}M weights fill {needed / 1e9:,.0f} GB, {free / 1e9:,.0f} are free"
            what += "; name a narrow model by --small"
            raise GptscaleError(what, f"at {self.folder.parent}", "set TMPDIR to a larger disk")
        text = program(self.small, split, Choice(ranks, 1, SAMPLES, MICRO, "fp32", False), "train.py")
        folder = Path(tempfile.mkdtemp("", f"{name}-{ranks}-".replace(" ", "-"), self.folder))
        (folder / "train.py").write_text(with_doubles(text) if in_double else text)
        words = (*COMMAND, str(ranks), str(folder / "train.py"), "--warmup", "1")
        given = reference.folder if reference else None
        task = ProveTask(words, STEPS, PROOF_S, True, given, environ=ON_A_CPU, start=self._on_cpu.start)
        return record(task, folder / "noted")

    def close(self) -> None:
        """End the processes from which programs are forked."""
        self._on_cpu.close()
        self._under_mock.close()


def with_doubles(text: str) -> str:
    """Return the program of a proof in double precision."""
    text = text.replace(SMOOTH, SMOOTH.replace("Smooth", "InDouble")).replace("torch.float32", "torch.float64")
    return text.replace("build().", "build().double().")


def largest(row: FitRow, most: int) -> int:
    """Return the largest micro-batch that should fit, by a row with the least: doubled as long as it divides `most`."""
    memory = row.found.memory if row.found else None
    assert memory is not None
    owners = memory.timeline.by_owner(memory.timeline.peak_at)
    of_least = max(1, sum(nbytes for owner, nbytes in owners.items() if owner.startswith((ACTIVATION, LOGITS))))
    free, size = memory.capacity * FILLED - memory.needed, row.choice.micro_batch_size
    while most % (2 * size) == 0 and free >= of_least * (2 * size / row.choice.micro_batch_size - 1):
        size *= 2
    return size


def try_all(trials: Trials, options: FitOptions, known: Mapping[str, Split]) -> list[FitRow]:
    """Return a row for each split: those that fit first, by their time."""
    gpus, subject, least = options.gpus, trials.subject, trials.subject.least
    reasons = {
        "blocks": "" if subject.block else "the model has no block that is repeated",
        "plan": "" if subject.plan else "the model has no tp_plan of colwise and rowwise modules (docs/guides/fit.md)",
        "chain": subject.no_chain,
    }

    def tried_with(name: str, size: int, recompute: bool) -> FitRow:
        trials.tell(f"{name}, micro-batch {size}: memory and time")
        choice = Choice(gpus, options.nodes, options.samples, size, options.precision, recompute)
        lines = program(subject, known[name], choice, "train.py").count("\n")
        return trials.simulated(FitRow(name, known[name], choice, lines))

    def best(name: str, size: int) -> FitRow:
        """Return a split with the largest micro-batch that fits, up to a size, recomputing blocks if none does."""
        split, share = known[name], options.samples * known[name].sharers // gpus
        count = FEW_IDLE * split.stages if split.stages > 1 else 1
        sizes = [n for n in range(size, least - 1, -1) if share % n == 0 and share // n >= count]
        why = next(filter(None, (reasons[need] for need in split.needs)), "")
        if not why and split.stages > min(share, subject.chain.get("count", split.stages)):
            why = f"{subject.chain['count']} blocks and {share} samples are too few for {split.stages} stages"
        if why:
            return FitRow(name, split, Choice(gpus, options.nodes, options.samples, 1, "", False), 0, why=why)
        size = (*sizes, least)[0]
        row = tried_with(name, size, False)
        while row.why == TOO_LARGE and size > least:
            size //= 2
            row = tried_with(name, size, False)
        return tried_with(name, least, True) if row.why == TOO_LARGE and subject.block else row

    def tried_and_proved(name: str) -> FitRow:
        row = best(name, size)
        return trials.proved(row, row.split.least) if row.fits else row

    with ThreadPoolExecutor(min(os.cpu_count() or 2, AT_ONCE)) as pool:
        trials.tell("one process, for the proofs")
        trials.reference = pool.submit(trials.record, splits(1, 1)["single"], 1, "reference")
        # The batch that fits by the split that needs least is the largest that others are tried with.
        probes = (best(name, least) for name in sorted(known, key=lambda name: name != "fsdp"))
        probe = next((row for row in probes if row.fits and not row.choice.recompute), None)
        size = largest(probe, options.samples // gpus) if probe else least
        # The longest trial begins first, so that no processor is left alone with it.
        order = sorted(known, key=lambda name: -known[name].stages)
        found = dict(zip(order, pool.map(tried_and_proved, order), strict=True))
        rows = [found[name] for name in known]
        fitting = [row for row in rows if row.fits]
        fitting.sort(key=lambda row: row.found.seconds if row.found else 0.0)
        for i, row in enumerate(fitting):
            if row.proved == (2,) and row.split.tensor != 2:
                fitting[i] = trials.proved(row, 4)
            if fitting[i].proved:
                break
    trials.close()
    return [*fitting, *(row for row in rows if not row.fits)]
