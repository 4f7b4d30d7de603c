"""The parts of a block have the shapes of a tensor rank, and attention's backward is timed without its forward."""

import pytest
import torch

from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.foresight.calibrate import parts
from gptscale.foresight.calibrate.parts import part_calls, time_parts
from gptscale.foresight.calibrate.timing import Timing
from gptscale.foresight.time.operations import AttentionShape, PassShape, ProductShape

GPT = GPTConfig(n_layer=1, n_head=4, n_embd=32, block_size=8, vocab_size=30)
CPU = torch.device("cpu")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tensor_rank_has_its_part_of_every_matrix(tp):
    calls = part_calls(GPT, 8, 16, tp, torch.float32, CPU, "here")
    assert {operation.on for operation in calls} == {"here"}
    shapes = {kind: [op.shape for op in calls if op.kind == kind] for kind in {op.kind for op in calls}}
    assert shapes["product"] == [
        ProductShape(16, 32, 96 // tp),
        ProductShape(16, 32 // tp, 32),
        ProductShape(16, 32, 128 // tp),
        ProductShape(16, 128 // tp, 32),
    ]
    assert shapes["attention forward"] == shapes["attention backward"] == [AttentionShape(16, 32 // tp, 4 // tp, 8)]
    # Between the matrices a rank has every hidden unit, and in the MLP its part.
    assert shapes["norm"] == shapes["residual"] == shapes["embedding"] == [PassShape(16, 32)]
    assert shapes["activation"] == [PassShape(16, 128 // tp)]


def test_every_call_computes_and_keeps_nothing():
    results = {op: call() for op, call in part_calls(GPT, 8, 16, 1, torch.float32, CPU, "here").items()}
    for operation, result in results.items():
        if operation.kind == "attention backward":
            assert result is None
        elif operation.kind == "attention forward":
            assert result.shape == (2, 8, 32)
            assert not result.requires_grad
        else:
            assert tuple(result.shape) == (operation.shape[0], operation.shape[-1])


@pytest.mark.parametrize(("both_s", "backward_s"), [(5.0, 3.0), (1.9, 0.2)])
def test_attentions_backward_is_what_both_take_longer_than_its_forward(both_s, backward_s, monkeypatch):
    """On a busy machine both may seem to be faster than the forward alone. Then a tenth of that is left."""

    def timings(calls, device, repeats):
        return {op: Timing(both_s if op.kind == "attention backward" else 2.0, 0.1, repeats) for op in calls}

    monkeypatch.setattr(parts, "timings", timings)
    times = time_parts(GPT, 8, 16, 1, torch.float32, CPU, "here", 3)
    seconds = {op.kind: timing.seconds for op, timing in times.items()}
    assert seconds["attention backward"] == pytest.approx(backward_s)
    assert seconds["attention forward"] == 2.0
