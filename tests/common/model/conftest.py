import pytest
import torch

from gptscale.common.model.build import apply_activation_checkpointing
from gptscale.common.model.float8 import apply_float8
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.families import model_class
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig

SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=301)


@pytest.fixture
def ids():
    """Two sequences of 33 token ids."""
    return torch.randint(0, 301, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def random_model():
    """Return a function that makes the same model with random weights at every call."""

    def make(gpt=SMALL, std=0.2, fp8=False, checkpointing="none"):
        torch.manual_seed(0)
        model = model_class(gpt)(gpt)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=std)
        if fp8:
            apply_float8(model.blocks)
        apply_activation_checkpointing(model.blocks, checkpointing)
        return model

    return make


@pytest.fixture(scope="session")
def run_on():
    """Return a function that makes a run of one process on `device` with some options."""

    def make(device, batch=None, **options):
        config = RunConfig(**options)
        return Run("single", config, config.gpt(), batch or plan_batch(1), World(0, 0, 1, device, 120.0))

    return make
