import json
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptscale.common.data import tokenizers
from gptscale.common.data.tokenizers import ByteTokenizer, get_tokenizer
from gptscale.common.errors import ConfigError, DataError

words = st.lists(st.sampled_from(["<|endoftext|>", " ", "a", " .", "'s", "\n"])).map("".join)
text_or_code = st.one_of(st.text(max_size=40), words)


@given(text=text_or_code)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(np.append(ids, tokenizer.end_of_text)) == text


def test_bytes_need_nothing_and_end_texts_with_256():
    tokenizer = get_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.fingerprint) == (257, 256, None)
    assert tokenizer.encode("half a pair \ud800").tolist()[-1] == ord("?")
    assert tokenizer.decode(np.array([0xFF, 0x41])) == "\ufffdA"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=text_or_code)
def test_byte_pairs_round_trip_and_no_text_makes_the_end_of_text(bpe_folder, text):
    tokenizer = get_tokenizer(bpe_folder)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.end_of_text not in ids
    assert len(ids) == 0 or ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(np.append(ids, tokenizer.end_of_text).astype(np.uint16)) == text
    # They make bits per byte of a loss.
    assert tokenizer.id_bytes[ids].sum() == len(text.encode())
    assert tokenizer.id_bytes[tokenizer.end_of_text] == 0


def test_byte_pairs_are_shorter_than_bytes_and_their_vocabulary_has_a_name(bpe_folder):
    tokenizer = get_tokenizer(bpe_folder)
    assert len(tokenizer.encode("import os\nimport os\n")) < 20
    assert tokenizer.decode(tokenizer.encode("half a pair \ud800")) == "half a pair ?"
    assert tokenizer.fingerprint == get_tokenizer(bpe_folder).fingerprint
    assert len(str(tokenizer.fingerprint)) == 64


@pytest.mark.parametrize("vocabulary", ["[1, 2", "{}", '{"a": "x"}'])
def test_a_folder_that_lacks_a_file_or_has_damaged_ones_is_one_line(tmp_path, vocabulary):
    (tmp_path / "vocab.json").write_text(vocabulary)
    with pytest.raises(DataError, match=r"lacks merges\.txt, in --tokenizer, give a folder"):
        get_tokenizer(str(tmp_path))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nx y\n")
    with pytest.raises(DataError, match="holds no byte-pair encoding") as caught:
        get_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_beyond_16_bits_is_refused(tmp_path):
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 65537)}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ConfigError, match="has 65537 ids, at most 65536 fit 16 bits"):
        get_tokenizer(str(tmp_path))


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(ConfigError, match="unknown tokenizer 'gpt3', in --tokenizer, use bytes, gpt2, or a folder"):
        get_tokenizer("gpt3")


def test_gpt2_comes_from_the_hubs_cache_without_a_network(bpe_folder, tmp_path, monkeypatch, unreachable_hub):
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in tokenizers.BPE_FILES:
        (snapshot / name).write_bytes((Path(bpe_folder) / name).read_bytes())
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    assert get_tokenizer("gpt2").fingerprint == get_tokenizer(bpe_folder).fingerprint


def test_gpt2_without_network_or_cache_is_an_error_soon(monkeypatch, unreachable_hub):
    """Nothing answers, or a hub takes the call and says nothing."""
    monkeypatch.setattr(tokenizers, "HUB_S_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, reason in ((9, "refused"), (silent.getsockname()[1], "timed out")):
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
            begin = time.perf_counter()
            said = f"tokenizer 'gpt2' is not on this machine, .*cannot be reached .*{reason}.*give a folder with"
            with pytest.raises(DataError, match=said):
                get_tokenizer("gpt2")
            assert time.perf_counter() - begin < 20


def test_without_transformers_the_error_says_how_to_get_it(bpe_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("gpt2", bpe_folder):
        with pytest.raises(ConfigError, match=r"needs transformers .*, in --tokenizer, pip install 'gptscale\[hf\]'"):
            get_tokenizer(name)
