"""Every way to pad the heads of attention computes the same."""

import torch

from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.launchers.bench.parts import attention as parts_attention
from gptscale.launchers.bench.parts.measure import compare
from gptscale.launchers.bench.parts.ways import StepShape

CPU = torch.device("cpu")


def test_heads_of_50_are_padded_to_56_and_64():
    gpt = GPTConfig(n_layer=1, n_head=2, n_embd=100, block_size=4, vocab_size=11)
    part = parts_attention.attention(StepShape(gpt, 1, torch.float32, CPU, False), gpt.n_head)
    names = ["auto, as is", "math, as is", "auto, padded to 56", "auto, 56 wide", "auto, padded to 64", "auto, 64 wide"]
    assert [way.name for way in part.ways] == names
    assert part.flops == 6 * 4 * 100 * 4
    failures, _ = compare(part.ways, 1e-5, CPU)
    assert not any(failures.values())
