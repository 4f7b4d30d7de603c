"""The words of a verdict, and for each what to do about it, in options that this package has."""

from __future__ import annotations

from gptscale.common.measure.evidence import RunFacts

DATA, LAUNCH, LINKS, LATE, BUBBLE, DISK, BUS, MEMORY, CONTENDED, THREADS = CAUSES = (
    "data-bound",
    "launch-bound",
    "communication-bound (links)",
    "communication-bound (late rank)",
    "bubble-bound",
    "offload-bound (disk)",
    "offload-bound (bus)",
    "memory-pressed",
    "contended",
    "thread-bound",
)
COMPUTE_BOUND, NO_CAUSE = "compute-bound", "no single cause"
# DeepSpeed's stages from 2 on average the gradients of each micro-batch, so that only fewer micro-batches exchange less.
EXCHANGE_EACH = ("zero2", "zero3", "zero_offload", "zero_infinity")
# A pipeline whose micro-batches are single sequences gets so many times as many.
MORE_MICRO_BATCHES = 4
WORDS = (*CAUSES, COMPUTE_BOUND, NO_CAUSE)


def remedy(word: str, facts: RunFacts) -> str:
    """Return what to do about a cause, empty where there is nothing to do."""
    options = options_against(word, facts)
    advice = {
        LATE: "see what else runs on its machine (gptscale doctor --nodes)",
        CONTENDED: "wait until the machine is free, or measure on another one",
        DISK: "keep the state in host memory (gptscale run zero_offload), or on a faster disk (--nvme-path)",
    }
    if word == THREADS:
        return f"try OMP_NUM_THREADS={facts.right_threads}"
    if word == DATA and facts.recipe:
        return "tokenize once: gptscale tokenize INPUT --out FILE.bin, then --data FILE.bin"
    return f"try {' '.join(options)}" if options else advice.get(word, "")


def options_against(word: str, facts: RunFacts) -> list[str]:
    """Return options of the same command that work against a cause, none where no option does."""
    sequences = facts.micro_batch_size * facts.grad_accum_steps
    if not facts.recipe:
        return _vision_options(word, facts)
    if word == LAUNCH and facts.grad_accum_steps > 1 and not facts.pipeline:
        return ["--micro-batch-size", str(sequences), "--grad-accum-steps", "1"]
    if word == LAUNCH:
        return ["--compile", "--compile-mode", "reduce-overhead"] if facts.cuda else ["--compile"]
    if word == BUBBLE and sequences > facts.grad_accum_steps:
        n = facts.best_micro_batches or sequences
        return ["--micro-batch-size", str(sequences // n), "--grad-accum-steps", str(n)]
    if word == BUBBLE:
        return ["--grad-accum-steps", str(MORE_MICRO_BATCHES * facts.grad_accum_steps)]
    if word == LINKS:
        if facts.recipe == "fsdp" and facts.grad_accum_steps > 1:
            return ["--no-sync-every-micro-batch"]
        if facts.recipe == "fsdp":
            return ["--no-reshard-after-forward"]
        if facts.recipe in EXCHANGE_EACH and facts.grad_accum_steps > 1:
            return ["--micro-batch-size", str(sequences), "--grad-accum-steps", "1"]
        if facts.recipe in ("tensor_parallel", "hybrid_3d", *EXCHANGE_EACH):
            return ["--micro-batch-size", str(2 * facts.micro_batch_size)]
        micro_batch, twice = str(facts.micro_batch_size), str(2 * facts.grad_accum_steps)
        return ["--micro-batch-size", micro_batch, "--grad-accum-steps", twice]
    if word == BUS:
        return ["--grad-accum-steps", str(2 * facts.grad_accum_steps)]
    if word == MEMORY and facts.micro_batch_size > 1:
        return ["--micro-batch-size", str(facts.micro_batch_size // 2)]
    if word == MEMORY:
        return ["--activation-checkpointing", "full"]
    if word == COMPUTE_BOUND and facts.cuda and not facts.compiled:
        return ["--compile"]
    return []


def _vision_options(word: str, facts: RunFacts) -> list[str]:
    if word == DATA and facts.slow_loader:
        return ["--loader", "fast"]
    if word in (LAUNCH, LINKS):
        return ["--batch-size", str(2 * facts.micro_batch_size)]
    return ["--batch-size", str(max(1, facts.micro_batch_size // 2))] if word == MEMORY else []
