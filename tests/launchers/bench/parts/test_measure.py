"""How the ways of a part are compared, and their memory is counted."""

import pytest
import torch

from gptscale.launchers.bench.parts.measure import apart, compare, first_line, peak_gib
from gptscale.launchers.bench.parts.ways import WayToCompute

CPU = torch.device("cpu")


def test_a_kernel_that_takes_no_such_shape_and_one_without_memory_are_rows():
    def refuse():
        raise RuntimeError("No available kernel. Aborting execution.\nbecause")

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    one = [torch.ones(3)]

    class OutOfResources(Exception):  # noqa: N818  # as Triton's, which is no RuntimeError
        pass

    def too_much():
        raise OutOfResources("out of resource: shared memory, Required: 2, Hardware limit: 1")

    def library():
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    ways = [
        WayToCompute("triton", too_much),
        WayToCompute("launch", library),
        WayToCompute("cudnn", refuse),
        WayToCompute("math", full),
        WayToCompute("flash", lambda: one),
        WayToCompute("other", lambda: [torch.full((3,), torch.nan)]),
    ]
    failures, errors = compare(ways, 1e-4, CPU)
    assert failures["cudnn"] == "No available kernel. Aborting execution."
    assert failures["math"] == failures["launch"] == "out of memory"
    assert failures["triton"] == "OutOfResources: out of resource: shared memory, Required: 2, Hardware limit: 1"
    assert failures["flash"] == ""
    assert failures["other"].startswith("differs by nan")
    assert set(errors) == {"flash", "other"}
    assert apart(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5


def test_an_error_without_words_is_still_a_failure():
    assert first_line(RuntimeError()).startswith("RuntimeError")


def test_peak_memory_is_what_lives_at_once():
    def run():
        for _ in range(3):
            a = torch.ones(2**20)
            a = a + 1
        return [a]

    assert peak_gib(run, CPU) == pytest.approx(2 * 2**22 / 2**30, rel=0.01)
