import os

import pytest
import torch
from hypothesis import settings

# A first example may import a library, and a machine may be busy: neither is a fault of what is tested.
settings.register_profile("gptscale", deadline=None)
settings.load_profile("gptscale")

CACHE_OF_THE_USER = os.environ.get("XDG_CACHE_HOME")
TEXT = "def hello(world):\n    return world + 1\n\n\nimport os  # don't <|endoftext|> stop\nprint('naïve café', 3.14)\n"


@pytest.fixture(autouse=True)
def _subnormal_numbers():
    """Compute with them: what torch 2.5 compiles is linked with -ffast-math and switches them off when it is loaded."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def operators_of_the_user(_cache_of_its_own, monkeypatch):
    """Use the operators that `gptscale prepare` has compiled: to compile them again takes 80 s of a core."""
    if CACHE_OF_THE_USER is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", CACHE_OF_THE_USER)


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    """Train a byte-pair encoding of about 300 ids, whose id 0 is the end of text."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bpe")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT] * 20, vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    return str(folder)


@pytest.fixture
def unreachable_hub(tmp_path, monkeypatch):
    """A hub that nothing answers for (port 9 of this machine), and a cache with nothing in it."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
