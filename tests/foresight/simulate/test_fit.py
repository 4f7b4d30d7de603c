"""`gptscale simulate --fit`: which number of a command is meant, and the largest that fits."""

import pytest

from gptscale.common.errors import ConfigError
from gptscale.foresight.simulate.fit import MOST, most_that_fits, place_of


@pytest.mark.parametrize(
    ("command", "name", "found"),
    [
        ("python a.py --batch-size 8", "batch_size", (3, "", 8)),
        ("python a.py --batch_size=8 --steps 3", "--batch-size", (2, "--batch_size=", 8)),
        ("python a.py train.batch=2 batch=4", "batch", (3, "batch=", 4)),
        ("torchrun a.py --training.batch_size 2", "training.batch_size", (3, "", 2)),
    ],
)
def test_a_number_is_found_however_it_is_written(command, name, found):
    assert place_of(command.split(), name) == found


@pytest.mark.parametrize(
    "command", ["python a.py", "python a.py --batch x", "python --batch 1 --batch 2", "p --batch 0"]
)
def test_a_number_that_is_not_there_once_is_refused(command):
    with pytest.raises(ConfigError, match="in --fit, write the command with --batch 1"):
        place_of(command.split(), "batch")


@pytest.mark.parametrize(("start", "most"), [(1, 13), (8, 13), (13, 13), (14, 13), (100, 13), (8, 0), (3, 1)])
def test_the_largest_that_fits_is_found_with_few_tries(start, most):
    tried = []

    def fits(number):
        tried.append(number)
        return number <= most

    assert most_that_fits(start, fits) == most
    assert len(tried) == len(set(tried)) <= 9
    assert tried[0] == start


def test_without_an_end_it_ends():
    assert most_that_fits(1, lambda number: True) == MOST
