"""Options of sbatch are taken out of a command line as they are, and nothing else is."""

import pytest

from gptscale.common.errors import ConfigError
from gptscale.launchers.run.allocation import split_sbatch


def test_options_with_and_without_a_value():
    words = "ddp --partition gpu --time=1:00:00 --steps 5 --exclusive --partition-of 3 --hold".split()
    sbatch, others = split_sbatch(words)
    assert sbatch == ["--partition=gpu", "--time=1:00:00", "--exclusive", "--hold"]
    assert others == "ddp --steps 5 --partition-of 3".split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--account"], "--account has no value"),
        (["--account", "--steps", "5"], "--account has no value"),
        (["--comment=a\n#SBATCH --uid=0"], "--comment has a value of several lines"),
    ],
)
def test_a_value_that_is_missing_or_would_be_another_line_of_the_script(words, message):
    with pytest.raises(ConfigError, match=message):
        split_sbatch(words)
