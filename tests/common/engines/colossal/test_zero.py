"""Gemini's optimizer as a Stepper, over a stand-in of it that keeps its names: both of Colossal-AI's need a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gptscale.common.engines.colossal.zero import GeminiStepper, LowLevelZeroStepper
from gptscale.common.model.initial_weights import init_tensor
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig

CPU = torch.device("cpu")
CONFIG = RunConfig(n_layer=1, n_embd=8, n_head=2, vocab_size=20, seq_len=4, clip_grad_norm=1.0)
RUN = Run("colossal_gemini", CONFIG, CONFIG.gpt(), plan_batch(1), World(0, 0, 1, CPU, 60.0))


class Gemini:
    """Two parameters of a GPT in one chunk: the positions, and a bias of which another rank has the first five elements."""

    def __init__(self, gradient_norm=1.0, gradients_on="cpu"):
        self.working = {"wpe.weight": nn.Parameter(torch.zeros(4, 8)), "ln_f.bias": nn.Parameter(torch.zeros(8))}
        fakes = [nn.Parameter(torch.empty(0)) for _ in self.working]
        self.id_to_real_params = dict(enumerate(self.working.values()))
        self.id_to_fake_params = dict(enumerate(fakes))
        self.optim = SimpleNamespace(state={}, param_groups=[])
        self.param_groups = [{"lr": 0.0}]
        self.payload, self.gradients = torch.full((35,), torch.nan), torch.ones(35)
        chunk = SimpleNamespace(
            paired_chunk=SimpleNamespace(payload=self.payload),
            grad_chunk=SimpleNamespace(device_type=gradients_on, payload=self.gradients),
            optim_update=lambda: self.calls.append("publish"),
        )
        self.chunk16_set, self.param_to_chunk16 = [chunk], dict.fromkeys(fakes, chunk)
        self.param_to_range = {fakes[0]: (0, 32), fakes[1]: (32, 35)}
        self.gradient_norm, self.calls = gradient_norm, []

    def get_offsets(self, number):
        return 0, (0, 5)[number]

    def _calc_global_norm(self):
        self.calls.append("norm")
        return self.gradient_norm

    def step(self):
        self.calls.append(("step", self.param_groups[0]["lr"], self._calc_global_norm()))

    def zero_grad(self):
        self.calls.append("zero_grad")


def stepper_of(gemini):
    return GeminiStepper(RUN, gemini, gemini.working)


def test_each_rank_fills_the_boxes_of_its_part_with_initial_weights():
    gemini = Gemini()
    boxes = {shard.name: shard for shard in stepper_of(gemini).state()}
    moments = [f"adamw.{key}/{name}" for name in ("wpe.weight", "ln_f.bias") for key in ("exp_avg", "exp_avg_sq")]
    assert list(boxes) == ["model/wpe.weight", "model/ln_f.bias", *moments]
    assert boxes["model/wpe.weight"].tensor.shape == (4, 8)
    bias = boxes["adamw.exp_avg/ln_f.bias"]
    assert (bias.shape, bias.offset, tuple(bias.tensor.shape)) == ((8,), (5,), (3,))
    # The positions are drawn, a bias is zero, and the chunk has both.
    assert torch.equal(gemini.payload[:32].view(4, 8), init_tensor("wpe.weight", (4, 8), RUN.gpt, CONFIG.seed))
    assert gemini.payload[32:].tolist() == [0.0] * 3
    assert gemini.calls == ["publish"]


def test_a_step_has_the_rate_and_computes_the_norm_once():
    gemini = Gemini(gradient_norm=0.5)
    norm = stepper_of(gemini).step(0.25, torch.tensor(1.0))
    assert norm.item() == 0.5
    assert gemini.calls == ["publish", "norm", ("step", 0.25, 0.5)]
    assert gemini._calc_global_norm() == 0.5


@pytest.mark.parametrize(("place", "norm", "factor"), [("cpu", 4.0, 0.25), ("cpu", 0.5, 1.0), ("cuda", 4.0, 1.0)])
def test_gradients_are_clipped_here_on_the_host_else_by_the_optimizer(place, norm, factor):
    gemini = Gemini(norm, place)
    stepper_of(gemini).step(0.1, torch.tensor(1.0))
    torch.testing.assert_close(gemini.gradients, torch.full((35,), factor), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_after_nan_or_inf_gemini_never_steps_again(loss, norm):
    gemini = Gemini(norm)
    stepper = stepper_of(gemini)
    stepper.step(0.1, torch.tensor(loss))
    gemini.gradient_norm = 1.0
    stepper.step(0.1, torch.tensor(1.0))
    assert gemini.calls == ["publish", "norm", "zero_grad", "norm", "zero_grad"]


def test_counters_come_back_and_the_loaded_weights_are_published():
    gemini = Gemini()
    stepper = stepper_of(gemini)
    stepper.load_counters({"optimizer_steps": 3.0})
    assert stepper.counters()["optimizer_steps"] == 3.0
    assert gemini.calls == ["publish", "publish"]
    # 35 elements on this rank: fp32 weights and two moments, all in host memory.
    assert stepper.offload().cpu_bytes == 3 * 4 * 35


def test_low_level_zeros_norm_is_over_all_parameter_and_rank_groups():
    stores = {
        name: SimpleNamespace(torch_pg=name, get_working_grads_by_group_id=lambda group, name=name: (name, group))
        for name in ("dense", "experts")
    }
    norms = {("dense", 0): 1.0, ("dense", 1): 4.0, ("experts", 0): 8.0, ("experts", 1): 0.0}
    stepper = object.__new__(LowLevelZeroStepper)
    stepper._one = torch.ones(())
    stepper.zero = SimpleNamespace(
        num_param_groups=2, pg_to_grad_store=stores, _compute_grad_norm=lambda dp_pg, gradients: norms[gradients]
    )
    assert stepper.norm(1.0).item() == 9.0
