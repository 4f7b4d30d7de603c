"""`gptscale bench model` at shapes of milliseconds: that contenders do equal work, and that figures are what they say."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch.autograd import DeviceType

from gptscale.common.errors import GptscaleError
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig
from gptscale.launchers.bench.model import ceilings as model_ceilings
from gptscale.launchers.bench.model import command as bench_model
from gptscale.launchers.bench.model import contenders as model_contenders
from gptscale.launchers.bench.model import report as model_report
from gptscale.launchers.bench.model import scale as model_scale
from gptscale.launchers.bench.model.command import Found, ModelBenchOptions, check_losses, comparable, resolve
from gptscale.launchers.bench.model.gpu_state import gpu_state
from gptscale.launchers.bench.model.report import Report
from gptscale.launchers.bench.model.waterfall import RANGES, part_of, ranges_around, where_time_goes, work
from gptscale.launchers.cli import main

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=301)
SHAPE = "--hidden 32 --layers 2 --heads 2 --seq-len 32 --vocab-size 301 --batch-size 2 --threads 1 --device cpu".split()
WORDS = ["bench", "model", *SHAPE, "--steps", "3", "--rounds", "2"]


@pytest.fixture
def in_process(monkeypatch):
    """Contenders as functions of this process: the same code without starting Python twelve times."""

    def run_worker(module, task):
        assert module == "gptscale.launchers.bench.model.contenders"
        return json.loads(json.dumps(model_contenders.main(json.loads(json.dumps(task)))))

    for where in (bench_model, model_scale):
        monkeypatch.setattr(where, "run_worker", run_worker)
    monkeypatch.setattr(model_contenders, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(model_ceilings, "ROUND_S", 1e-4)
    monkeypatch.setitem(model_ceilings.COPY_BYTES, "cpu", 2**20)
    # the compiler's front end, without its back end's minutes of C++
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield run_worker
    torch._dynamo.reset()


def test_all_contenders_do_the_same_work_and_the_figures_belong_together(in_process, tmp_path, capsys):
    pytest.importorskip("transformers")
    files = {name: tmp_path / f"b.{name}" for name in ("csv", "png")}
    assert main([*WORDS, *(word for name, file in files.items() for word in (f"--{name}", str(file)))]) == 0
    frame = pd.read_csv(files["csv"])
    contenders = frame[frame.kind == "contender"].set_index("name")
    assert list(contenders.index) == [*bench_model.OURS, *bench_model.OTHERS]
    assert (contenders.steps_timed == 6).all()
    assert contenders.loss_last.max() - contenders.loss_last.min() < 1e-5
    assert contenders.tokens_per_s.to_numpy() == pytest.approx((64 / contenders.seconds).to_numpy())
    ratios = frame[frame.kind == "ratio"].set_index("name").ratio
    assert contenders.over_ours.to_numpy() == pytest.approx([ratios[f"over_{name}"] for name in contenders.index])
    mine = contenders.loc[list(bench_model.OURS)]
    assert ratios[f"over_{mine.seconds.idxmin()}"] == 1
    assert (frame[frame.kind.isin(["product", "ceiling"]) & (frame.name != "copy")].seconds > 0).all()
    parts = frame[frame.kind == "part"].set_index("name")
    for name in bench_model.OURS:
        found = parts[parts.index.str.startswith(f"{name}: ")]
        assert found.us_per_token.sum() == pytest.approx(mine.seconds[name] / 64 * 1e6)
        assert (found.us_per_token[:5] > 0).all()  # every part but the gaps has work in it
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    for word in ("all products of a step", "handout_best", "of GEMM rate", "matrix products", "gaps"):
        assert word in said


def test_gelu_in_the_products_epilogues_does_the_same_work(in_process, monkeypatch):
    """On a CPU, where torch's operations stand for them; an operator that is not the MLP is seen."""
    monkeypatch.setattr(model_contenders.MLP, "forward", model_contenders.MLP.forward)
    options = ModelBenchOptions(device="cpu", dtype="bf16", steps=3, threads=1, batch_size=2)
    bench = dataclasses.replace(resolve(options), gpt=TINY)

    def run(name):
        torch._dynamo.reset()  # as in a process of its own
        found = Found(name)
        found.take(in_process("gptscale.launchers.bench.model.contenders", bench.task(name, profile=True)))
        assert found.parts["matrix products"] > 0
        return found

    single = run("single_compiled")
    check_losses([single, run("single_epilogues")], 3e-3)
    right = model_contenders.mlp
    monkeypatch.setattr(model_contenders, "mlp", lambda *args: -20 * right(*args))
    with pytest.raises(GptscaleError, match="in single_epilogues and"):
        check_losses([single, run("single_epilogues")], 3e-3)


def test_as_a_user_types_it(tmp_path, monkeypatch):
    """Two contenders, each in a process of its own, real text."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--contenders", "single,minimal", "--data", "text", "--dtype", "bf16", "--csv", str(tmp_path / "b.csv")]
    assert main(["bench", "model", *SHAPE, "--steps", "2", "--rounds", "1", *words]) == 0
    frame = pd.read_csv(tmp_path / "b.csv")
    assert frame[frame.kind == "contender"].name.tolist() == ["single", "minimal"]
    assert (frame["dtype"] == "bf16").all()


@pytest.mark.parametrize("fault", ["learning rate", "weights", "batches"])
def test_other_work_is_told_behind_its_figures(fault, in_process, monkeypatch, tmp_path, capsys):
    make = model_contenders.OTHERS["minimal"]

    def wrong(task):
        step, engine = make(task)
        if fault == "batches":
            return model_contenders.Contender(
                lambda b: step(type(b)(b.step, b.targets.clamp_min(0), b.targets)), engine
            )
        return model_contenders.Contender(step, engine)

    monkeypatch.setitem(model_contenders.CONTENDERS, "minimal", wrong)
    if fault == "learning rate":
        original = model_contenders.make_step
        monkeypatch.setattr(model_contenders, "make_step", lambda m, **o: original(m, **{**o, "lr": 1e-3}))
    if fault == "weights":
        monkeypatch.setattr(model_contenders, "take_weights", lambda model, gpt: None)
    assert main([*WORDS, "--contenders", "single,minimal", "--csv", str(tmp_path / "b.csv")]) == 2
    found = capsys.readouterr()
    said = found.err.splitlines()[-1]
    assert "in minimal and" in said
    assert "more than 0.0001 apart, in bench model" in said
    rows = pd.read_csv(tmp_path / "b.csv").query("kind == 'contender'").set_index("name")
    assert (rows.tokens_per_s > 0).all()
    assert rows.failure.isna()["single"]
    assert rows.failure["minimal"] in said
    assert f"minimal: {rows.failure['minimal']}" in found.out


@pytest.mark.parametrize(
    ("turns", "ran"), [(1, []), (2, ["single"]), (3, ["single", "minimal"]), (5, ["single", "minimal"])]
)
def test_a_run_that_is_cut_short_leaves_what_can_be_compared(turns, ran, in_process, monkeypatch, tmp_path):
    """Ended behind so many processes, the ceilings being the first of a round: all in its CSV is of whole rounds."""
    asked = []

    def run_worker(module, task):
        asked.append(task["contender"])
        if len(asked) > turns:
            raise KeyboardInterrupt
        return in_process(module, task)

    monkeypatch.setattr(bench_model, "run_worker", run_worker)
    with pytest.raises(KeyboardInterrupt):
        bench_model.main([*WORDS[2:], "--contenders", "single,minimal", "--csv", str(tmp_path / "b.csv")])
    assert (tmp_path / "b.csv").exists() == bool(ran)
    if ran:
        frame = pd.read_csv(tmp_path / "b.csv")
        contenders = frame[frame.kind == "contender"]
        assert contenders.name.tolist() == ran
        assert (contenders.steps_timed == 3).all()
        waiting = frame[frame.kind == "failed"]
        assert ran + waiting.name.tolist() == ["single", "minimal"]
        assert (waiting.failure == "no turn yet").all()
        ratios = frame[frame.kind == "ratio"].set_index("name").ratio
        assert contenders.over_ours.tolist() == pytest.approx([ratios[f"over_{name}"] for name in ran])


def test_fp8_alone_is_not_comparable_yet():
    fp8, single = Found("single_fp8", times_s=[[1.0]]), Found("single")
    assert not comparable([fp8, single], rounds=1)
    single.times_s.append([1.0])
    assert comparable([fp8, single], rounds=1)
    assert not comparable([fp8, single], rounds=2)
    single.failure = "out of memory"
    assert not comparable([fp8, single], rounds=1)


def test_no_loss_is_not_the_same_loss():
    a, b = Found("single", losses=[1.0, 2.0]), Found("minimal", losses=[1.0, float("nan")])
    with pytest.raises(Exception, match="step 2 has loss nan in minimal"):
        check_losses([a, b], 1e-4)


def test_fp8_may_be_further_apart_and_is_no_measure():
    fp8, a = Found("single_fp8", losses=[5.02, 4.02]), Found("single", losses=[5.0, 4.0])
    check_losses([fp8, a, Found("minimal", losses=[5.001, 4.001])], 3e-3)
    with pytest.raises(GptscaleError, match=r"loss 4\.100000 in minimal and 4\.000000 in single: more than 0\.003"):
        check_losses([fp8, a, Found("minimal", losses=[5.0, 4.1])], 3e-3)
    fp8.losses[1] = 4.04
    with pytest.raises(GptscaleError, match=r"loss 4\.040000 in single_fp8 and .*: more than 0\.03 apart"):
        check_losses([fp8, a], 3e-3)
    check_losses([], 3e-3)


def test_products_are_the_operations_of_a_step():
    """Three for each matrix: 6 N_matmul operations per token, the table with its padding rows."""
    rows, gpt = 64, TINY
    flops = sum(p.per_step * p.flops for p in model_ceilings.products(gpt, rows))
    assert flops == 6 * rows * (12 * gpt.n_layer * gpt.n_embd**2 + gpt.padded_vocab_size * gpt.n_embd)
    for p in model_ceilings.products(gpt, rows):
        calls = model_ceilings.routes(p, torch.float32, torch.device("cpu"))
        assert calls["mm"]().shape == (p.m, p.n)
        if "onednn" in calls:  # it computes the same, for a weight's gradient the transpose
            found = calls["onednn"]()
            torch.testing.assert_close(
                found.t() if p.how == "grad-weight" else found, calls["mm"](), rtol=1e-4, atol=1e-4
            )


def test_floors_of_the_contractual_shape():
    """Against docs/measurements/bench_model.md: 790 TFLOP/s and 4.3 TB/s make 11.8 us of products per token."""
    gpt, rows = PRESETS["1.6b"], 33 * 1024
    found = {f"{p.name} {p.how}": {"mm": p.flops / 790e12} for p in model_ceilings.products(gpt, rows)}
    least = model_ceilings.floors(gpt, rows, {"products": found, "copy_bytes_per_s": 4.3e12}, torch.bfloat16)
    us = {part: seconds / rows * 1e6 for part, seconds in least.items()}
    assert us["matrix products"] == pytest.approx(11.82, abs=0.01)
    assert us["attention"] == pytest.approx(0.60, abs=0.01)
    assert us["elementwise"] == pytest.approx(1.29, abs=0.01)
    assert us["loss"] == pytest.approx(0.047, abs=0.001)
    assert us["optimizer"] == pytest.approx(0.343, abs=0.001)
    assert tuple(us) == model_ceilings.PARTS


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
    ("gptscale::linear_gelu_backward",): "matrix products",
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
        assert part_of([name], []) is None  # what the host does between its operators


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
    found = list(work(trace, torch.device("cuda")))
    assert found == [("matrix products", 70.0), ("loss", 5.0), ("elementwise", 3.0)]
    assert ranges_around(trace[0]) == ["gptscale bench: loss"]


def test_a_kernel_that_python_launched_counts_by_its_name():
    """No operator has it, and a range is none; once one has, it counts there."""
    own = SimpleNamespace(name="_cross_entropy_kernel", duration=9.0)

    def event(name, kind, *kernels):
        time_range = SimpleNamespace(elapsed_us=lambda: 9.0)
        return SimpleNamespace(name=name, cpu_parent=None, kernels=kernels, device_type=kind, time_range=time_range)

    on_gpu = [event(name, DeviceType.CUDA) for name in ("_cross_entropy_kernel", "gptscale bench: loss", "nvjet_x")]
    within = event("gptscale bench: loss", DeviceType.CPU)
    assert list(work([within, *on_gpu], torch.device("cuda"))) == [("loss", 9.0)]
    within.kernels = (own,)
    assert list(work([within, *on_gpu], torch.device("cuda"))) == [("loss", 9.0)]


@pytest.mark.parametrize(
    ("error", "status", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 0, "out of memory"),
        (ValueError("no such kernel"), 1, "minimal failed"),
    ],
)
def test_a_contender_that_fails_is_a_row(error, status, failure, in_process, monkeypatch, tmp_path, capsys):
    def fail(task):
        raise error

    def run_worker(module, task):  # as bench.run_worker tells a worker's end
        try:
            return in_process(module, task)
        except ValueError as said:
            raise GptscaleError(f"{task['contender']} failed ({said})", "in bench", "see it") from None

    monkeypatch.setattr(bench_model, "run_worker", run_worker)
    monkeypatch.setitem(model_contenders.CONTENDERS, "minimal", fail)
    assert main([*WORDS, "--contenders", "single,minimal", "--csv", str(tmp_path / "b.csv")]) == status
    frame = pd.read_csv(tmp_path / "b.csv")
    assert frame[frame.kind == "failed"].name.tolist() == ["minimal"]
    assert failure in frame[frame.kind == "failed"].failure.item()
    assert f"minimal: {failure}" in capsys.readouterr().out


def test_ratios_are_medians_over_rounds():
    bench = resolve(ModelBenchOptions(device="cpu", rounds=3))
    mine = Found("single", times_s=[[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]], losses=[1.0])
    other = Found("handout", times_s=[[1.5, 1.5], [2.0, 2.0], [1.4, 1.4]], losses=[1.0])
    names = [f"{p.name} {p.how}" for p in model_ceilings.products(bench.gpt, bench.tokens)]
    ceilings = [  # 12 products in each of 6 layers, and 3 of the head
        {"products": dict.fromkeys(names, {"mm": 0.9 / 75 * f, "onednn": 0.8 / 75 * f}), "copy_bytes_per_s": 1e9}
        for f in (1, 2, 3)
    ]
    found = Report(bench, [mine, other], ceilings, "").ratios()
    assert found["over_handout"] == pytest.approx(1.4)
    assert found["gemm_time_over_step_time"] == pytest.approx(0.8)
    assert found["share_of_gemm_rate"] == pytest.approx(0.8 * 183_032_064 / 179_601_408)
    assert found["share_of_mm_rate"] == pytest.approx(0.9 * 183_032_064 / 179_601_408)
    # Products and attention at their rate, logits read and written at that of a copy, and more.
    least = [sum(model_ceilings.floors(bench.gpt, bench.tokens, c, torch.float32).values()) for c in ceilings]
    assert least[0] > 0.8 * (1 + 3_538_944 / 179_601_408) + 2 * 2048 * 50304 * 4 / 1e9
    assert found["share_of_roofline"] == pytest.approx(sorted([least[0] / 1, least[1] / 2, least[2] / 1])[1])


def test_fp8_has_figures_of_its_own_and_is_never_the_fastest_of_ours(monkeypatch, capsys):
    monkeypatch.setattr(model_report, "device_name", lambda device: "NVIDIA H200")
    bench = dataclasses.replace(
        resolve(ModelBenchOptions(device="cpu", dtype="bf16")), gpt=PRESETS["1.6b"], batch_size=33
    )
    times = {"single_compiled": 0.6, "single_graphs": 0.5, "single_fp8": 0.4, "minimal": 0.8}
    found = [Found(name, times_s=[[s, s]], losses=[1.0]) for name, s in times.items()]
    names = [f"{p.name} {p.how}" for p in model_ceilings.products(bench.gpt, bench.tokens)]
    report = Report(bench, found, [{"products": dict.fromkeys(names, {"mm": 1e-3}), "copy_bytes_per_s": 4e12}], "")
    assert report.ours.name == "single_graphs"
    rows = {f.name: report.row(f) for f in found}
    tflops = 33 * 1024 * 9.8016864e9 / 0.4 / 1e12
    assert rows["single_fp8"]["fp8_tflops"] == pytest.approx(tflops, rel=1e-6)
    assert [rows["single_fp8"][key] for key in ("tflops", "of_gemm_rate", "mfu")] == [None] * 3
    blocks = 6 * 12 * 48 * 1600**2
    least_s = 33 * 1024 * (blocks / 1979e12 + (9.8016864e9 - blocks) / 989.5e12)
    assert rows["single_fp8"]["fp8_mixed_utilisation"] == pytest.approx(least_s / 0.4, rel=1e-6)
    assert rows["single_fp8"]["over_ours"] == pytest.approx(0.8)
    assert rows["single_graphs"]["mfu"] == pytest.approx(tflops * 0.8 / 989.5, rel=1e-6)
    assert rows["single_graphs"]["fp8_tflops"] is rows["single_graphs"]["fp8_mixed_utilisation"] is None
    report.show()
    said = capsys.readouterr().out
    assert (
        f"single_fp8: {tflops:.4g} bf16-equivalent TFLOP/s, {least_s / 0.4:.1%} of the mixed fp8 and bf16 peak" in said
    )
    with pytest.raises(GptscaleError, match="no contender ran"):
        Report(bench, found[2:3], [], "")


@pytest.mark.parametrize(("floor", "status"), [("0.001", 0), ("1000", 1)])
def test_floors(floor, status, in_process, tmp_path, capsys):
    file = tmp_path / "floors.csv"
    file.write_text(f"name,floor\nover_minimal,{floor}\nshare_of_gemm_rate,0.0001\n")
    assert main([*WORDS, "--contenders", "single,minimal", "--floors", str(file)]) == status
    said = capsys.readouterr().out
    assert "share_of_gemm_rate" in said
    assert said.count("NOT REACHED") == status


@pytest.mark.parametrize(
    ("kind", "column", "sizes"), [("seq", "seq_len", (8, 16, 32)), ("layers", "layers", (1, 2, 3))]
)
def test_scaling(kind, column, sizes, in_process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(model_scale, {"seq": "SEQ_LENS", "layers": "LAYERS"}[kind], sizes)
    files = ["--csv", str(tmp_path / "s.csv"), "--png", str(tmp_path / "s.png")]
    own = {"seq": "--seq-len", "layers": "--layers"}[kind]
    shape = [word for pair in zip(SHAPE[::2], SHAPE[1::2], strict=True) if pair[0] != own for word in pair]
    assert main(["bench", "model", *shape, "--steps", "3", "--scale", kind, *files]) == 0
    frame = pd.read_csv(tmp_path / "s.csv")
    assert tuple(frame[column]) == sizes
    assert (frame.seq_len * frame.batch_size == 64).all()
    assert frame.tokens_per_s.to_numpy() == pytest.approx((1e6 / frame.us_per_token).to_numpy())
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "us per token = " in said
    assert " 1 threads, fp32, single\n" in said


def test_fit_finds_the_line_and_leaves_out_what_did_not_run():
    frame = pd.DataFrame({"seq_len": [256, 512, 1024, 2048], "status": ["ok", "ok", "ok", "oom"]})
    frame["us_per_token"] = [10.256, 10.512, 11.024, None]
    line = model_scale.fit(frame, "seq")
    assert line == pytest.approx((10.0, 1e-3, 0.0), abs=1e-9)
    assert model_scale.told(line, "seq") == "10.00 + 1.024 per 1024 positions"
    assert model_scale.fit(frame[2:], "seq") is None


def test_defaults_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    bench = resolve(ModelBenchOptions())
    assert bench.gpt == PRESETS["1.6b"]
    assert (bench.batch_size, bench.precision, bench.device) == (33, "bf16", "cuda")
    assert bench.steps * bench.rounds >= 50
    assert set(ModelBenchOptions().names(bench)) == {*bench_model.OURS, *bench_model.ON_CUDA, *bench_model.OTHERS}
    assert set(model_contenders.ON_CUDA) == set(bench_model.ON_CUDA)
    in_fp32 = resolve(ModelBenchOptions(dtype="fp32"))
    assert "single_fp8" not in ModelBenchOptions().names(in_fp32)
    with pytest.raises(GptscaleError, match="single_fp8: compared with bf16, not fp32, in --contenders"):
        resolve(ModelBenchOptions(dtype="fp32", contenders="single,single_fp8"))
    with pytest.raises(GptscaleError, match="single_fp8 alone has nothing to be compared with"):
        resolve(ModelBenchOptions(contenders="single_fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(Exception, match="bf16 needs Ampere"):
        resolve(ModelBenchOptions())


def test_a_gpu_as_it_is_found(monkeypatch):
    nvml = types.ModuleType("pynvml")
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU = 1, 2, 0
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-u": "handle"}[uuid]
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: {1: 1755, 2: 3201}[kind]
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1980
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 698_500
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 700_000
    nvml.nvmlDeviceGetTemperature = lambda handle, kind: 61
    nvml.nvmlSystemGetDriverVersion = lambda: "575.1"
    nvml.NVMLError = OSError
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = gpu_state(torch.device("cuda"))
    assert (found["name"], found["sm_clock_mhz"], found["memory_clock_mhz"]) == ("NVIDIA H200", 1755, 3201)
    assert (found["power_w"], found["power_limit_w"], found["temperature_c"]) == (698.5, 700.0, 61)
    assert gpu_state(torch.device("cpu")) == {}

    def refuse(*_):
        raise OSError("Not Supported")

    nvml.nvmlDeviceGetPowerUsage = refuse
    assert gpu_state(torch.device("cuda")) == found | {"power_w": None}
    nvml.nvmlDeviceGetHandleByUUID = refuse
    assert gpu_state(torch.device("cuda")) == {"name": "NVIDIA H200"}


def test_the_peak_is_that_of_the_warm_up_too(monkeypatch):
    """A step that is replayed from a CUDA graph allocates nothing."""
    done = []
    monkeypatch.setattr(model_contenders, "reset_peak_memory", lambda device: done.append("reset"))
    data = SimpleNamespace(get=lambda i: done.append(i) or torch.zeros(()))
    found = model_contenders.timed_steps(lambda loss: loss, data, {"warmup_steps": 2, "steps": 3}, torch.device("cpu"))
    assert done == ["reset", 0, 1, 2, 3, 4]
    assert (len(found["step_times_s"]), len(found["losses"])) == (3, 5)


REFUSED = {
    "model": (["--model", "1.7b"], "did you mean '1.6b'?"),
    "contender": (["--contenders", "single,minimum"], "unknown contender 'minimum', in --contenders, did you mean 'minimal'?"),
    "no contender": (["--contenders", ""], "unknown contender ''"),
    "on CUDA": (["--contenders", "single,single_graphs,single_fp8", "--device", "cpu"],
                "single_graphs, single_fp8: only on a CUDA device, in --contenders"),
    "heads": (["--hidden", "100", "--heads", "3"], "n_embd 100 is not divisible by n_head 3, in the model"),
    "steps": (["--steps", "0"], "steps 0 is out of range, in --steps, use 1 to 10000"),
    "batch": (["--batch-size", "-1"], "batch_size -1 is out of range, in --batch-size"),
    "dtype": (["--dtype", "fp16"], "'fp16'"),
    "option": (["--hiden", "32"], "did you mean '--hidden'?"),
    "text": (["--data", "text", "--vocab-size", "256"], "text needs a vocabulary of 257, in --vocab-size"),
    "no GPU": (["--device", "cuda"], "no CUDA device is visible, in --device cuda"),
    "csv": (["--csv", "nowhere/b.csv"], "nowhere/b.csv cannot be written, in --csv"),
    "floors missing": (["--floors", "nowhere.csv"], "nowhere.csv is no CSV with columns name and floor"),
    "floors of a table": (["--floors", "f.csv", "--scale", "seq"], "a scaling table has no floors"),
    "rounds of a table": (["--scale", "seq", "--rounds", "2"], "--scale seq has its own, a turn at each size, in --rounds"),
    "layers of a table of layers": (["--scale", "layers", "--layers", "3"], "in --layers, leave it out"),
    "table of many": (["--scale", "seq", "--contenders", "single,minimal"], "a scaling table is of one contender"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    words, message = REFUSED[case]
    assert main(["bench", "model", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_floors_of_what_is_not_measured(tmp_path, capsys):
    (tmp_path / "f.csv").write_text("name,floor\nover_handout,1.4\n")
    words = ["--contenders", "single,minimal", "--floors", str(tmp_path / "f.csv")]
    assert main(["bench", "model", *SHAPE, *words]) == 2
    assert "no ratio 'over_handout' is measured" in capsys.readouterr().err
