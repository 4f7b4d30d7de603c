"""`gptscale tokenize`: text to a .bin of token ids that training maps into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import tyro

from gptscale.common.data.bin_files import write_bin
from gptscale.common.data.documents import encode, open_documents
from gptscale.common.data.tokenizers import Tokenizer, get_tokenizer
from gptscale.common.errors import ConfigError, DataError
from gptscale.common.settings.checks import OptionNeed, check_output_file
from gptscale.common.settings.command_line import parse

# How many tokens are in memory at a time when a file is cut in two.
PART_TOKENS = 2**22


@dataclass(frozen=True)
class TokenizeOptions:
    """Encode texts, one after another and each ended by the end-of-text id, into a file for --data."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Text files, stdlib, or hf:NAME_OR_PATH[:SPLIT[:COLUMN]]."""
    out: Path
    """File to write, ending in .bin."""
    tokenizer: str = "bytes"
    """bytes | gpt2 (needs the hub or its cache) | a folder with vocab.json and merges.txt."""
    layout: Literal["nanogpt", "llmc"] = "nanogpt"
    """nanogpt (nothing but ids) | llmc (a header whose count tells when the file was cut)."""
    eval_out: Path | None = None
    """Second file, for the last part of the tokens, which --out then lacks."""
    eval_fraction: float = 0.05
    """Part of the tokens that goes to --eval-out."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("eval_fraction", lambda c: c.eval_out is not None, "there is one file", "add --eval-out FILE.bin"),
    )

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("nothing to tokenize", "on the command line", "name text files, stdlib or hf:NAME")
        if not 0.0 < self.eval_fraction < 1.0:
            raise ConfigError(f"eval_fraction {self.eval_fraction} is not in (0, 1)", "in --eval-fraction", "use 0.05")
        for option, path in (("--out", self.out), ("--eval-out", self.eval_out)):
            if path is not None:
                _check_output(path, option)
        if self.eval_out is not None and self.eval_out.resolve() == self.out.resolve():
            raise ConfigError(f"{self.out} is named twice", "in --eval-out", "choose another file")


def tokenize_files(options: TokenizeOptions) -> None:
    """Write what the options ask for, and print a line for each file.

    It needs little memory, however long the text. A file appears whole or not at all.
    Raises ConfigError, DataError (a missing or unreadable input) or StorageError (a full disk).
    """
    if binary := [name for name in options.inputs if name.endswith(".bin")]:
        raise DataError(f"{binary[0]} holds tokens already", "in the inputs", "give it to --data as it is")
    tokenizer = get_tokenizer(options.tokenizer)
    # All inputs are checked before a byte is written.
    documents = [open_documents(name, "in the inputs") for name in options.inputs]
    ids = encode(chain.from_iterable(documents), tokenizer)
    if options.eval_out is None:
        _write(options.out, ids, options, tokenizer)
        return
    # Only when all tokens are written is it known which are the last.
    all_tokens = options.out.with_name(f".{options.out.name}.{os.getpid()}.whole")
    try:
        n_tokens = write_bin(all_tokens, ids)
        cut = n_tokens - int(n_tokens * options.eval_fraction)
        if cut == n_tokens:
            raise DataError(f"{n_tokens} tokens, too few to hold any out", "in the inputs", "raise --eval-fraction")
        _write(options.eval_out, _parts(all_tokens, cut, n_tokens), options, tokenizer)
        _write(options.out, _parts(all_tokens, 0, cut), options, tokenizer)
    finally:
        all_tokens.unlink(missing_ok=True)


def _write(path: Path, ids: Iterator[np.ndarray], options: TokenizeOptions, tokenizer: Tokenizer) -> None:
    """Write a file, and print how to train on it."""
    n_tokens = write_bin(path, ids, options.layout)
    use = f"train with --data {path} --vocab-size {tokenizer.vocab_size} or more"
    print(f"{path}: {n_tokens:,} tokens, {path.stat().st_size / 2**20:,.1f} MiB; {use}")


def _parts(path: Path, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the tokens [start, stop) of a file in nanoGPT's layout, read instead of mapped, so that memory stays small."""
    for first in range(start, stop, PART_TOKENS):
        yield np.fromfile(path, dtype="<u2", count=min(PART_TOKENS, stop - first), offset=2 * first)


def _check_output(path: Path, option: str) -> None:
    """Raise ConfigError unless `path` names a .bin in a folder that can be written."""
    if path.suffix != ".bin":
        raise ConfigError(f"{path} does not end in .bin", f"in {option}", f"use {path}.bin")
    check_output_file(path, option)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"folder {path.parent} cannot be written", f"in {option}", "choose another folder")


def main(argv: Sequence[str]) -> int:
    """Write the files."""
    tokenize_files(parse(TokenizeOptions, argv, prog="gptscale tokenize", about=str(TokenizeOptions.__doc__)))
    return 0
