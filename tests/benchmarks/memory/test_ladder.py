"""The file from which an earlier call goes on."""

import pytest

from benchmarks.memory.ladder import read_rows
from gptscale.common.errors import ConfigError


def test_another_csv_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="other columns"):
        read_rows(tmp_path / "x.csv")
