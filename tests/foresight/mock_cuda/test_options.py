"""Options that choose other kernels, another compiler or another allocator: each runs under the mock of CUDA."""

import pytest

OPTIONS = [
    "--attention flash",
    "--attention cudnn",
    "--attention efficient",
    "--attention math",
    "--precision fp16",
    "--precision fp8",
    "--precision fp32",
    "--optimizer-state 8bit",
    "--optimizer-state bf16",
    "--optimizer sgd",
    "--dropout 0.1",
    "--activation-checkpointing selective",
    "--compile",
    "--compile --compile-mode reduce-overhead",
    "--compile --precision fp8",
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_an_option_runs_to_its_end(options, simulated):
    status, facts, log = simulated("single", "--model", "tiny", "--n-head", "2", *options.split(), world_size=1)
    assert status == 0, log[-3000:]
    assert 2**20 < facts["peak_allocated"] <= facts["peak_reserved"]
