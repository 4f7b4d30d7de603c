"""Where the time of operators and kernels is counted."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.model import ceilings as model_ceilings
from benchmarks.model.waterfall import RANGES, part_of, ranges_around, where_time_goes, work
from gptscale.common.settings.gpt_config import GPTConfig

NAMES = {
    ("aten::addmm",): "matrix products",
    ("aten::addmm_",): "matrix products",
    ("aten::mm", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT"): "matrix products",
    ("aten::linear", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"): "matrix products",
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward",): "attention",
    ("aten::_cudnn_attention_forward", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma"): "attention",
    ("aten::_fused_adamw_", "multi_tensor_apply_kernel"): "optimizer",
    ("aten::native_layer_norm",): "elementwise",
    ("triton_per_fused_native_layer_norm_3", "triton_per_fused_native_layer_norm_3"): "elementwise",
    ("graph_0_cpp_fused_gelu_1",): "elementwise",
    ("gptscale::gelu",): "elementwise",
    ("triton_tem_fused_addmm_2", "triton_tem_fused_addmm_2"): "matrix products",
    ("flex_attention", "triton_tem_fused_flex_attention_0"): "attention",
    ("mkldnn::_linear_pointwise",): "matrix products",
    ("Memcpy HtoD", "Memcpy HtoD (Pinned -> Device)"): "elementwise",
    ("autograd::engine::evaluate_function: AddmmBackward0",): None,
    ("Torch-Compiled Region: 0/0",): None,
}


@pytest.mark.parametrize("names", NAMES)
def test_operators_and_kernels_by_name(names):
    assert part_of(names, []) == NAMES[names]


def test_ranges_decide_where_names_do_not():
    for name, part in RANGES.items():
        assert part_of(["aten::mul_"], [name]) == part
        assert part_of(["vectorized", "vectorized_elementwise_kernel"], [name]) == part
        assert part_of(["aten::mm"], [name]) == "matrix products"
        # This is what the host does between its operators.
        assert part_of([name], []) is None


def test_time_of_a_step_is_told_apart_and_adds_up():
    a = torch.randn(400, 400)
    parts = where_time_goes([lambda: a @ a] * 3, torch.device("cpu"))
    assert tuple(parts) == model_ceilings.PARTS
    assert parts["matrix products"] > 10 * parts["elementwise"]
    assert parts["attention"] == parts["loss"] == parts["optimizer"] == 0
    parts = where_time_goes([lambda: torch.exp(a)] * 3, torch.device("cpu"))
    assert parts["elementwise"] > 0 == parts["matrix products"]


def test_kernels_of_a_gpu_count_where_they_were_launched():
    """A trace as CUDA leaves it: kernels hang at the operator that launched them, and come once more by themselves."""
    loss = SimpleNamespace(name="gptscale bench: loss", cpu_parent=None)
    gemm, softmax = SimpleNamespace(name="nvjet_x", duration=70.0), SimpleNamespace(name="cunn_SoftMax", duration=5.0)

    def event(name, parent, *kernels, kind=DeviceType.CPU):
        return SimpleNamespace(name=name, cpu_parent=parent, kernels=kernels, device_type=kind)

    trace = [
        event("aten::mm", loss, gemm),
        event("aten::_log_softmax", loss, softmax),
        event("nvjet_x", None, kind=DeviceType.CUDA),
        event("aten::add", None, SimpleNamespace(name="vectorized_elementwise_kernel", duration=3.0)),
    ]
    result = list(work(trace, torch.device("cuda")))
    assert result == [("matrix products", 70.0), ("loss", 5.0), ("elementwise", 3.0)]
    assert ranges_around(trace[0]) == ["gptscale bench: loss"]


TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=301)


def test_products_are_the_operations_of_a_step():
    """Three for each matrix: 6 N_matmul operations per token, the table with its padding rows."""
    rows, gpt = 64, TINY
    flops = sum(p.per_step * p.flops for p in model_ceilings.products(gpt, rows))
    assert flops == 6 * rows * (12 * gpt.n_layer * gpt.n_embd**2 + gpt.padded_vocab_size * gpt.n_embd)
    for p in model_ceilings.products(gpt, rows):
        calls = model_ceilings.routes(p, torch.float32, torch.device("cpu"))
        assert calls["mm"]().shape == (p.m, p.n)
        # oneDNN computes the same, for a weight's gradient the transpose.
        if "onednn" in calls:
            result = calls["onednn"]()
            torch.testing.assert_close(
                result.t() if p.how == "grad-weight" else result, calls["mm"](), rtol=1e-4, atol=1e-4
            )
