"""Token sources: everything a model can train on, behind one small interface.

docs/data.md has the file layouts. Opening a source checks it, so that a run never meets a bad file half way.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from gptscale.common.errors import ConfigError, DataError
from gptscale.common.tokenizers import Tokenizer, get_tokenizer

LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER_INTS = 20240520, 1, 256
SCAN_BYTES_MAX = 2**30  # larger files are checked read by read instead of before the start
FIX = "check the file, or make it anew with `gptscale tokenize`"


class TokenSource(Protocol):
    """A sequence of token ids.

    fingerprint: 16 hex digits that change when the content does.
    """

    fingerprint: str

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64; the range must lie inside."""


class Synthetic:
    """Random ids, each a pure function of seed and position: any place of an endless text costs the same."""

    def __init__(self, vocab_size: int, seed: int, length: int = 2**31) -> None:
        self.vocab_size, self.seed, self.length = vocab_size, seed, length
        self.fingerprint = hashlib.sha256(f"synthetic {vocab_size} {seed}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int) -> np.ndarray:
        """SplitMix64 (Steele et al. 2014) of the position, reduced to the vocabulary by its high bits."""
        x = np.arange(start, start + count, dtype=np.uint64) + np.uint64(self.seed << 32)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return ((x >> np.uint64(32)) * np.uint64(self.vocab_size) >> np.uint64(32)).astype(np.int64)


class Array:
    """Ids in memory or memory-mapped; `origin` and `vocab_size` are for the error that names a bad id."""

    def __init__(self, ids: np.ndarray, vocab_size: int, origin: str, fingerprint: str | None = None) -> None:
        self.ids, self.vocab_size, self.origin = ids, vocab_size, origin
        self.fingerprint = fingerprint or _fingerprint(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens as int64; DataError if one is outside the vocabulary."""
        ids = self.ids[start : start + count].astype(np.int64)
        self._check(ids, start)
        return ids

    def check_all(self) -> Array:
        """Look at every id now, if that takes about a second at most."""
        if self.ids.nbytes <= SCAN_BYTES_MAX:
            piece = 2**24
            for start in range(0, len(self.ids), piece):
                self._check(self.ids[start : start + piece], start)
        return self

    def _check(self, ids: np.ndarray, start: int) -> None:
        if len(ids) and int(ids.max()) >= self.vocab_size:
            first = int(np.argmax(ids >= self.vocab_size))
            raise DataError(
                f"token id {int(ids[first])} is outside the vocabulary of {self.vocab_size}",
                f"in {self.origin} at token {start + first}",
                "use the --model or --vocab-size that the file was made for",
            )


class Span:
    """Part [start, stop) of another source."""

    def __init__(self, source: TokenSource, start: int, stop: int) -> None:
        self.source, self.start, self.stop, self.fingerprint = source, start, stop, source.fingerprint

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens counted from the span's start."""
        return self.source.read(self.start + start, count)


def _fingerprint(ids: np.ndarray) -> str:
    """SHA-256 over the length and the ids; beyond 64 MiB over 64 evenly spaced MiB, so that opening stays fast."""
    digest = hashlib.sha256(str(len(ids)).encode())
    piece = 2**20 // ids.itemsize
    if ids.nbytes <= 64 * 2**20:
        digest.update(np.ascontiguousarray(ids).data)
    else:
        for start in np.linspace(0, len(ids) - piece, 64).astype(np.int64):
            digest.update(np.ascontiguousarray(ids[start : start + piece]).data)
    return digest.hexdigest()[:16]


def open_source(data: str, *, tokenizer: str = "bytes", vocab_size: int, seed: int = 0) -> TokenSource:
    """The source that `--data` names, checked; its ids fit `vocab_size`.

    Raises DataError (file, expected and actual) or ConfigError (a tokenizer whose ids the model does not have).
    """
    if data == "synthetic":
        return Synthetic(vocab_size, seed)
    if data.endswith(".bin"):
        return open_bin(_existing(Path(data)), vocab_size)
    encoder = get_tokenizer(tokenizer)
    if encoder.vocab_size > vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer} makes ids up to {encoder.vocab_size - 1}, the model has {vocab_size}",
            "in --tokenizer",
            f"use --vocab-size {encoder.vocab_size} or another tokenizer",
        )
    if data == "stdlib":
        ids = encode_documents(standard_library(), encoder)
    elif data.startswith("hf:"):
        ids = encode_documents(hugging_face(data[3:]), encoder)
    else:
        path = _existing(Path(data))
        ids = encode_documents([path.read_text(encoding="utf-8", errors="replace")], encoder)
    return Array(ids, vocab_size, data).check_all()


def _existing(path: Path) -> Path:
    where, fix = "in --data", "give synthetic, stdlib, a text or .bin file, or hf:NAME"
    if not path.exists():
        raise DataError(f"data file {path} does not exist", where, fix)
    if not path.is_file():
        raise DataError(f"{path} is no file", where, fix)
    if path.stat().st_size == 0:
        raise DataError(f"data file {path} is empty", where, FIX)
    return path


def open_bin(path: Path, vocab_size: int) -> Array:
    """Memory-map a .bin of uint16 ids: llm.c's layout (a header with magic and count), or nanoGPT's (nothing but ids)."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=min(LLMC_HEADER_INTS, size // 4))
    where = f"in {path}"
    if len(header) and 20240000 <= header[0] <= 20250000:  # a dated magic: some version of llm.c's
        if header[0] != LLMC_MAGIC or len(header) < 3 or header[1] != LLMC_VERSION:
            raise DataError(
                f"magic {header[0]} version {header[1] if len(header) > 1 else '?'}, expected {LLMC_MAGIC} version {LLMC_VERSION}", where, FIX
            )
        expected = 4 * LLMC_HEADER_INTS + 2 * int(header[2])
        if size != expected:
            raise DataError(f"{size} bytes, expected {expected} for the {header[2]} tokens its header counts", where, FIX)
        ids = np.memmap(path, dtype="<u2", mode="r", offset=4 * LLMC_HEADER_INTS)
    else:
        if size % 2:
            raise DataError(f"{size} bytes are no whole number of 2-byte tokens", where, FIX)
        ids = np.memmap(path, dtype="<u2", mode="r")
    return Array(ids, vocab_size, str(path)).check_all()


def encode_documents(documents: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """All documents one after another, each ended by the end-of-text id; uint16."""
    end = np.array([tokenizer.end_of_text], dtype=np.uint16)
    parts = [part for text in documents for part in (tokenizer.encode(text), end)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)


def standard_library() -> Iterable[str]:
    """The running Python's own standard library, file by file in sorted order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def hugging_face(name: str) -> Iterable[str]:
    """Texts of NAME_OR_PATH[:SPLIT[:COLUMN]]: a saved folder, or a dataset of the hub; split train, column text."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("hf: needs datasets", "in --data", "pip install 'gptscale[hf]'") from None
    path, _, rest = name.partition(":")
    split, _, column = rest.partition(":")
    split, column = split or "train", column or "text"
    try:
        found = datasets.load_from_disk(path) if Path(path).is_dir() else datasets.load_dataset(path)
        rows = found[split] if isinstance(found, dict) else found
        return list(rows[column])
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise DataError(f"dataset {name!r} cannot be read ({first})", "in --data", "give hf:NAME_OR_PATH:SPLIT:COLUMN") from None
