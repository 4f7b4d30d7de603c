from pathlib import Path

import numpy as np
import pytest

from gptscale.common.data.bin_files import map_ids
from gptscale.common.data.loader import split
from gptscale.common.data.sources import open_source
from gptscale.common.data.tokenizers import ByteTokenizer
from gptscale.common.errors import ConfigError, DataError, StorageError
from gptscale.launchers.commands import tokenize_text as tokenize
from gptscale.launchers.commands.tokenize_text import TokenizeOptions, tokenize_files

TEXTS = {"a.txt": "first file\n", "b.txt": "the second, naïve file\r\n"}


@pytest.fixture
def inputs(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_bytes(text.encode())
    return tuple(str(tmp_path / name) for name in TEXTS)


@pytest.mark.parametrize("layout", ["nanogpt", "llmc"])
def test_what_is_written_reads_back_as_the_texts(inputs, tmp_path, layout, capsys):
    out = tmp_path / "train.bin"
    assert tokenize.main([*inputs, "--out", str(out), "--layout", layout]) == 0
    source = open_source(str(out), vocab_size=257)
    ids = source.read(0, len(source))
    documents = np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]
    assert [ByteTokenizer().decode(document) for document in documents] == list(TEXTS.values())
    assert len(ids) == sum(len(text.encode()) + 1 for text in TEXTS.values())
    assert out.stat().st_size == 2 * len(ids) + (1024 if layout == "llmc" else 0)
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: {len(ids)} tokens")
    assert f"--data {out} --vocab-size 257" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt", "train.bin"]


@pytest.mark.parametrize("layout", ["nanogpt", "llmc"])
def test_the_held_out_file_is_the_part_that_training_would_hold_out(inputs, tmp_path, layout, monkeypatch, capsys):
    monkeypatch.setattr(tokenize, "PART_TOKENS", 7)
    whole, out, eval_out = (tmp_path / name for name in ("whole.bin", "train.bin", "val.bin"))
    tokenize_files(TokenizeOptions(inputs, whole))
    words = ["--out", str(out), "--layout", layout, "--eval-out", str(eval_out), "--eval-fraction", "0.2"]
    assert tokenize.main([*inputs, *words]) == 0
    train, held_out = split(open_source(str(whole), vocab_size=257), seq_len=1, eval_fraction=0.2)
    assert map_ids(out).tolist() == train.read(0, len(train)).tolist()
    assert map_ids(eval_out).tolist() == held_out.read(0, len(held_out)).tolist()
    said = [line.partition(" tokens, ")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[1:] == [f"{eval_out}: {len(held_out)}", f"{out}: {len(train)}"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_standard_library_is_an_input_like_any_other(tmp_path):
    tokenize_files(TokenizeOptions(("stdlib",), tmp_path / "stdlib.bin"))
    written = open_source(str(tmp_path / "stdlib.bin"), vocab_size=257)
    assert written.fingerprint == open_source("stdlib", vocab_size=257).fingerprint


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"inputs": ()}, ConfigError, "nothing to tokenize"),
        ({"inputs": ("gone.txt",)}, DataError, r"gone\.txt does not exist, in the inputs"),
        ({"inputs": ("old.bin",)}, DataError, r"old\.bin holds tokens already"),
        ({"out": Path("train.txt")}, ConfigError, r"train\.txt does not end in \.bin.*use train\.txt\.bin"),
        ({"out": Path("gone/train.bin")}, ConfigError, r"gone/train\.bin is in a folder that does not exist, in --out"),
        ({"out": Path("folder.bin")}, ConfigError, r"folder\.bin is a folder"),
        ({"eval_out": Path("./train.bin")}, ConfigError, r"train\.bin is named twice"),
        ({"eval_fraction": 0.0}, ConfigError, r"eval_fraction 0\.0 is not in \(0, 1\)"),
        ({"eval_fraction": float("nan")}, ConfigError, "eval_fraction nan"),
        ({"tokenizer": "gpt3"}, ConfigError, "unknown tokenizer"),
        ({"eval_out": Path("val.bin"), "eval_fraction": 0.001}, DataError, "too few to hold any out"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(inputs, tmp_path, monkeypatch, changes, kind, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.bin").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind, match=message) as caught:
        tokenize_files(TokenizeOptions(**{"inputs": inputs, "out": Path("train.bin"), **changes}))
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_input_that_turns_out_bad_half_way_leaves_the_old_file(inputs, tmp_path):
    out = tmp_path / "train.bin"
    tokenize_files(TokenizeOptions(inputs, out))
    before = out.read_bytes()
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"not UTF-8 text.*b\.txt"):
        tokenize_files(TokenizeOptions(inputs, out, eval_out=tmp_path / "val.bin"))
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt", "train.bin"]


def test_a_full_disk_is_named_and_leaves_nothing(inputs, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"No space left on device.*train\.bin"):
        tokenize_files(TokenizeOptions(inputs, tmp_path / "train.bin"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt"]
