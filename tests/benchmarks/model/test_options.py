"""Which contenders there are on a machine, and when their results are comparable."""

import pytest

from benchmarks.model.floors import read_floors
from benchmarks.model.options import ContenderResult, check_losses, comparable
from gptscale.common.errors import ConfigError, GptscaleError


def test_fp8_alone_is_not_comparable_yet():
    fp8, single = ContenderResult("single_fp8", times_s=[[1.0]]), ContenderResult("single")
    assert not comparable([fp8, single], rounds=1)
    single.times_s.append([1.0])
    assert comparable([fp8, single], rounds=1)
    assert not comparable([fp8, single], rounds=2)
    single.failure = "out of memory"
    assert not comparable([fp8, single], rounds=1)


def test_no_loss_is_not_the_same_loss():
    a, b = ContenderResult("single", losses=[1.0, 2.0]), ContenderResult("minimal", losses=[1.0, float("nan")])
    with pytest.raises(Exception, match="step 2 has loss nan in minimal"):
        check_losses([a, b], 1e-4)


def test_fp8_may_be_further_apart_and_is_no_measure():
    fp8, a = ContenderResult("single_fp8", losses=[5.02, 4.02]), ContenderResult("single", losses=[5.0, 4.0])
    check_losses([fp8, a, ContenderResult("minimal", losses=[5.001, 4.001])], 3e-3)
    with pytest.raises(GptscaleError, match=r"loss 4\.100000 in minimal and 4\.000000 in single: more than 0\.003"):
        check_losses([fp8, a, ContenderResult("minimal", losses=[5.0, 4.1])], 3e-3)
    fp8.losses[1] = 4.04
    with pytest.raises(GptscaleError, match=r"loss 4\.040000 in single_fp8 and .*: more than 0\.03 apart"):
        check_losses([fp8, a], 3e-3)
    check_losses([], 3e-3)


def test_a_floor_of_a_ratio_that_is_not_measured_is_refused(tmp_path):
    (tmp_path / "floors.csv").write_text("name,floor\nover_handout,1.4\n")
    with pytest.raises(ConfigError, match="no ratio 'over_handout' is measured"):
        read_floors(tmp_path / "floors.csv", ["minimal"])
