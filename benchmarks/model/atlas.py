"""Small models of transformers' architectures, each by the recipes that take any model, against one process.

    python -m benchmarks.model.atlas --nproc 2 --csv atlas.csv [--models llama,bloom] [--recipes ddp,fsdp]

A row for each pair of model and recipe: the largest relative deviation of losses, gradient norms and final weights under SGD, or
the line that refused it. A model is its architecture's own config, narrowed to two blocks of 64 numbers, with random weights.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import CONFIG_MAPPING, PretrainedConfig

from gptscale.common.process.program import Program
from gptscale.common.process.task import reason, run_captured
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start
from gptscale.launchers.run.preflight import why_not_here
from gptscale.recipes import RECIPES, WORKER_IMPORTS
from gptscale.recipes.unsupported import takes_any_model

MODELS = (
    "apertus arcee biogpt bitnet bloom codegen cohere cohere2 diffllama ernie4_5 exaone4 falcon falcon_mamba gemma "
    "gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite granitemoe helium hunyuan_v1_dense "
    "jetmoe llama mamba mamba2 mistral mixtral mpt nemotron olmo olmo2 olmoe opt persimmon phi phi3 qwen2 qwen2_moe "
    "qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 xglm deepseek_v2 deepseek_v3 gpt_oss dbrx ctrl"
).split()
# Names that architectures have for the same sizes; transformers' own `attribute_map` knows most others.
SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 128, "ffn_dim": 128}
SIZES |= {"max_position_embeddings": 128, "rotary_dim": 8, "sliding_window": 64, "num_layers": 2, "expand_ratio": 2}
SIZES |= {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
SIZES |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "topk_group": 1, "n_shared_experts": 1}
SIZES |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
SIZES |= {"kv_channels": 16, "state_size": 16, "num_heads": 8, "n_groups": 1, "time_step_rank": 4, "dff": 128}
OWN_SIZES: dict[str, dict[str, Any]] = {"gpt_neo": {"attention_types": [[["global", "local"], 1]]}}
# Their keys are as many as their queries. Cohere's own scale makes gradients so small that nothing would be clipped.
OWN_SIZES |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), {"num_key_value_heads": 4})
OWN_SIZES |= dict.fromkeys(("cohere", "cohere2"), {"logit_scale": 1.0})
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
TAKE_ANY = [n for n, row in RECIPES.items() if row.axes and takes_any_model(row) and not why_not_here(n)]
SPLIT_THE_BATCH = [name for name in TAKE_ANY if RECIPES[name].axes == ("dp",)]


def small(name: str) -> PretrainedConfig:
    """Return the config of an architecture, narrowed, without dropout."""
    architecture: Any = CONFIG_MAPPING[name]
    whole = architecture()
    known = {*whole.to_dict(), *whole.attribute_map}
    zero = {key: 0.0 for key in known if "drop" in key and isinstance(getattr(whole, key, None), float)}
    sizes = {k: v for k, v in SIZES.items() if k in known} | OWN_SIZES.get(name, {})
    config: PretrainedConfig = architecture(**sizes, **zero, **NO_TOKENS)
    config.tie_word_embeddings = whole.tie_word_embeddings
    return config


def rows_of(folder: Path, recipes: list[str], nproc: int) -> list[dict[str, object]]:
    """Return a row for each recipe. If one of them fails, each is tried by itself."""
    imports = (*WORKER_IMPORTS, *(module for recipe in recipes for module in RECIPES[recipe].engine_imports))
    words = ["parity", "--model", f"hf:{folder}", "--recipes", ",".join(recipes), "--optimizers", "sgd"]
    with tempfile.TemporaryDirectory() as out:
        words += ["--steps", "3", "--seq-len", "32", "--nproc", str(nproc), "--out", out]
        program = Program("gptscale.launchers.cli", tuple(words), imports=tuple(dict.fromkeys(imports)))
        ended = run_captured(program, timeout=900)
        if ended.returncode in (0, 1):
            found = pd.read_csv(Path(out, "parity.csv"), keep_default_na=False).to_dict("records")
            return [{k: row[k] for k in COLUMNS if k in row} for row in found]
    if len(recipes) == 1:
        # The first line is a rank's, and the last parity's.
        said = next(
            (line for line in ended.stderr.splitlines() if line.startswith("gptscale: error:")), reason(ended.stderr)
        )
        return [{"recipe": recipes[0], "nproc": nproc, "refused": said[:200]}]
    return [row for recipe in recipes for row in rows_of(folder, [recipe], nproc)]


COLUMNS = ("model", "recipe", "options", "nproc", "loss", "grad_norm", "weights", "passed", "refused")


@dataclass(frozen=True)
class AtlasOptions:
    """Which models, by which recipes, on how many ranks."""

    csv: Path
    """The file for the rows."""
    models: str = ",".join(MODELS)
    """Architectures with commas between."""
    recipes: str = ",".join(SPLIT_THE_BATCH)
    """Names with commas between."""
    nproc: int = 2
    """Ranks of each run."""

    def __post_init__(self) -> None:
        parse_names(self.models, MODELS, "architecture", "--models")
        parse_names(self.recipes, TAKE_ANY, "recipe", "--recipes")


def main(argv: Sequence[str]) -> int:
    """Try all pairs, write the rows of a model when they are known, and return 1 if one is not right."""
    options, all_right = parse(AtlasOptions, argv, prog="python -m benchmarks.model.atlas"), True
    with options.csv.open("w", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for name in options.models.split(","):
            small(name).save_pretrained(folder)
            for row in rows_of(Path(folder), options.recipes.split(","), options.nproc):
                all_right &= row.get("passed") is True
                row = {"model": name} | {k: f"{v:.1e}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow(row)
                print(*row.values(), flush=True)
            file.flush()
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(start(main))
