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


def test_a_program_sees_so_many_devices_and_no_driver_of_this_machine():
    variables = environment(device_named("24gb"), Path("/cache/mock/lib.so"), 3, 13000)
    assert variables["LD_PRELOAD"] == "/cache/mock/lib.so:/cache/mock/libnvrtc.so.13"
    assert {variables[f"{name}_PATH"] for name in ("LD_LIBRARY", "LIBRARY", "TRITON_LIBCUDA")} == {"/cache/mock"}
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    numbers = {key.removeprefix("GPTSCALE_MOCK_"): value for key, value in variables.items()}
    assert (numbers["DEVICES"], numbers["VERSION"], numbers["MAJOR"], numbers["MINOR"]) == ("3", "13000", "8", "9")
    # The wheels of PyTorch run the code for 8.6 there.
    assert numbers["CODE"] == "86"
    assert environment(device_named("b200"), Path("lib.so"), 1, 13000)["GPTSCALE_MOCK_CODE"] == "100"
