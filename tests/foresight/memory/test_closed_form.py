"""Predicted bytes against those that torch's allocator counts in real steps, and against published counts."""

import gc

import pytest
import torch
from torch._C._profiler import _EventType
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.need import RECIPES, Need, WayToFit, need
from gptscale.common.model import loss
from gptscale.common.model.gpt import Block
from gptscale.common.model.initial_weights import init_tensor
from gptscale.common.optim import blockwise, compact_adamw
from gptscale.common.process.world import World
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.foresight.memory import activations, state
from gptscale.foresight.memory.activations import kept_per_token
from gptscale.foresight.memory.step import Step
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get

# A fraction of the whole peak, of state and activations together.
TOLERANCE = 0.05
GPT = PRESETS["1.6b"]


def peak_bytes(words, out):
    """Return the peak of the CPU allocator while an engine of `single` was built and stepped twice, and its run."""
    config, recipe_config = parse_run("single", ["--data", "synthetic", "--device", "cpu", "--out", str(out), *words])
    plan = preflight("single", config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        engine = get("single").load().build(plan.run, recipe_config)
        batch = plan.batches(plan.train, 0, 1).batch(0)
        for _ in range(2):
            engine.train_step(batch, 1e-3)
    changes, left = [], list(record.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = peak = 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak, plan.run


# One shape where activations are most of it, and one where the table and the loss are.
WIDE = "--n-embd 256 --n-layer 6 --n-head 8 --seq-len 128 --vocab-size 2048".split()
TABLE = "--n-embd 128 --n-layer 2 --seq-len 128 --vocab-size 50257".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mode", "state", "precision"),
    [
        (WIDE, "none", "fp32", "fp32"),
        (WIDE, "selective", "fp32", "fp32"),
        (WIDE, "full", "fp32", "fp32"),
        (WIDE, "full", "8bit", "fp32"),
        (WIDE, "none", "bf16", "bf16"),
        (TABLE, "none", "fp32", "fp32"),
        (TABLE, "full", "fp32", "fp32"),
    ],
)
def test_the_peak_of_a_step_is_the_predicted_one(shape, mode, state, precision, tmp_path):
    words = ["--micro-batch-size", "8", "--global-batch-size", "8", "--activation-checkpointing", mode]
    words += ["--optimizer-state", state, "--precision", precision]
    measured, run = peak_bytes([*shape, *words], tmp_path)
    predicted = need(Step(run.gpt, 8 * run.seq_len, precision, "cpu"), WayToFit("single", mode, state))
    assert predicted.device == pytest.approx(measured, rel=TOLERANCE)
    assert (predicted.host, predicted.disk) == (0, 0)


def test_what_a_block_keeps_is_what_autograd_saves():
    """Every storage that forward saves, parameters apart, to the byte."""
    gpt = GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=32)
    block = Block(gpt)
    x = torch.randn(3, 32, 64, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        block(x)
    nbytes = sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own)
    step = Step(gpt, 96, "fp32", "cpu")
    # attention's kernel saves its random state too: two numbers of 8 bytes, or none
    assert 0 <= nbytes - 96 * kept_per_token(step, RECIPES["single"](step, 8.0), "none") <= 16


def test_constants_are_those_of_the_modules_that_import_torch():
    assert activations.LOGITS_BYTES == loss.LOGITS_BYTES
    assert (state.SMALL, state.BLOCK) == (compact_adamw.SMALL, blockwise.BLOCK)
    assert OPTIMIZERS["adamw"].state_bytes["8bit"] == 2 + 2 * 4 / blockwise.BLOCK


def test_in_16_bits_it_is_korthikantis_count_without_masks_and_square():
    # The heads of this model are 128 wide, so that nothing is padded.
    step = Step(PRESETS["gpt3-6.7b"], 1, "bf16", "cuda")
    kept = kept_per_token(step, RECIPES["zero_offload"](step, 8.0), "none")
    # For a token, attention keeps the sums of 32 heads, and two norms keep their means and deviations.
    few = 4 * 32 + 16
    assert kept == (34 - 2) * 4096 + few
    assert kept_per_token(step, RECIPES["zero_offload"](step, 8.0), "full") == 2 * 4096


def test_state_is_16_bytes_a_parameter_and_smaller_moments_take_less():
    n = GPT.n_params_in_memory
    state = {
        m: need(Step(GPT, 0, "fp32", "cuda"), WayToFit("single", "full", m)).device / n
        for m in ("fp32", "bf16", "8bit")
    }
    # This leaves room for the table's second gradient and for a block's gradients.
    extra = 16 * init_tensor("wte.weight", (1, 1), GPT, 0).itemsize / 4
    assert 16 <= state["fp32"] <= 16 + extra / 16
    assert state["fp32"] - state["bf16"] == pytest.approx(4)
    assert state["fp32"] - state["8bit"] == pytest.approx(6 - 8 / 256)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_need_grows_with_the_batch_and_checkpointing_takes_less(recipe, mode):
    def device(tokens, mode=mode):
        return need(Step(GPT, tokens, "bf16", "cuda"), WayToFit(recipe, mode)).device

    sizes = [device(1024 * batch) for batch in (0, 1, 8, 64, 512)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 5 * sizes[1]
    assert device(65536, "full") < device(65536, "selective") < device(65536, "none")


def test_what_is_offloaded_lies_on_the_host_and_pinned_memory_is_rounded():
    n, h = GPT.n_params_in_memory, GPT.n_embd
    step, on_cpu = Step(GPT, 1024, "bf16", "cuda"), Step(GPT, 1024, "bf16", "cpu")
    offload = need(step, WayToFit("zero_offload"))
    # two vectors of fp32 and one of 16 bits, each a power of two (6.2 GB in 8 GiB, 3.1 in 4), and the moments as they are
    matrices = 2 * 8 * 2**30 + 4 * 2**30
    assert offload.host == pytest.approx(matrices + 8 * n, rel=0.01)
    assert need(on_cpu, WayToFit("zero_offload")).host == pytest.approx((4 + 4 + 2 + 8) * n, rel=0.01)
    assert offload.device < 0.6 * need(step, WayToFit("single")).device
    sharded = need(step, WayToFit("fsdp_offload"))
    fc = 4 * 4 * h * h
    # Rounding makes this matrix larger, else this shape would show nothing.
    assert 2 ** (fc - 1).bit_length() > fc
    assert 16 * n < sharded.host < 24 * n
    assert need(on_cpu, WayToFit("fsdp_offload")).host == pytest.approx(16 * n)
    assert need(step, WayToFit("zero_infinity")).disk == (12 + 4 + 2) * n
    assert need(step, WayToFit("single"))[1:] == Need(0, 0.0, 0.0)[1:]
