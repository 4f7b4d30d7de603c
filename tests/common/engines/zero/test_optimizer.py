"""The errors of DeepSpeed's step: the one that a user can act on is one line, any other stays what it is."""

from types import SimpleNamespace

import pytest
import torch

from gptscale.common.engines.zero.optimizer import ZeroOptimizer, loss_scale_floor
from gptscale.common.errors import NumericError


def test_the_loss_scales_floor_is_one_line():
    loss_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    scaler = loss_scaler.DynamicLossScaler(1, 1000, 1, 1, False)
    with pytest.raises(Exception, match="minimum") as raised:
        scaler.update_scale(True)
    assert isinstance(loss_scale_floor(raised.value), NumericError)
    assert loss_scale_floor(ValueError("something else")) is None


class Overflowing:
    """As much of a DeepSpeedEngine as a step that raises `error` needs."""

    def __init__(self, error):
        self.error = error

    def step(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Exception("Current loss scale already at minimum"), NumericError), (ValueError("something else"), ValueError)],
)
def test_a_step_raises_deepspeeds_own_error_unless_it_is_the_floor(error, expected):
    stepper = object.__new__(ZeroOptimizer)
    stepper.poisoned, stepper.inner, stepper.ds = False, SimpleNamespace(param_groups=[]), Overflowing(error)
    with pytest.raises(expected) as raised:
        stepper.step(1.0, torch.tensor(1.0))
    assert raised.value.__cause__ is (None if expected is ValueError else error)
