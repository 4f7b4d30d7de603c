"""Token sources: everything that a model can train on, alike to whoever reads it.

Opening a source checks it, so that a run does not meet a bad file half way.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np

from gptscale.common.data.bin_files import map_ids
from gptscale.common.data.documents import existing_file, load_ids
from gptscale.common.data.tokenizers import ByteTokenizer, get_tokenizer
from gptscale.common.errors import ConfigError, DataError

# A larger file is sampled when it is opened, and its ids are checked read by read.
SCAN_BYTES_MAX = 2**30
PIECE_TOKENS = 2**23


class Synthetic:
    """Random ids, each a pure function of seed and position, so that every place of a long text costs the same."""

    id_bytes: np.ndarray | None = None

    def __init__(self, vocab_size: int, seed: int, length: int = 2**31) -> None:
        self.name, self.vocab_size, self.seed, self.length = "synthetic", vocab_size, seed, length
        self.fingerprint = hashlib.sha256(f"synthetic {vocab_size} {seed} {length}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int) -> np.ndarray:
        """Return SplitMix64 (Steele et al. 2014) of each position, reduced to the vocabulary by its high bits."""
        _check_exists(self, start, count)
        # The shift keeps the positions of two seeds apart.
        x = np.arange(start, start + count, dtype=np.uint64) + np.uint64(self.seed << 32)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return ((x >> np.uint64(32)) * np.uint64(self.vocab_size) >> np.uint64(32)).astype(np.int64)


class Array:
    """Ids (uint16) in memory or memory-mapped.

    They are checked when the source is opened: DataError for an id outside the vocabulary.
    known: the fingerprint of the ids, if it was computed before.
    """

    def __init__(
        self, ids: np.ndarray, vocab_size: int, name: str, known: str = "", id_bytes: np.ndarray | None = None
    ) -> None:
        self.ids, self.vocab_size, self.name, self.id_bytes = ids, vocab_size, name, id_bytes
        if ids.nbytes <= SCAN_BYTES_MAX:
            for start in range(0, len(ids), PIECE_TOKENS):
                self._check(ids[start : start + PIECE_TOKENS], start)
        self.fingerprint = known or fingerprint(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens as int64, checked again because a large file is not scanned when it is opened."""
        _check_exists(self, start, count)
        ids = self.ids[start : start + count]
        self._check(ids, start)
        return ids.astype(np.int64)

    def _check(self, ids: np.ndarray, start: int) -> None:
        if len(ids) and int(ids.max()) >= self.vocab_size:
            first = int(np.argmax(ids >= self.vocab_size))
            what = f"token id {int(ids[first])} is outside the vocabulary of {self.vocab_size}"
            fix = "use the --model or --vocab-size that the file was made for"
            raise DataError(what, f"in {self.name} at token {start + first}", fix)


class SourceSpan:
    """The part [start, stop) of another source."""

    def __init__(self, source: Synthetic | Array, start: int, stop: int) -> None:
        self.source, self.start, self.stop = source, start, stop
        self.name, self.vocab_size, self.fingerprint = source.name, source.vocab_size, source.fingerprint
        self.id_bytes = source.id_bytes

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens counted from the span's start, and never one beyond its end, which may be held out."""
        _check_exists(self, start, count)
        return self.source.read(self.start + start, count)


# A sequence of token ids. name: the value of `--data`, for errors. vocab_size: every id that `read` returns is below it.
# fingerprint: 16 hex digits that change when the content does. id_bytes: (ids,), the bytes of text that each id stands for, None
# where that is unknown. read(start, count): tokens [start, start + count) as int64, or IndexError if some of them do not exist.
TokenSource = Synthetic | Array | SourceSpan


def _check_exists(source: TokenSource, start: int, count: int) -> None:
    if not 0 <= start <= start + count <= len(source):
        raise IndexError(f"tokens {start} to {start + count} of {source.name}, which has {len(source)}")


def fingerprint(ids: np.ndarray) -> str:
    """Return 16 hex digits of SHA-256 over the number of ids and the ids, whatever file layout they came in.

    Of more than 1 GiB only 64 evenly spaced MiB are hashed, both ends among them, so that opening takes seconds.
    """
    digest = hashlib.sha256(str(len(ids)).encode())
    if ids.nbytes <= SCAN_BYTES_MAX:
        digest.update(np.ascontiguousarray(ids).data)
    else:
        piece = 2**20 // ids.itemsize
        for start in np.linspace(0, len(ids) - piece, 64).astype(np.int64):
            digest.update(np.ascontiguousarray(ids[start : start + piece]).data)
    return digest.hexdigest()[:16]


def open_source(data: str, *, tokenizer: str = "bytes", vocab_size: int, seed: int = 0) -> Synthetic | Array:
    """Open and check the source that `--data` names, whose ids fit `vocab_size`.

    It writes nothing but a cache of encoded text. Raises DataError (file, expected and actual) or ConfigError (a tokenizer
    whose ids the model does not have).
    """
    if data == "synthetic":
        return Synthetic(vocab_size, seed)
    if data.endswith(".bin"):
        return Array(map_ids(existing_file(Path(data), "in --data")), vocab_size, data)
    encoder = get_tokenizer(tokenizer)
    if encoder.vocab_size > vocab_size:
        what = f"tokenizer {tokenizer} has {encoder.vocab_size} ids, the model's vocabulary {vocab_size}"
        raise ConfigError(what, "in --tokenizer", f"use --vocab-size {encoder.vocab_size} or another tokenizer")
    if (data, tokenizer) == ("stdlib", "bytes"):
        ids, known = library_ids()
        return Array(ids, vocab_size, data, known, encoder.id_bytes)
    return Array(load_ids(data, encoder), vocab_size, data, id_bytes=encoder.id_bytes)


@functools.cache
def library_ids() -> tuple[np.ndarray, str]:
    """Return the ids of the standard library's bytes, and their fingerprint. The text is read once in each process."""
    ids = load_ids("stdlib", ByteTokenizer())
    return ids, fingerprint(ids)
