"""Options that choose other kernels, another compiler or another allocator: each runs under the mock of CUDA."""

import pytest

from gptscale.common.settings.families import preset

TINY = preset("tiny")
OPTIONS = [f"--attention {name}" for name in ("flash", "cudnn", "efficient", "math")]
OPTIONS += [f"--precision {name}" for name in ("fp16", "fp8", "fp32")] + ["--optimizer sgd", "--dropout 0.1"]
OPTIONS += ["--optimizer-state 8bit", "--optimizer-state bf16", "--activation-checkpointing selective"]
OPTIONS += ["--compile", "--compile --compile-mode reduce-overhead", "--compile --precision fp8"]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_an_option_runs_to_its_end(options, simulated):
    # Two micro-batches: the first makes the gradients, and the second adds to them, as all that would follow.
    words = ("--model", "tiny", "--n-head", "2", "--global-batch-size", "4")
    status, simulation, log = simulated("single", *words, *options.split(), world_size=1)
    assert status == 0, log[-3000:]
    memory = simulation.memory()
    assert 2**20 < memory.allocated <= memory.reserved
    # A forward and two of backward, also where a CUDA graph launches them.
    assert simulation.step["product_flops"] >= 3 * 2 * TINY.n_matmul_params * 4 * TINY.block_size
    # Neither what follows the allocations nor its end has code compiled again, which would count as the host's time of a step.
    assert "Recompiling" not in log, log[-3000:]
