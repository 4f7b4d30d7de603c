import importlib
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptscale.common.data import sources as tokens
from gptscale.common.data.bin_files import write_bin
from gptscale.common.data.sources import Array, SourceSpan, Synthetic, fingerprint, open_source
from gptscale.common.errors import ConfigError, DataError
from gptscale.common.settings.run_config import RunConfig


@pytest.fixture(params=["synthetic", "stdlib", "text", "nanogpt", "llmc"])
def source(request, tmp_path):
    """Return one source of every kind."""
    data = request.param
    if data == "text":
        data = str(tmp_path / "a.txt")
        Path(data).write_text("some text to learn from\n" * 100)
    elif data in ("nanogpt", "llmc"):
        write_bin(tmp_path / "a.bin", [np.arange(2000, dtype=np.uint16) % 257], data)
        data = str(tmp_path / "a.bin")
    return open_source(data, tokenizer="bytes", vocab_size=257, seed=5)


def test_every_kind_keeps_the_contract(source):
    whole = source.read(0, 1000)
    assert whole.dtype == np.int64
    assert 0 <= whole.min() <= whole.max() < source.vocab_size == 257
    assert np.array_equal(source.read(137, 100), whole[137:237])
    assert len(source.read(len(source) - 3, 3)) == 3
    assert len(source.read(5, 0)) == 0
    assert len(source.fingerprint) == 16
    assert int(source.fingerprint, 16) >= 0
    for start, count in ((len(source) - 3, 4), (-1, 2), (0, -1)):
        with pytest.raises(IndexError):
            source.read(start, count)


@given(start=st.integers(0, 2**31 - 1000), seed=st.integers(0, 2**31 - 1), vocab_size=st.integers(2, 2**31))
def test_synthetic_ids_are_a_function_of_seed_and_position(start, seed, vocab_size):
    ids = Synthetic(vocab_size, seed).read(start, 1000)
    assert np.array_equal(ids[300:310], Synthetic(vocab_size, seed).read(start + 300, 10))
    assert ids.min() >= 0
    assert ids.max() < vocab_size


def test_synthetic_ids_are_uniform_and_seeds_differ():
    ids = Synthetic(257, 1).read(10**9, 257 * 400)
    counts = np.bincount(ids, minlength=257)
    # This is a chi-square test, with a limit of five sigma.
    assert ((counts - 400) ** 2 / 400).sum() < 256 + 5 * np.sqrt(2 * 256)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02
    assert (Synthetic(257, 2).read(10**9, 1000) == ids[:1000]).mean() < 0.02
    assert Synthetic(257, 1).fingerprint != Synthetic(257, 2).fingerprint


def test_a_fingerprint_tells_content_not_layout(tmp_path):
    ids = np.arange(1000, dtype=np.uint16)
    write_bin(tmp_path / "a.bin", [ids])
    write_bin(tmp_path / "b.bin", [ids], "llmc")
    first, second = (open_source(str(tmp_path / name), vocab_size=1000).fingerprint for name in ("a.bin", "b.bin"))
    changed = ids.copy()
    changed[999] = 0
    assert first == second == fingerprint(ids)
    assert len({first, fingerprint(changed), fingerprint(ids[:-1]), fingerprint(np.append(ids, 0))}) == 4


def test_a_sampled_fingerprint_still_sees_both_ends_and_growth(monkeypatch):
    monkeypatch.setattr(tokens, "SCAN_BYTES_MAX", 2**21)
    ids = np.zeros(2**21, dtype=np.uint16)
    prints = {fingerprint(ids), fingerprint(np.append(ids, np.uint16(0)))}
    for place in (0, -1):
        changed = ids.copy()
        changed[place] = 1
        prints.add(fingerprint(changed))
    assert len(prints) == 4


@pytest.mark.promise("S19 | an id beyond the vocabulary | named with file, offset and id")
@pytest.mark.parametrize("layout", ["nanogpt", "llmc"])
def test_an_id_outside_the_vocabulary_is_named_when_opening(tmp_path, layout):
    ids = np.zeros(10_000, dtype=np.uint16)
    ids[7777:] = 60000
    write_bin(tmp_path / "a.bin", [ids], layout)
    for size in (50257, 60000):
        said = rf"token id 60000 is outside the vocabulary of {size}, in .*a\.bin at token 7777"
        with pytest.raises(DataError, match=said):
            open_source(str(tmp_path / "a.bin"), vocab_size=size)
    assert len(open_source(str(tmp_path / "a.bin"), vocab_size=60001)) == 10_000


@pytest.mark.promise("S19")
def test_a_file_too_large_to_scan_is_checked_read_by_read(monkeypatch):
    monkeypatch.setattr(tokens, "SCAN_BYTES_MAX", 2**21)
    ids = np.zeros(2**21, dtype=np.uint16)
    ids[1_000_005] = 300
    source = Array(ids, 257, "large.bin")
    assert source.read(1_000_000, 5).tolist() == [0] * 5
    ids[1_000_003] = 7
    assert SourceSpan(source, 1_000_000, 1_000_010).read(3, 2).tolist() == [7, 0]
    with pytest.raises(DataError, match=r"token id 300 .* in large\.bin at token 1000005"):
        SourceSpan(source, 1_000_000, 1_000_010).read(0, 10)


# A reader that waits for a pipe fails here.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.txt", "a.bin"])
def test_what_is_no_file_to_read_is_refused_by_name(tmp_path, monkeypatch, name):
    path = tmp_path / name

    def is_refused(reason):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DataError, match=f"{path} {reason}") as caught:
            open_source(str(path), vocab_size=257)
        assert "\n" not in str(caught.value)
        assert sorted(tmp_path.rglob("*")) == before

    is_refused("does not exist, in --data, give synthetic")
    path.mkdir()
    is_refused("is a folder, in --data")
    path.rmdir()
    os.mkfifo(path)
    is_refused("is no file, in --data")
    path.unlink()
    path.touch()
    is_refused("is empty")
    path.write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    is_refused("may not be read")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"tokenizer bytes has 257 ids, the model's vocabulary 100.*--vocab-size 257"):
        open_source("stdlib", tokenizer="bytes", vocab_size=100)
    assert open_source("synthetic", tokenizer="bytes", vocab_size=100).vocab_size == 100


def test_the_standard_library_is_read_once_by_a_process_and_its_forks(monkeypatch):
    began = time.process_time()
    (name,) = RunConfig(data="stdlib").data_imports
    importlib.import_module(name)
    assert time.process_time() - began < 3
    # Whatever opens it from now on finds it.
    monkeypatch.setattr(tokens, "load_ids", lambda *args: pytest.fail("it is read again"))
    opened = [open_source("stdlib", vocab_size=size) for size in (257, 512)]
    ids = opened[0].read(0, len(opened[0])).astype(np.uint16)
    assert len(ids) > 5_000_000
    assert [source.fingerprint for source in opened] == [fingerprint(ids)] * 2
    assert RunConfig(data="synthetic").data_imports == []
