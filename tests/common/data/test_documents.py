import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptscale.common.data import documents
from gptscale.common.data.bin_files import map_ids
from gptscale.common.data.documents import cache_folder, encode, load_ids, open_documents, read_pieces
from gptscale.common.data.tokenizers import ByteTokenizer, get_tokenizer
from gptscale.common.errors import ConfigError, DataError

TWO = ["first\nfile\n", "second"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab1é😀\n\r\t '.", min_size=1, max_size=120), piece_bytes=st.integers(1, 40))
def test_the_ids_of_the_pieces_are_the_ids_of_the_whole(bpe_folder, tmp_path, text, piece_bytes):
    path, bpe = tmp_path / "a.txt", get_tokenizer(bpe_folder)
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", piece_bytes)
        pieces = list(read_pieces(path))
        assert "".join(pieces) == text
        assert np.concatenate([bpe.encode(piece) for piece in pieces]).tolist() == bpe.encode(text).tolist()


def test_a_large_file_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_text("word\n" * 1000)
    pieces = list(read_pieces(path))
    assert len(pieces) > 40
    assert max(map(len, pieces)) <= 200


def test_each_document_is_ended_by_the_end_of_text():
    ids = np.concatenate(list(encode([["a", "b"], [], ["c"]], ByteTokenizer())))
    assert ids.dtype == np.uint16
    assert ids.tolist() == [97, 98, 256, 256, 99, 256]


@pytest.mark.parametrize(
    ("content", "piece_bytes", "offset"),
    [(b"abc\xffdef", 1024, 3), (b"abcdef\xc3\x28", 4, 6), (b"abc\xe2\x82", 4, 3), (b"\x93NUMPY\x01\0", 1024, 0)],
)
def test_what_is_not_utf8_is_refused_at_its_offset(tmp_path, monkeypatch, content, piece_bytes, offset):
    monkeypatch.setattr(documents, "PIECE_BYTES", piece_bytes)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"byte {offset} is not UTF-8 text.*in .*a\.txt, convert it"):
        load_ids(str(tmp_path / "a.txt"), ByteTokenizer())


def test_more_text_than_should_be_encoded_at_every_start_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "TEXT_CHARS_MAX", 10)
    (tmp_path / "a.txt").write_text("0123456789")
    assert len(load_ids(str(tmp_path / "a.txt"), ByteTokenizer())) == 11
    (tmp_path / "a.txt").write_text("0123456789x")
    with pytest.raises(DataError, match=r"more than 10 characters.*gptscale tokenize .*a.txt --out"):
        load_ids(str(tmp_path / "a.txt"), ByteTokenizer())


def test_the_standard_library_is_python_files_by_sorted_path(tmp_path, monkeypatch):
    for name in ("b.py", "a/z.py", "a.py", "a/tests/t.py", "site-packages/s.py", "test/u.py", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    texts = ["".join(document) for document in open_documents("stdlib")]
    assert texts == ["a/z.py", "a.py", "b.py", "\ufffd"]


def test_byte_pairs_are_encoded_once_and_kept_for_this_user_alone(bpe_folder, tmp_path, monkeypatch):
    path, bpe, encoded = tmp_path / "a.txt", get_tokenizer(bpe_folder), []
    own_encode = bpe.encode
    monkeypatch.setattr(bpe, "encode", lambda text: encoded.append(text) or own_encode(text))
    path.write_text("hello world\n")
    ids = load_ids(str(path), bpe)
    assert bpe.decode(ids) == "hello world\n"
    assert load_ids(str(path), bpe).tolist() == ids.tolist()
    assert len(encoded) == 1
    folder = cache_folder()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [map_ids(p).tolist() for p in folder.iterdir()] == [ids.tolist()]
    path.write_text("hello world!")
    assert bpe.decode(load_ids(str(path), bpe)) == "hello world!"
    assert len(encoded) == 2


def test_a_cut_cache_file_is_refused_not_trained_on(bpe_folder, tmp_path):
    (tmp_path / "a.txt").write_text("hello world\n")
    load_ids(str(tmp_path / "a.txt"), get_tokenizer(bpe_folder))
    (cached,) = (tmp_path / "cache" / "gptscale").iterdir()
    cached.write_bytes(cached.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"expected .* in {cached}"):
        load_ids(str(tmp_path / "a.txt"), get_tokenizer(bpe_folder))


@pytest.mark.parametrize("home", ["relative", "/proc/nowhere", "/dev/null"])
def test_without_a_place_for_the_cache_nothing_is_written(bpe_folder, tmp_path, monkeypatch, home):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("hello")
    assert len(load_ids("a.txt", get_tokenizer(bpe_folder)))
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture
def saved(tmp_path):
    datasets: Any = pytest.importorskip("datasets")
    nested = {"talk": [["hello"], []], "pair": [{"a": "x"}, {"a": "y"}]}
    rows = datasets.Dataset.from_dict({"text": TWO, "code": ["x", None], "n": [1, 2], **nested})
    datasets.DatasetDict({"train": rows, "extra": rows.select([1])}).save_to_disk(str(tmp_path / "saved"))
    rows.save_to_disk(str(tmp_path / "plain"))
    return f"hf:{tmp_path / 'saved'}"


def test_a_saved_dataset_is_a_document_per_row(saved, tmp_path):
    assert [list(document) for document in open_documents(saved)] == [["first\nfile\n"], ["second"]]
    assert [list(document) for document in open_documents(f"{saved}:extra")] == [["second"]]
    assert [list(document) for document in open_documents(f"{saved}:train:code")] == [["x"], [""]]
    assert len(list(open_documents(f"hf:{tmp_path / 'plain'}"))) == 2
    assert ByteTokenizer().decode(load_ids(saved, ByteTokenizer())) == "first\nfile\nsecond"


def test_a_datasets_wrong_split_or_column_names_the_right_ones(saved, tmp_path):
    (tmp_path / "folder").mkdir()
    for data, said in {
        f"{saved}:test": r"no split 'test'.*use one of: train extra",
        f"{saved}:train:texts": r"no column 'texts'.*use one of: text code n talk pair",
        f"{saved}:train:n": r"column 'n' of .* is int64, expected string",
        f"{saved}:train:talk": r"column 'talk' of .* is [Ll]ist, expected string",
        f"{saved}:train:pair": r"column 'pair' of .* is dict, expected string",
        f"hf:{tmp_path / 'folder'}": "cannot be read",
        f"hf:{tmp_path / 'gone'}:train": r"folder .*gone does not exist",
    }.items():
        with pytest.raises(DataError, match=said):
            open_documents(data)


def test_a_dataset_of_an_unreachable_hub_is_an_error_at_once(unreachable_hub):
    pytest.importorskip("datasets")
    begin = time.perf_counter()
    with pytest.raises(DataError, match=r"dataset 'wikitext' is not on this machine.*save_to_disk"):
        open_documents("hf:wikitext")
    assert time.perf_counter() - begin < 20


def test_without_the_datasets_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"hf: needs the datasets library .*, in --data, pip install 'gptscale.hf.'"):
        open_documents("hf:wikitext")
