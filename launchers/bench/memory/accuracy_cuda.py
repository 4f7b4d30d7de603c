"""The closed forms for GPUs beside what a rank under the mock of CUDA allocates, for many shapes of each recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gptscale.common.errors import GptscaleError
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.simulation import simulate
from gptscale.recipes import get

DEVICE = "b200"
# Models from 125M to 13B; the processes of their world, the rank, and options.
SHAPES = (
    ("gpt2", 1, 0, "--micro-batch-size 8"),
    ("gpt2", 2, 1, "--micro-batch-size 16 --activation-checkpointing full"),
    ("gpt2", 4, 0, "--micro-batch-size 8 --grad-accum-steps 4"),
    ("gpt2-medium", 4, 3, "--micro-batch-size 8 --seq-len 512"),
    ("gpt2-medium", 8, 0, "--micro-batch-size 4 --precision fp32"),
    ("gpt2-large", 8, 7, "--micro-batch-size 4 --activation-checkpointing selective"),
    ("gpt2-large", 16, 0, "--micro-batch-size 4 --vocab-size 100000"),
    ("1.6b", 8, 0, "--micro-batch-size 8"),
    ("1.6b", 16, 15, "--micro-batch-size 4 --grad-accum-steps 2"),
    ("1.6b", 64, 0, "--micro-batch-size 8 --activation-checkpointing full"),
    ("gpt3-2.7b", 16, 0, "--micro-batch-size 4"),
    ("gpt3-6.7b", 32, 0, "--micro-batch-size 2 --activation-checkpointing full"),
    ("gpt3-13b", 64, 63, "--micro-batch-size 1 --activation-checkpointing full"),
)
# A world of one axis cannot be larger than what the axis divides: heads of tensor ranks, blocks of stages.
LARGEST = {"tensor_parallel": 4, "colossal_tensor": 4, "pipeline": 8, "colossal_pipeline": 8}
WAYS = {"hybrid_3d": "--tp-size 2 --pp-size 2", "colossal_tensor": "--tp-size 2", "colossal_pipeline": "--pp-size 2"}


def compare_on_mock(recipe: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape that the recipe takes. What cannot be simulated is printed with the reason."""
    row = get(recipe)
    for model, nproc, rank, words in SHAPES:
        size = min(nproc, LARGEST.get(recipe, nproc)) if row.axes else 1
        if recipe in WAYS and size < 4:
            continue
        line = f"--model {model} --precision bf16 --data synthetic {words} {WAYS.get(recipe, '')}"
        try:
            config, recipe_config = parse_run(recipe, line.split())
            found = simulate(
                recipe,
                config,
                recipe_config,
                device=DEVICE,
                rank=min(rank, size - 1),
                world_size=size,
                ranks_per_node=8,
            )
        except GptscaleError as error:
            print(f"  {recipe} {model} on {size}: {error}", flush=True)
            continue
        if found.out_of_memory:
            continue
        facts = found.facts
        closed_form = sum(facts["closed_form_bytes"].values())
        yield {
            "recipe": recipe,
            "nproc": size,
            "rank": min(rank, size - 1),
            "options": " ".join(line.split()),
            "allocated": facts["peak_allocated"],
            "reserved": facts["peak_reserved"],
            "closed_form": closed_form,
            "closed_form_error": closed_form / facts["peak_allocated"] - 1,
        }
