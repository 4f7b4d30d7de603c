"""The GPUs that the mock plays, as a program is told of them."""

from pathlib import Path

import pytest

from gptscale.common.errors import ConfigError
from gptscale.foresight.mock_cuda.devices import DEVICES, device_named, environment

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "gib", "capability"),
    [
        ("a100-80", 80, (8, 0)),
        ("h100-80", 80, (9, 0)),
        ("h200", 141, (9, 0)),
        ("b200", 192, (10, 0)),
        ("24gb", 24, (8, 9)),
        ("a10g", 24, (8, 6)),
        ("a6000", 48, (8, 6)),
        ("h100-96", 96, (9, 0)),
        ("l40s", 48, (8, 9)),
    ],
)
def test_a_device_has_a_little_less_memory_than_it_is_sold_with(name, gib, capability):
    device = device_named(name)
    assert 0.9 * gib * GIB < device.memory < gib * GIB
    assert device.capability == capability
    assert device.shared_block < device.shared


def test_no_other_device_can_be_named():
    assert len(DEVICES) == 9
    with pytest.raises(ConfigError, match="unknown device 'h20', in --as, did you mean 'h200'"):
        device_named("h20")


def test_a_program_sees_so_many_devices_and_no_driver_of_this_machine():
    variables = environment(device_named("24gb"), Path("/cache/mock/lib.so"), 3, 13000)
    assert variables["LD_PRELOAD"] == "/cache/mock/lib.so:/cache/mock/libnvrtc.so.13"
    assert variables["LD_LIBRARY_PATH"] == variables["TRITON_LIBCUDA_PATH"] == "/cache/mock"
    assert variables["LIBRARY_PATH"] == "/cache/mock"
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    numbers = {key.removeprefix("GPTSCALE_MOCK_"): value for key, value in variables.items()}
    assert (numbers["DEVICES"], numbers["VERSION"], numbers["MAJOR"], numbers["MINOR"]) == ("3", "13000", "8", "9")
    # The wheels of PyTorch run the code for 8.6 there.
    assert numbers["CODE"] == "86"
    assert environment(device_named("b200"), Path("lib.so"), 1, 13000)["GPTSCALE_MOCK_CODE"] == "100"
