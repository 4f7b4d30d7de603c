"""Floors of `python -m benchmarks.model`: read strictly, and a ratio that is missing has not reached its floor."""

import pytest

from benchmarks.model.floors import Floor, check_floors, read_floors
from gptscale.common.errors import ConfigError


def test_floors_of_ratios_that_are_measured(tmp_path):
    file = tmp_path / "floors.csv"
    file.write_text("name,floor\nover_handout,1.4\nshare_of_roofline,0.8\n")
    assert read_floors(file, ["handout"]) == [Floor("over_handout", 1.4), Floor("share_of_roofline", 0.8)]
    with pytest.raises(ConfigError, match="no ratio 'over_handout' is measured"):
        read_floors(file, ["minimal"])
    file.write_text("name,floor\nover_handout,high\n")
    with pytest.raises(ConfigError, match=r"is no CSV with columns name and floor \(could not convert"):
        read_floors(file, ["handout"])


@pytest.mark.parametrize(("ratios", "status"), [({"a": 1.4}, 0), ({"a": 1.39}, 1), ({"a": float("nan")}, 1), ({}, 1)])
def test_a_floor_is_reached_or_not(ratios, status, capsys):
    assert check_floors(ratios, [Floor("a", 1.4)]) == status
    assert capsys.readouterr().out.endswith("NOT REACHED\n" if status else ": reached\n")
