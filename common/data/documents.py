"""Text to train on as documents (the standard library, files, Hugging Face datasets), and their token ids.

A document is a sequence of pieces of text, so that a document of any size can be encoded in little memory.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from gptscale.common.data.bin_files import map_ids, write_bin
from gptscale.common.data.tokenizers import Tokenizer, check_hub
from gptscale.common.errors import ConfigError, DataError, first_line

Document = Iterable[str]
PIECE_BYTES = 2**20
# Every process reads and encodes text at every start. More than this is refused, to be encoded once into a file.
TEXT_CHARS_MAX = 2**30
HOW = "give synthetic, stdlib, a text or .bin file, or hf:NAME_OR_PATH:SPLIT:COLUMN"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def open_documents(data: str, where: str = "in --data") -> Iterable[Document]:
    """Return the documents that `stdlib`, `hf:...` or a text file's path names, to be read only when iterated.

    Raises DataError at once if there is nothing to read, and on iteration if a file is not UTF-8.
    """
    if data == "stdlib":
        return standard_library()
    if data.startswith("hf:"):
        return hugging_face(data[3:], where)
    return [read_pieces(existing_file(Path(data), where))]


def existing_file(path: Path, where: str) -> Path:
    """Return `path` if it is a file with something in it that this user may read, or raise DataError."""
    if not path.exists():
        raise DataError(f"data file {path} does not exist", where, HOW)
    if not path.is_file():
        raise DataError(f"{path} is {'a folder' if path.is_dir() else 'no file'}", where, HOW)
    if path.stat().st_size == 0:
        raise DataError(f"data file {path} is empty", where, "give a file with text or tokens in it")
    if not os.access(path, os.R_OK):
        raise DataError(f"data file {path} may not be read", where, f"chmod u+r {path}")
    return path


def standard_library() -> Iterable[Document]:
    """Return the running Python's own modules as documents, by sorted path, without tests and installed packages."""
    paths = []
    for folder, below, files in os.walk(sysconfig.get_path("stdlib")):
        # A folder taken out here is not walked: installed packages are many times the library.
        below[:] = [name for name in below if name not in NOT_LIBRARY]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    # PEP 263 lets a module have another encoding. A few U+FFFD are no reason to refuse the source.
    return (read_pieces(path, errors="replace") for path in sorted(paths))


def hugging_face(name: str, where: str) -> Iterable[Document]:
    """Return the rows of NAME_OR_PATH[:SPLIT[:COLUMN]] as documents.

    A path is a folder of `save_to_disk`, a name is a dataset of the hub. SPLIT is train and COLUMN is text by default.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"hf: needs the datasets library ({error})", where, "pip install 'gptscale[hf]'") from None
    path, _, rest = name.partition(":")
    split, _, column = rest.partition(":")
    split, column = split or "train", column or "text"
    local = Path(path).is_dir()
    if not local and (path.startswith((".", "/")) or path.count("/") > 1):
        # The hub's names are NAME or OWNER/NAME.
        raise DataError(f"folder {path} does not exist", where, HOW)
    if not local:
        fix = "give hf:FOLDER of a `save_to_disk`, or set HF_HUB_OFFLINE=1 if it is in the cache"
        check_hub(f"dataset {path!r}", where, fix)
    try:
        dataset = datasets.load_from_disk(path) if local else datasets.load_dataset(path)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"dataset {path!r} cannot be read ({first_line(error)})", where, HOW) from None
    if isinstance(dataset, dict) and split not in dataset:
        raise DataError(f"dataset {path!r} has no split {split!r}", where, f"use one of: {' '.join(map(str, dataset))}")
    rows = dataset[split] if isinstance(dataset, dict) else dataset
    if column not in rows.column_names:
        what = f"dataset {path!r} has no column {column!r}"
        raise DataError(what, where, f"use one of: {' '.join(rows.column_names)}")
    # A column of lists or of several fields has no dtype.
    kind = getattr(rows.features[column], "dtype", type(rows.features[column]).__name__)
    if kind not in ("string", "large_string"):
        raise DataError(f"column {column!r} of {path!r} is {kind}, expected string", where, HOW)
    return ([row[column] or ""] for row in rows.select_columns([column]))


def read_pieces(path: Path, errors: str = "strict") -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of about a MiB, cut only where a byte-pair encoding is cut as well.

    Raises DataError with the offset of the first byte that is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    position, text = 0, ""
    with path.open("rb") as file:
        more = True
        while more:
            raw = file.read(PIECE_BYTES)
            more = len(raw) == PIECE_BYTES
            try:
                text += decoder.decode(raw, final=not more)
            except UnicodeDecodeError as error:
                # The decoder's buffer begins with bytes of the piece before.
                offset = position + error.start - (len(error.object) - len(raw))
                fix = "convert it to UTF-8, for instance with iconv"
                raise DataError(f"byte {offset} is not UTF-8 text ({error.reason})", f"in {path}", fix) from None
            position += len(raw)
            cut = _last_boundary(text) if more else len(text)
            if cut:
                yield text[:cut]
                text = text[cut:]


def _last_boundary(text: str) -> int:
    """Return the place behind the last newline that stands between two visible characters, or 0 without one.

    GPT-2's pre-tokeniser ends a word there whatever follows (its `encoder.py`), so that the ids of the pieces are the ids
    of the whole text. Other newlines are no such place: white space is grouped by what comes after it.
    """
    cut = text.rfind("\n", 1, len(text) - 1)
    while cut > 0 and (text[cut - 1].isspace() or text[cut + 1].isspace()):
        cut = text.rfind("\n", 1, cut)
    return cut + 1 if cut > 0 else 0


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the ids (uint16) of all documents one after another, in parts, with the end-of-text id behind each."""
    end = np.array([tokenizer.end_of_text], dtype=np.uint16)
    for document in documents:
        for piece in document:
            yield tokenizer.encode(piece)
        yield end


def load_ids(data: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids (uint16) of the text that `data` names, from the user's cache folder where encoding takes long.

    Raises DataError as `open_documents` does, and for more text than should be encoded at every start.
    """
    texts = list(_bounded(open_documents(data), data))
    folder = cache_folder() if tokenizer.fingerprint else None
    if folder is None:
        return np.concatenate([np.empty(0, dtype=np.uint16), *encode(texts, tokenizer)])
    digest = hashlib.sha256(str(tokenizer.fingerprint).encode())
    for text in texts:
        digest.update(f"\0{sum(map(len, text))}\0".encode())
        digest.update("".join(text).encode("utf-8", errors="surrogatepass"))
    cached = folder / f"{digest.hexdigest()[:32]}.bin"
    if not cached.exists():
        # The length of this layout can be verified.
        write_bin(cached, encode(texts, tokenizer), "llmc")
    return map_ids(cached)


def _bounded(documents: Iterable[Document], data: str) -> Iterator[list[str]]:
    chars = 0
    for document in documents:
        pieces = []
        for piece in document:
            chars += len(piece)
            if chars > TEXT_CHARS_MAX:
                fix = f"encode it once: gptscale tokenize {data} --out data.bin"
                raise DataError(f"{data} has more than {TEXT_CHARS_MAX} characters", "in --data", fix)
            pieces.append(piece)
        yield pieces


def cache_folder() -> Path | None:
    """Return the folder that keeps encoded text, or None if it cannot be found or made, or if others may write there.

    It is gptscale/ in XDG_CACHE_HOME or ~/.cache.
    """
    # The XDG specification has a relative value ignored.
    if os.environ.get("XDG_CACHE_HOME", "/")[:1] != "/":
        return None
    # Here, because only text needs it.
    from gptscale.ops.build import cache as build_cache

    try:
        folder = build_cache.private(build_cache.root())
    except build_cache.CacheFolderError:
        # A cache only saves time, so that a user without one can train all the same.
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None
