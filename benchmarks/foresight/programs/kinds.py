"""Small models that are no language models, for benchmarks.foresight.kinds.

Each is a function NAME, with NAME_batch(n) beside it. Four are transformers' own classes, narrowed, with random weights.
The others are toys of one file.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

hf: Any = transformers
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def pictures(n: int, size: int, channels: int = 3) -> Tensor:
    """Return random pictures, (n, channels, size, size)."""
    return torch.randn(n, channels, size, size)


def vit() -> Any:
    """Vision Transformer (arXiv 2010.11929)."""
    config = hf.ViTConfig(**SIZES, **DRY, image_size=32, patch_size=8, num_labels=10)
    return hf.ViTForImageClassification(config)


def vit_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for vit."""
    return {"pixel_values": pictures(n, 32), "labels": torch.randint(10, (n,))}


def bert() -> Any:
    """BERT with masked tokens (arXiv 1810.04805)."""
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES, **DRY, vocab_size=257))


def bert_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for bert."""
    ids = torch.randint(257, (n, 32))
    # The same number in each sample, or means over micro-batches would weigh samples unequally.
    hidden = (torch.arange(32) % 8 == 3).expand(n, -1)
    return {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)}


def t5() -> Any:
    """T5, an encoder and a decoder that share their table (arXiv 1910.10683)."""
    config = hf.T5Config(
        vocab_size=257, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def t5_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for t5."""
    return {"input_ids": torch.randint(257, (n, 24)), "labels": torch.randint(257, (n, 16))}


def whisper() -> Any:
    """Whisper, from spectra to text (arXiv 2212.04356)."""
    heads: dict[str, Any] = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    }
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1)
    config = hf.WhisperConfig(
        vocab_size=257, d_model=64, encoder_layers=2, decoder_layers=2, max_source_positions=50, max_target_positions=32,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, suppress_tokens=None, begin_suppress_tokens=None,
        **heads, **ids,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def whisper_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for whisper."""
    return {"input_features": torch.randn(n, 80, 100), "labels": torch.randint(2, 257, (n, 16))}


class Residual(nn.Module):
    """Two convolutions behind a norm, added to what came in (arXiv 1512.03385)."""

    def __init__(self, width: int, norm: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class ResNet(nn.Module):
    """A stem, residual blocks and a linear layer over the mean of each channel."""

    def __init__(self, norm: Any, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width, norm) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet() -> nn.Module:
    """A ResNet with norms of groups, which see one sample."""
    return ResNet(lambda width: nn.GroupNorm(8, width))


def resnet_bn() -> nn.Module:
    """A ResNet with BatchNorm, whose norms see the samples of one rank. It is no model of single samples."""
    return ResNet(nn.BatchNorm2d)


def resnet_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for resnet."""
    return {"images": pictures(n, 16), "labels": torch.randint(10, (n,))}


resnet_bn_batch = resnet_batch


class UNet(nn.Module):
    """Down, up, and what was seen on the way down beside it (arXiv 1505.04597). It predicts the noise in a picture."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        norm: Any = lambda channels: nn.GroupNorm(4, channels)  # noqa: E731
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(width * 2**i, norm) for i in range(2))
        self.narrow = nn.ModuleList(nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 2, 2) for i in range(2))
        self.middle = Residual(4 * width, norm)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(width * 2 ** (i + 1), width * 2**i, 2, 2) for i in (1, 0))
        self.up = nn.ModuleList(Residual(width * 2**i, norm) for i in (1, 0))
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: Tensor, noise: Tensor) -> Tensor:
        x, kept = self.begin(noisy), []
        for block, narrow in zip(self.down, self.narrow, strict=True):
            kept.append(block(x))
            x = narrow(kept[-1])
        x = self.middle(x)
        for block, widen in zip(self.up, self.widen, strict=True):
            x = block(widen(x) + kept.pop())
        return F.mse_loss(self.end(x), noise)


def unet() -> nn.Module:
    """Return a small U-Net."""
    return UNet()


def unet_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for unet."""
    return {"noisy": pictures(n, 16), "noise": pictures(n, 16)}


class Tagger(nn.Module):
    """An LSTM in both directions that gives each word a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(257, 64), nn.Linear(128, 12)
        self.lstm = nn.LSTM(64, 64, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return F.cross_entropy(self.tags(self.lstm(self.words(words))[0]).flatten(0, 1), tags.flatten())


def lstm() -> nn.Module:
    """Return a tagger by LSTM."""
    return Tagger()


def lstm_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for lstm."""
    return {"words": torch.randint(257, (n, 20)), "tags": torch.randint(12, (n, 20))}


class Graphs(nn.Module):
    """Messages along dense edges (arXiv 1704.01212), four rounds, and a number for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(8, 64), nn.Linear(64, 1)
        self.rounds = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)) for _ in range(4))

    def forward(self, nodes: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        x = self.begin(nodes)
        for each in self.rounds:
            x = x + torch.einsum("bij,bjh->bih", edges / 12, each(x))
        return F.mse_loss(self.end(x.mean(1))[:, 0], target)


def graphs() -> nn.Module:
    """Return a network over graphs."""
    return Graphs()


def graphs_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for graphs."""
    return {"nodes": torch.randn(n, 12, 8), "edges": torch.rand(n, 12, 12).round(), "target": torch.randn(n)}


class Mixture(nn.Module):
    """A mixture of small networks, weighed by a gate, behind a mixer of tokens and channels (arXiv 2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(16, 64), nn.Linear(64, 10)
        self.mixers = nn.ModuleList(Mixer() for _ in range(4))
        self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.begin(x)
        for mixer in self.mixers:
            x = mixer(x)
        weights = self.gate(x).softmax(-1)
        x = x + sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return F.cross_entropy(self.end(x.mean(1)), labels)


class Mixer(nn.Module):
    """A layer over tokens and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.tokens, self.channels = nn.Linear(12, 12), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.tokens(self.ln_1(x).mT)).mT
        return x + F.gelu(self.channels(self.ln_2(x)))


def mixture() -> nn.Module:
    """Return a mixer with experts that all compute."""
    return Mixture()


def mixture_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for mixture."""
    return {"x": torch.randn(n, 12, 16), "labels": torch.randint(10, (n,))}


class Pairs(nn.Module):
    """One tower for both sides of a pair, which are to be alike: a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))

    def forward(self, left: Tensor, right: Tensor, alike: Tensor) -> Tensor:
        return F.cosine_embedding_loss(self.tower(left), self.tower(right), alike, margin=0.2)


def pairs() -> nn.Module:
    """Return a tower for pairs."""
    return Pairs()


def pairs_batch(n: int) -> dict[str, Tensor]:
    """Return n samples for pairs."""
    return {"left": torch.randn(n, 32), "right": torch.randn(n, 32), "alike": torch.randint(2, (n,)) * 2 - 1}
