import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptscale.common.data import bin_files as bin_layout
from gptscale.common.data.bin_files import map_ids, write_bin
from gptscale.common.errors import DataError, StorageError

IDS = np.array([5, 0, 256, 50256, 7], dtype=np.uint16)


def header(*ints):
    return np.array(ints, dtype="<i4").tobytes().ljust(1024, b"\0")


@pytest.mark.parametrize(("layout", "first"), [("nanogpt", b""), ("llmc", header(20240520, 1, 5))])
def test_a_file_is_little_endian_ids_behind_the_header_of_its_layout(layout, first, tmp_path):
    path = tmp_path / "a.bin"
    assert write_bin(path, [IDS[:2], IDS[2:]], layout) == 5
    assert path.read_bytes() == first + b"\x05\0\0\0\x00\x01\x50\xc4\x07\0"
    assert map_ids(path).tolist() == IDS.tolist()


@given(ids=st.lists(st.integers(0, 50256), max_size=50), layout=st.sampled_from(["nanogpt", "llmc"]))
def test_no_gpt2_text_in_nanogpts_layout_can_look_like_llmcs(ids, layout, tmp_path_factory):
    path = tmp_path_factory.mktemp("bin") / "a.bin"
    write_bin(path, [np.array(ids, dtype=np.uint16)], layout)
    assert map_ids(path).tolist() == ids
    assert all((magic & 0xFFFF) > 50256 for magic in bin_layout.LLMC_MAGICS)


@pytest.mark.promise("S17 | a cut file of tokens | refused with both numbers")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x01\0\x02\0\x03", "5 bytes, expected an even number"),
        (header(20240520, 2, 5) + IDS.tobytes(), "magic 20240520 version 2, expected 20240520 version 1"),
        (header(20240801, 1, 5) + IDS.tobytes(), "magic 20240801 version 1, expected 20240520 version 1"),
        (header(20240520, 1, 5) + IDS.tobytes()[:-2], "1032 bytes, expected 1034 for the 5 tokens its header counts"),
        (header(20240520, 1, 5) + IDS.tobytes() + b"\0", "1035 bytes, expected 1034 for the 5 tokens"),
        (header(20240520, 1, -5) + IDS.tobytes(), "1034 bytes, expected 1014 for the -5 tokens"),
        (header(20240520, 1, 5)[:4], "magic 20240520 version None"),
        (header(20240520, 1, 5)[:8], "8 bytes, expected at least 1024"),
    ],
)
def test_a_damaged_file_is_refused_with_expected_and_actual(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{message}.*in .*a\.bin, check the file") as caught:
        map_ids(path)
    assert "\n" not in str(caught.value)


def test_more_tokens_than_llmcs_count_can_say_are_refused(tmp_path, monkeypatch):
    class Many(np.ndarray):
        def __len__(self):
            return 2**31

    with pytest.raises(StorageError, match=r"2147483648 tokens are more than llm.c's header can count"):
        write_bin(tmp_path / "a.bin", [IDS.view(Many)], "llmc")
    assert list(tmp_path.iterdir()) == []
