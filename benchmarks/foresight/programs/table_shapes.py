"""A recipe's program with models of tables' shapes as further presets, since nanotron's Llamas are none of ours."""

import runpy

from gptscale.common.settings.families import MODELS
from gptscale.common.settings.llama_config import PRESETS, LlamaConfig

# By nanotron's names. Layers and hidden sizes are the table's. Its MFU counts 6 N + 12 L h T for each token, and so tells N:
# every head has keys of its own, the model's head is a matrix of its own, and this is the inner size. All ran on 32
# tensor ranks, and so have 32 heads.
SHAPES = {
    "nanotron-1B": LlamaConfig(16, 32, 2048, 4096, 131072, n_inner=8192, n_kv_head=32, head_dim=64),
    "nanotron-3B": LlamaConfig(28, 32, 3072, 4096, 131072, n_inner=8192, n_kv_head=32, head_dim=96),
    "nanotron-8B": LlamaConfig(32, 32, 4096, 4096, 131072, n_inner=14336, n_kv_head=32, head_dim=128),
}


def know_shapes() -> None:
    """Let --model take these names."""
    PRESETS.update(SHAPES)
    MODELS.update(dict.fromkeys(SHAPES, LlamaConfig.family))


if __name__ == "__main__":
    know_shapes()
    runpy.run_module("gptscale.foresight.simulate.recipe_program", run_name="__main__", alter_sys=True)
