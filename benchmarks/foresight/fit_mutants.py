"""Bugs in programs that `gptscale fit` writes: is each that a proof in fp32 finds found in fp64, too?

    python -m benchmarks.foresight.fit_mutants FILE.py:build [--only SPLITS] [--bugs WORDS] [--healthy]

A proof that finds a difference in fp32 runs both programs again in fp64 (foresight/fit/trials.py). A bug must be found twice.
With --healthy programs run as they are written: what fp32 calls wrong must be right in fp64. Ranks are forked (prove_ranks.py).
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.foresight.prove import SERVER, Forks
from gptscale.common.settings.command_line import parse
from gptscale.foresight.fit.splits import splits
from gptscale.foresight.fit.subject import subject_of
from gptscale.foresight.fit.trials import MICRO, ON_A_CPU, SAMPLES, STEPS, with_doubles
from gptscale.foresight.fit.write import Choice, program
from gptscale.foresight.prove.causes import finding
from gptscale.foresight.prove.compare import Proof
from gptscale.foresight.prove.program import ProveTask, Recording
from gptscale.launchers.cli import start

BACKWARD, ENGINE, GRADIENTS = "(loss / count).backward()", "model.backward(loss)", "loss = gradients(model, o, step)\n"
NUMBER, DECAYS = "65_537 + number)", '"weight_decay": 0.0}'
TRAINED = "[p for p in model.parameters() if p.requires_grad]"
HAVE = "have = [p for p in model.parameters() if p.grad is not None]\n"
SHARD_NORM = """\
grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
        norm = torch.stack([each.norm() for each in grads]).norm()
        nn.utils.clip_grads_with_norm_(model.parameters(), o.clip, norm, foreach=False)
"""
FSDP_NORM = "norm = float(nn.utils.clip_grad_norm_(model.parameters(), o.clip).full_tensor())\n"
# The code that a bug replaces. The last weight is a scalar or a head, as the model has it.
ANYWHERE = {
    "wrong data of rank 1": (NUMBER, f"{NUMBER[:-1]} + 7 * (RANK == 1))"),
    "biases and norms decay": (DECAYS, DECAYS.replace("0.0", "o.weight_decay")),
    "nothing decays": ('"weight_decay": o.weight_decay}', '"weight_decay": 0.0}'),
    "a frozen weight": (TRAINED, f"{TRAINED}[1:]"),
    "another frozen weight": (TRAINED, f"{TRAINED}[:-1]"),
    "rate by the ranks": ('["lr"] = rate', '["lr"] = rate * WORLD'),
    "another second moment": ("(0.9, 0.95)", "(0.9, 0.99)"),
}
LOOP = {
    "no division by micro-batches": (BACKWARD, "loss.backward()"),
    "divided by the ranks twice": (BACKWARD, "(loss / count / WORLD).backward()"),
    "a sum over ranks": (BACKWARD, "(loss / count * WORLD).backward()"),
    "a micro-batch of rank 1 left out": (BACKWARD, "(loss / count * (RANK != 1 or micro > 0)).backward()"),
    "a loss 1.001 times too large": (BACKWARD, "(loss / count * 1.001).backward()"),
    "the last weight's gradient times 1.01": (
        GRADIENTS,
        f"{GRADIENTS}        {HAVE}        have[-1].grad.mul_(1.01)\n",
    ),
    "the first weight's gradient times 0.999": (
        GRADIENTS,
        f"{GRADIENTS}        {HAVE}        have[0].grad.mul_(0.999)\n",
    ),
    "rank 1's part of a weight is zero": (
        GRADIENTS,
        f"{GRADIENTS}        {HAVE}        getattr(have[2].grad, '_local_tensor', have[2].grad).mul_(RANK != 1)\n",
    ),
    "a weight's gradient negated": (GRADIENTS, f"{GRADIENTS}        {HAVE}        have[2].grad.neg_()\n"),
    "gradients cleared late": ("optimizer.zero_grad()", "step % 2 and optimizer.zero_grad()"),
    "another limit of the norm": ('"clip": 1.0', '"clip": 1e-5'),
    "the same samples on all ranks": ("micro * WORLD + RANK", "micro * WORLD"),
}
IGNORED = (
    "replica = DistributedDataParallel(",
    "names = [(name, f'.{name}') for name, _ in model.named_parameters()]\n"
    "    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names[AT])\n"
    "    replica = DistributedDataParallel(",
)
SYNC = "require_backward_grad_sync = micro == count - 1"
BUGS = {
    "ddp": ANYWHERE
    | LOOP
    | {
        "the first weight is not reduced": (IGNORED[0], IGNORED[1].replace("AT", "0")),
        "the last weight is not reduced": (IGNORED[0], IGNORED[1].replace("AT", "-1")),
        "nothing is reduced": (SYNC, SYNC.replace("micro == count - 1", "False")),
        "only the first micro-batch is reduced": (SYNC, SYNC.replace("count - 1", "0")),
        "a norm of the gradients of one half": (
            "clip_grad_norm_(model.parameters()",
            "clip_grad_norm_([*model.parameters()][::2]",
        ),
    },
    "fsdp": ANYWHERE
    | LOOP
    | {
        "the norm of a shard": (FSDP_NORM, SHARD_NORM),
        "reduced in bf16": (
            "MixedPrecisionPolicy(compute_dtype, torch.float32)",
            "MixedPrecisionPolicy(compute_dtype, torch.bfloat16)",
        ),
        "computed in bf16": ("MixedPrecisionPolicy(compute_dtype,", "MixedPrecisionPolicy(torch.bfloat16,"),
        "only the first micro-batch is reduced": (
            BACKWARD,
            f"model.set_requires_gradient_sync(not micro)\n        {BACKWARD}",
        ),
    },
    "zero1": ANYWHERE | {"divided by the ranks twice": (ENGINE, "model.backward(loss / WORLD)")},
    "zero2": {
        "a micro-batch of rank 1 left out": (ENGINE, "model.backward(loss * (RANK != 1 or micro > 0))"),
        "rate by the ranks": ANYWHERE["rate by the ranks"],
        "the engine steps once": ("        if micro < count - 1:\n            model.step()\n", ""),
    },
    "tensor": {name: LOOP[name] for name in [*LOOP][:1] + [*LOOP][4:11]}
    | {
        "wrong data of rank 1": ANYWHERE["wrong data of rank 1"],
        "all weights decay": ("o.weight_decay * decays", "o.weight_decay"),
        "rate by the ranks": ANYWHERE["rate by the ranks"],
        "the norm of a shard": (
            "full(nn.utils.get_total_norm(each))",
            "nn.utils.get_total_norm([getattr(g, '_local_tensor', g) for g in each])",
        ),
    },
    "pipeline 2 x fsdp": {name: LOOP[name] for name in [*LOOP][5:11]}
    | {
        "wrong data of rank 1": ANYWHERE["wrong data of rank 1"],
        "no division by micro-batches": ("lambda loss, _: loss / count", "lambda loss, _: loss"),
        "all weights decay": ("o.weight_decay * decays", "o.weight_decay"),
        "the norm of a stage": ("dist.all_reduce(square, group=model.group)", "pass"),
        "rate by the ranks": ANYWHERE["rate by the ranks"],
        "the ends of a tied weight are reduced twice": (
            "dist.all_reduce(grad.to_local(), group=model.ends)",
            "[dist.all_reduce(grad.to_local(), group=model.ends) for _ in range(2)]",
        ),
        "the ends of a tied weight are not reduced": ("dist.all_reduce(grad.to_local(), group=model.ends)", "pass"),
        "a tied weight counts twice in the norm": (" and p is not twin]", "]"),
    },
}


@dataclass(frozen=True)
class FitMutantOptions:
    """Which programs."""

    model: Annotated[str, tyro.conf.Positional]
    """As `gptscale fit` has it."""
    only: str = ""
    """Names of splits with commas between."""
    bugs: str = ""
    """Words with commas between, of which the name of a bug holds one."""
    healthy: bool = False
    """Programs as they are written, in both precisions."""


class Trial:
    """Programs of a model on forked ranks, each against one process in the same precision."""

    def __init__(self, model: str, folder: Path) -> None:
        subject = subject_of(model, "", "", None, folder)
        chain = subject.chain and {**subject.chain, "hidden": subject.chain["small"]}
        self.subject = replace(subject, imports=(), definitions=subject.small, chain=chain)
        self.file, of_model = folder / "train.py", Path(model.partition(":")[0]).resolve().parent
        command = [sys.executable, str(SERVER), str(self.file), str(of_model)]
        self.forks = Forks(folder / "notes", ProveTask(command, STEPS, 10**5, own_data=True, environ=ON_A_CPU))
        single = self.program("single")
        self.references = {d: self.noted(f"reference-{d}", single, 1, d, None) for d in (False, True)}

    def program(self, split: str) -> str:
        """Return the program of a split, as a proof has it."""
        found = (splits(8, 8) | splits(1, 1))[split]
        return program(self.subject, found, Choice(found.least, 1, SAMPLES, MICRO, "fp32", False), "train.py")

    def noted(self, name: str, text: str, ranks: int, in_double: bool, reference: str | None) -> Recording:
        """Return what a program noted. Raises RuntimeError if it did not make its steps."""
        self.file.write_text(with_doubles(text) if in_double else text)
        return self.forks.record(name.replace(" ", "-").replace("'", ""), reference, ranks, "--warmup 1")

    def found(self, name: str, text: str, ranks: int, in_double: bool) -> tuple[bool, str]:
        """Return whether a program differs from one process, and how, with its worst deviation."""
        reference = self.references[in_double]
        noted = self.noted(f"{name} {in_double}", text, ranks, in_double, reference.folder.name)
        proof = Proof(reference, noted, STEPS, None)
        worst = max(value for kind, value in proof.worst.items() if kind not in ("loss", "update"))
        for first in proof.differences:
            cause = finding(proof, first)[0]
            return True, f"{first.kind} {first.name} at step {first.step}, {cause} ({worst:.0e})"
        return False, f"right ({worst:.0e})"


def main(argv: Sequence[str]) -> int:
    """Run all programs in fp32, and in fp64 if that finds a difference. Return 1 if one is not as it should be."""
    options = parse(FitMutantOptions, argv, prog="python -m benchmarks.foresight.fit_mutants")
    counts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="gptscale-fit-mutants-") as temporary:
        trial = Trial(options.model, Path(temporary))
        has = {"blocks": trial.subject.block, "plan": trial.subject.plan, "chain": trial.subject.chain}
        for split in options.only.split(",") if options.only else BUGS:
            found = splits(8, 8)[split]
            if not all(has[need] for need in found.needs):
                continue
            text = trial.program(split)
            for bug, (old, new) in {"as it is written": ("", "")}.items() if options.healthy else BUGS[split].items():
                if old not in text or not any(word in bug for word in options.bugs.split(",")):
                    continue
                mutant, said, seen = text.replace(old, new) if old else text, list[str](), list[str]()
                for in_double, precision in ((False, "fp32"), (True, "fp64")):
                    try:
                        differs, how = trial.found(f"{split} {bug}", mutant, found.least, in_double)
                    except RuntimeError as error:
                        differs, how = None, str(error)[:200]
                    seen.append(f"{'failed' if differs is None else 'found' if differs else 'right'} in {precision}")
                    said.append(how)
                    if not differs and not options.healthy:
                        break
                counts[" ".join(seen)] += 1
                print(f"{' '.join(seen):29} {split}: {bug}: {'; '.join(said)}", flush=True)
        trial.forks.process.kill()
    print(dict(counts))
    bad = "found in fp64" if options.healthy else "found in fp32 right in fp64"
    return int(not counts or any(bad in seen or "failed" in seen for seen in counts))


if __name__ == "__main__":
    sys.exit(start(main))
