"""What is read from the list of calls: the last whole step, its operations and bytes, and kernels by readable names."""

import shutil

import pytest

from gptscale.foresight.mock_cuda.calls import Call, Collective, Product, last_step, read_calls, readable


def call(kind, name="", stream=0, sizes=(0, 0, 0, 0)):
    return Call(0.0, kind, stream, name, sizes)


STEP = [
    call("kernel", "warm_up"),
    call("mark", "step begins"),
    call("product", sizes=(2, 3, 5, 1)),
    call("kernel", "gelu", stream=7),
    call("product", sizes=(2, 3, 5, 1)),
    call("kernel", "gelu"),
    call("copy", "host to device", sizes=(100, 0, 0, 0)),
    call("copy", "host to device", sizes=(28, 0, 0, 0)),
    call("collective", "all_gather", 9, (4096, 8, 0, 0)),
    call("collective", "all_gather", 9, (4096, 8, 0, 0)),
    call("mark", "step ends"),
    call("product", sizes=(9, 9, 9, 9)),
]


def test_what_lies_between_the_marks_is_counted():
    step = last_step(STEP)
    assert step.kernels == {"gelu": 2}
    assert step.products == [Product(2, 3, 5, 1, count=2)]
    # The third stream that the step uses.
    assert step.collectives == [Collective("all_gather", 4096, 8, stream=2, count=2)]
    assert step.copied == {"host to device": 128}
    assert step.launches == 6
    assert step.product_flops == 2 * 2 * (2 * 3 * 5)


def test_it_is_json():
    facts = last_step(STEP).as_json()
    assert (facts["launches"], facts["product_flops"]) == (6, 120)
    assert facts["collectives"][0] == {"name": "all_gather", "nbytes": 4096, "ranks": 8, "stream": 2, "count": 2}


@pytest.mark.parametrize("calls", [[], STEP[:5], [call("mark", "step ends")]])
def test_without_a_whole_step_there_is_nothing(calls):
    assert last_step(calls) is None


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
def test_kernels_have_the_names_of_what_they_do():
    mangled = {
        # void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int, float)
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEvif": (
            "vectorized_elementwise_kernel: FillFunctor"
        ),
        # softmax(int)
        "_Z7softmaxi": "softmax",
        "triton_poi_fused_gelu_0": "triton_poi_fused_gelu_0",
    }
    assert readable(mangled) == list(mangled.values())
    assert readable(["_Z7softmaxi"] * 2) == ["softmax"] * 2
    assert readable([]) == []


def test_without_a_demangler_names_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert readable(["_Z7softmaxi"]) == ["_Z7softmaxi"]


def test_a_line_of_the_list_is_a_call(tmp_path):
    (tmp_path / "calls").write_text("1.5\tproduct\t1f\tgemm\t2\t3\t5\t1\n2.0\tmark\t0\tstep ends\t0\t0\t0\t0\n")
    assert read_calls(tmp_path / "calls") == [
        Call(1.5, "product", 31, "gemm", (2, 3, 5, 1)),
        Call(2.0, "mark", 0, "step ends", (0, 0, 0, 0)),
    ]
