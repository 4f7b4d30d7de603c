"""Files of runs as a comparison reads them: whole lines of bounded length, and nothing outside the results folder."""

import io

import pytest

from gptscale.results.comparison.run_files import DamagedFileError, clip, run_file, whole_lines


def test_a_last_line_without_a_newline_is_left_out():
    assert list(whole_lines(io.BytesIO(b"a\nb\nc"))) == [b"a\n", b"b\n"]
    assert list(whole_lines(io.BytesIO(b""))) == []


def test_a_text_is_clipped_to_a_length():
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefg", 6) == "abc..."


@pytest.mark.parametrize("run_id", ["../secret", "a/b", "", "\0"])
def test_a_name_cannot_lead_out_of_the_results(run_id, tmp_path):
    with pytest.raises(DamagedFileError, match="is no name of a run"), run_file(str(tmp_path), run_id, "run.json"):
        pass
