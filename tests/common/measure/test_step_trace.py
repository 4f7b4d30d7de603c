"""A trace tells waits from work, and what the work is made of, on the host and on a device."""

import time
from itertools import pairwise

import pytest
import torch

from gptscale.common.measure.step_trace import (
    ATTENTION,
    ELEMENTWISE,
    OPTIMIZER,
    PRODUCTS,
    STEPS,
    TracedOperation,
    device_segments,
    kind_of,
    trace_steps,
    work_of,
)
from gptscale.common.process.progress import StepMark, progress


def test_marks_are_kept_only_while_a_step_is_traced():
    with progress.marking() as marks:
        progress.at("forward")
        with progress.waiting():
            pass
        with progress.inside("disk"):
            pass
        progress.at("optimizer")
    n = len(marks)
    progress.at("data")
    assert len(marks) == n
    kept = [(mark.part, mark.waits) for mark in marks if mark.part in ("forward", "disk")]
    assert kept == [("forward", False), ("forward", True), ("forward", False), ("disk", False), ("forward", False)]
    # One mark begins where the one before ends.
    assert all(before.end == after.begin for before, after in pairwise(marks))


def test_a_traced_step_of_this_process():
    a = torch.ones(256, 256)
    # The wait for data of each step, measured from inside and from outside: the trace's lies between, on a busy machine too.
    least_s, most_s = [], []

    def step(i):
        before = time.perf_counter()
        progress.at("data")
        began = time.perf_counter()
        time.sleep(0.01)
        ended = time.perf_counter()
        progress.at("forward")
        least_s.append(ended - began)
        most_s.append(time.perf_counter() - before)
        for _ in range(20):
            a @ a
        progress.at("optimizer")
        a.mul(2.0)
        progress.at("record")

    progress.at("record")
    trace = trace_steps(0, step, torch.device("cpu"), keep=True)
    assert len(trace.ends) == STEPS
    data_s = sum(s.end - s.begin for s in trace.segments if s.part == "data")
    assert STEPS * 0.01 <= sum(least_s[:STEPS]) <= data_s <= sum(most_s[:STEPS])
    assert trace.work_s["forward"][PRODUCTS] > 0.0
    assert trace.work_s["forward"][ATTENTION] == 0.0
    assert trace.work_s["optimizer"][OPTIMIZER] > 0.0
    assert any(operation.name == "aten::mm" for operation in trace.operations)
    assert trace_steps(0, step, torch.device("cpu")).operations == []


def test_work_is_that_of_each_operation_without_those_it_calls():
    segments = [StepMark("forward", False, 0.0, 10.0), StepMark("optimizer", False, 10.0, 20.0)]
    operations = [
        TracedOperation("DistributedDataParallel.forward", False, 0.0, 10.0),
        TracedOperation("aten::linear", False, 1.0, 4.0),
        TracedOperation("aten::addmm", False, 1.5, 3.5),
        TracedOperation("aten::scaled_dot_product_attention", False, 5.0, 8.0),
        TracedOperation("aten::softmax", False, 6.0, 7.0),
        TracedOperation("c10d::allreduce_", False, 8.0, 9.0),
        TracedOperation("aten::_fused_adamw_", False, 11.0, 15.0),
    ]
    work, n = work_of(segments, operations, 0.0)
    assert work["forward"] == {PRODUCTS: 3.0, ATTENTION: 3.0, ELEMENTWISE: 0.0, OPTIMIZER: 0.0}
    assert work["optimizer"][OPTIMIZER] == 4.0
    assert n == 5


def test_a_device_computes_waits_copies_or_idles_for_a_reason():
    host = [StepMark("data", False, 0.0, 2.0), StepMark("forward", False, 2.0, 10.0)]
    operations = [
        TracedOperation("sm90_xmma_gemm_f32f32", True, 3.0, 5.0),
        TracedOperation("ncclDevKernel_AllReduce_Sum", True, 4.0, 6.0),
        TracedOperation("Memcpy HtoD (Pinned -> Device)", True, 6.0, 7.0),
        TracedOperation("cudaMalloc", False, 7.0, 8.0),
    ]
    assert [(s.part, s.waits, s.begin, s.end) for s in device_segments(host, operations)] == [
        ("data", False, 0.0, 2.0),
        ("host", False, 2.0, 3.0),
        ("forward", False, 3.0, 4.0),
        ("forward", False, 4.0, 5.0),
        ("forward", True, 5.0, 6.0),
        ("bus", False, 6.0, 7.0),
        ("allocator", False, 7.0, 8.0),
        ("host", False, 8.0, 10.0),
    ]
    work, n = work_of(host, operations, 0.0)
    assert (work["forward"][PRODUCTS], n) == (2.0, 3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel", ATTENTION),
        ("nvjet_tst_128x256", PRODUCTS),
        ("triton_poi_fused_gelu_0", ELEMENTWISE),
        ("cudnn_generated_fort_native_sdpa_sm90", ATTENTION),
        ("ncclDevKernel_ReduceScatter", None),
        # This is a range of Python, not a kernel.
        ("FSDP::pre_forward (blocks.0)", None),
        ("fsdp::split_with_sizes_copy", ELEMENTWISE),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name, "forward") == kind
