"""The errors of DeepSpeed's step: the one that a user can act on is one line, any other stays what it is."""

from types import SimpleNamespace

import pytest
import torch

from gptscale.common.engines.zero import operators
from gptscale.common.engines.zero.io_meter import MeteredHandle, Traffic
from gptscale.common.engines.zero.optimizer import ZeroOptimizer, count_up
from gptscale.common.errors import NumericError
from gptscale.common.settings.optimizers import ADAMW_STATE
from gptscale.launchers.run.preflight import why_not_here


def overflow():
    """Overflow in fp16 with DeepSpeed's loss scale at its floor."""
    loss_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    loss_scaler.DynamicLossScaler(1, 1000, 1, 1, False).update_scale(True)


@pytest.mark.promise("N4")
@pytest.mark.parametrize(("step", "expected"), [(overflow, NumericError), (lambda: int("something else"), ValueError)])
def test_a_step_raises_deepspeeds_own_error_unless_it_is_the_floor(step, expected):
    stepper = object.__new__(ZeroOptimizer)
    groups = [{"lr": 0.0}, {"lr": 0.0}]
    stepper.poisoned, stepper.inner = False, SimpleNamespace(param_groups=groups)
    stepper.ds = SimpleNamespace(step=step)
    with pytest.raises(expected) as raised:
        stepper.step(0.5, torch.tensor(1.0))
    assert groups == [{"lr": 0.5}] * 2
    assert (raised.value.__cause__ is None) == (expected is ValueError)


def test_a_resumed_loss_scale_counts_its_good_steps_on():
    def stepper(**scaler):
        stepper = object.__new__(ZeroOptimizer)
        stepper.dynamic, stepper.state_keys, stepper.stage = True, (), 2
        stepper.zero = SimpleNamespace(loss_scaler=SimpleNamespace(**scaler), update_lp_params=lambda: None)
        return stepper

    # Steps 6, 7 and 8 were good.
    counters = stepper(cur_scale=512.0, cur_iter=9, last_overflow_iter=5).counters()
    assert counters == {"optimizer_steps": 0.0, "loss_scale": 512.0, "loss_scale_good_steps": 3.0}
    resumed = stepper(cur_scale=1.0, cur_iter=0, last_overflow_iter=-1)
    resumed.load_counters(counters)
    assert resumed.counters() == counters


@pytest.mark.usefixtures("operators_of_the_user")
def test_a_resumed_cpu_adam_takes_the_same_steps_to_the_bit():
    """DeepSpeed's CPU Adam keeps powers of its betas that no state dict holds."""
    if reason := why_not_here("zero_offload"):
        pytest.skip(reason)
    operators.load(("cpu_adam",))
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    grads = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))

    def trained(begin, weight, state):
        parameter = torch.nn.Parameter(weight.clone())
        adam = DeepSpeedCPUAdam([parameter], lr=0.1)
        adam.state[parameter] = {key: value.clone() for key, value in state.items()} | {"step": begin}
        count_up(adam, begin)
        for step in range(begin, 40):
            parameter.grad = grads[step].clone()
            adam.step()
            if step == 29:
                at_30 = parameter.detach().clone(), {k: adam.state[parameter][k].clone() for k in ADAMW_STATE}
        return parameter.detach(), at_30 if begin < 30 else None

    zeros = torch.zeros(64)
    unbroken, at_30 = trained(0, torch.ones(64), dict.fromkeys(ADAMW_STATE, zeros))
    resumed, _ = trained(30, *at_30)
    assert torch.equal(resumed, unbroken)


def test_counts_and_passes_on(clock):
    """Over a disk that takes a second to begin a request, three to wait for all, and two to write at once."""
    disk = SimpleNamespace(
        async_pread=lambda *request: clock.passes(1),
        async_pwrite=lambda *request: clock.passes(1),
        sync_pwrite=lambda *request: clock.passes(2),
        wait=lambda: clock.passes(3) or 2,
        is_pinned=lambda tensor: True,
    )
    traffic, data = Traffic(), torch.zeros(1000)
    handle = MeteredHandle(disk, traffic, clock=clock)
    handle.async_pread(data, "a", 0)
    handle.async_pread(data, "b", 0)
    handle.async_pwrite(data, "c", 0)
    assert handle.wait() == 2
    assert handle.is_pinned(data)
    assert traffic == Traffic(read_bytes=8000, written_bytes=4000, read_s=6.0, write_s=4.0, waited_s=3.0)
    handle.sync_pwrite(data, "d", 0)
    assert traffic == Traffic(read_bytes=8000, written_bytes=8000, read_s=6.0, write_s=6.0, waited_s=5.0)
