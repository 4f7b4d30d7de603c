"""Tokenizers: bytes, which need nothing, and GPT-2's byte-pair encoding through transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from gptscale.common.errors import ConfigError, DataError, first_line

BPE_FILES = ("vocab.json", "merges.txt")
# GPT-2's largest file has 1 MB.
FILE_BYTES_MAX = 2**25
# Ids are kept in 16 bits, in memory and in files.
IDS_MAX = 2**16
# For the hub to answer.
HUB_S_MAX = 3.0
WHERE, FIX = "in --tokenizer", "give a folder with vocab.json and merges.txt, or use --tokenizer bytes"


class ByteTokenizer:
    """The tokenizer whose ids are UTF-8 bytes, 0 to 255, and 256 for the end of a text."""

    vocab_size, end_of_text = 257, 256
    id_bytes = (np.arange(257) < 256).astype(np.int64)
    fingerprint: str | None = None

    def encode(self, text: str) -> np.ndarray:
        """Return the ids (uint16) of `text`, in which half of a surrogate pair becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`, in which bytes that are not UTF-8 become U+FFFD."""
        return np.asarray(ids)[np.asarray(ids) < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding (Radford et al. 2019), with the vocabulary of a folder (vocab.json, merges.txt)."""

    def __init__(self, folder: Path) -> None:
        tokenizer_class = _tokenizer_class()
        if missing := [name for name in BPE_FILES if not (folder / name).is_file()]:
            raise DataError(f"{folder} lacks {' and '.join(missing)}", WHERE, FIX)
        # transformers reads others of these too if they are there, and would wait for ever for a pipe.
        for path in (path for path in folder.iterdir() if path.suffix in (".json", ".txt", ".jinja")):
            if not path.is_file() or path.stat().st_size > FILE_BYTES_MAX:
                fix = "remove it, or give a folder with vocab.json and merges.txt alone"
                raise DataError(f"{path.name} is no file, or has more than {FILE_BYTES_MAX} bytes", f"in {folder}", fix)
        try:
            self._bpe: Any = tokenizer_class.from_pretrained(str(folder), local_files_only=True)
            self.vocab_size, self.end_of_text = len(self._bpe), int(self._bpe.eos_token_id)
            self.fingerprint: str | None = hashlib.sha256(self._bpe.backend_tokenizer.to_str().encode()).hexdigest()
            vocabulary = self._bpe.get_vocab()
            ids = set(vocabulary.values())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # The Rust library has no narrower class for a file that it cannot read.
            raise DataError(f"{folder} holds no byte-pair encoding ({first_line(error)})", WHERE, FIX) from None
        if self.vocab_size > IDS_MAX:
            what = f"tokenizer {folder} has {self.vocab_size} ids, at most {IDS_MAX} fit 16 bits"
            raise ConfigError(what, WHERE, FIX)
        if ids != set(range(self.vocab_size)):
            what = f"{folder} has ids from {min(ids)} to {max(ids)}, expected {self.vocab_size} without a gap"
            raise DataError(what, WHERE, FIX)
        # The alphabet of the encoding has a letter for each byte. What was added to it is plain text.
        added, special = self._bpe.get_added_vocab(), set(self._bpe.all_special_ids)
        self.id_bytes = np.zeros(self.vocab_size, np.int64)
        for token, i in vocabulary.items():
            self.id_bytes[i] = 0 if i in special else len(token.encode() if token in added else token)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids (uint16) of `text`, in which half of a surrogate pair becomes a question mark."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        try:
            ids = self._bpe(clean, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            return np.asarray(ids, dtype=np.uint16)
        except Exception as error:
            # The folder's other files can make it raise anything.
            raise DataError(f"the tokenizer cannot encode text ({first_line(error)})", WHERE, FIX) from None

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of `ids`, without the end of text."""
        text_ids = [int(i) for i in ids if i != self.end_of_text]
        return str(self._bpe.decode(text_ids, clean_up_tokenization_spaces=False))


# The way from text to ids (uint16) and back, on which text that looks like a control token stays text. vocab_size: ids are below
# it. end_of_text: the id that ends a document; no text encodes to it. id_bytes: (vocab_size,), the bytes of UTF-8 text that each
# id stands for, 0 for what is no text. fingerprint: names the vocabulary in a cache of ids; None where encoding is as fast as
# reading a cache.
Tokenizer = ByteTokenizer | GPT2Tokenizer


def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `bytes` or `gpt2` (from the hub or its cache), or that of a folder with its two files.

    The files are vocab.json and merges.txt.
    Raises ConfigError for another name or without transformers, DataError for files that are missing or unusable.
    """
    if name == "bytes":
        return ByteTokenizer()
    if Path(name).is_dir():
        return GPT2Tokenizer(Path(name))
    if name == "gpt2":
        return GPT2Tokenizer(_hub_folder(name))
    what = f"unknown tokenizer {name!r}"
    raise ConfigError(what, WHERE, "use bytes, gpt2, or a folder with vocab.json and merges.txt")


def _hub_folder(repository: str) -> Path:
    """Return the folder of the hub's cache with the files of a byte-pair encoding, downloaded if they are missing."""
    _tokenizer_class()
    import huggingface_hub as hub

    try:
        files = [hub.hf_hub_download(repository, name, local_files_only=True) for name in BPE_FILES]
    except OSError:
        # The file is not in the cache.
        check_hub(f"tokenizer {repository!r}", WHERE, FIX)
        try:
            files = [hub.hf_hub_download(repository, name) for name in BPE_FILES]
        except OSError as error:
            raise DataError(f"tokenizer {repository!r} cannot be loaded ({first_line(error)})", WHERE, FIX) from None
    return Path(files[0]).parent


def check_hub(what: str, where: str, fix: str) -> None:
    """Raise DataError within seconds if `what` would have to come from a hub that cannot be reached.

    The hub's own client tries for minutes. With HF_HUB_OFFLINE set it reads its cache alone, and nothing has to be reached.
    """
    from urllib import error, request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        request.urlopen(request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_S_MAX).close()
    except error.HTTPError:
        # A refusal is an answer.
        return
    except OSError as why:
        raise DataError(f"{what} is not on this machine, and the hub cannot be reached ({why})", where, fix) from None


def _tokenizer_class() -> Any:
    try:
        from transformers import GPT2TokenizerFast  # type: ignore[attr-defined]  # loaded lazily, out of sight
    except ImportError as error:
        fix = "pip install 'gptscale[hf]', or use --tokenizer bytes"
        raise ConfigError(f"the GPT-2 tokenizer needs transformers ({error})", WHERE, fix) from None
    return GPT2TokenizerFast
