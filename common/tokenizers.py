"""Text to ids and back: bytes, which need nothing, and GPT-2's byte-pair encoding through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gptscale.common.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """vocab_size: ids are below it. end_of_text: the id that ends a document."""

    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> np.ndarray:
        """Ids (uint16) of `text`."""

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids; end of text is left out."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text."""

    vocab_size, end_of_text = 257, 256

    def encode(self, text: str) -> np.ndarray:
        """Ids (uint16) of `text`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding (50257 ids), from the hub or its cache, or from a folder with vocab.json and merges.txt."""

    def __init__(self, name_or_path: str) -> None:
        try:
            from transformers import GPT2TokenizerFast
        except ImportError:
            raise ConfigError(
                "the GPT-2 tokenizer needs transformers", "in --tokenizer", "pip install 'gptscale[hf]', or use --tokenizer bytes"
            ) from None
        folder = Path(name_or_path)
        if folder.is_dir():
            missing = [n for n in ("vocab.json", "merges.txt") if not (folder / n).is_file()]
            if missing:
                raise DataError(f"{folder} lacks {' and '.join(missing)}", "in --tokenizer", "give a folder that holds both")
            files = {"vocab": str(folder / "vocab.json"), "merges": str(folder / "merges.txt")}
            self._bpe: Any = GPT2TokenizerFast(**files)
        else:
            try:
                self._bpe = GPT2TokenizerFast.from_pretrained(name_or_path)
            except (OSError, ValueError) as error:
                first = str(error).splitlines()[0][:120]
                raise DataError(
                    f"tokenizer {name_or_path!r} cannot be loaded ({first})", "in --tokenizer", "give a folder with vocab.json and merges.txt"
                ) from None
        self.vocab_size = len(self._bpe)
        self.end_of_text = int(self._bpe.eos_token_id)

    def encode(self, text: str) -> np.ndarray:
        """Ids (uint16) of `text`."""
        return np.asarray(self._bpe(text, verbose=False)["input_ids"], dtype=np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids."""
        return str(self._bpe.decode([int(i) for i in ids if i != self.end_of_text]))


def get_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `gpt2`, or a folder with vocab.json and merges.txt."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2" or Path(name).exists():
        return GPT2Tokenizer(name)
    raise ConfigError(f"unknown tokenizer {name!r}", "in --tokenizer", "use bytes, gpt2, or a folder with vocab.json and merges.txt")
