"""The GPUs that the mock simulates, as a program is told of them."""

from pathlib import Path

from gptscale.foresight.mock_cuda.devices import DEVICES, device_named, environment

GIB = 2**30
SOLD_GIB = {"a100-80": 80, "h100-80": 80, "h100-96": 96, "h200": 141, "b200": 192}
SOLD_GIB |= {"24gb": 24, "a10g": 24, "a6000": 48, "l40s": 48}


def test_a_device_has_a_little_less_memory_than_it_is_sold_with():
    assert {*DEVICES} == {*SOLD_GIB}
    for name, gib in SOLD_GIB.items():
        assert 0.9 * gib * GIB < DEVICES[name].memory < gib * GIB
        assert DEVICES[name].shared_block < DEVICES[name].shared


def test_code_is_for_the_capability_that_the_wheels_of_pytorch_have():
    """Those run the code for 8.6 on a device of 8.9."""
    for name, code in (("24gb", "86"), ("b200", "100")):
        assert environment(device_named(name), Path("lib.so"), 1, 13000)["GPTSCALE_MOCK_CODE"] == code
