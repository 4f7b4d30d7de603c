"""All ways of `gptscale bench parts` compute the same at small shapes, and one which does not is an error."""

import functools

import pandas as pd
import pytest
import torch

from gptscale.common.process import begin
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.launchers.bench import timing
from gptscale.launchers.bench.parts import attention as parts_attention
from gptscale.launchers.bench.parts import cases as parts_cases
from gptscale.launchers.bench.parts import command as bench_parts
from gptscale.launchers.bench.parts import measure as parts_measure
from gptscale.launchers.bench.parts.command import PartsOptions, resolve
from gptscale.launchers.cli import main

CPU = torch.device("cpu")
SHAPE = (
    "--hidden 128 --layers 1 --heads 32 --seq-len 16 --vocab-size 301 --batch-size 2 --threads 1 --device cpu".split()
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "ROUND_S", 1e-4)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setattr(begin, "keep_freed_memory", lambda: None)
    # the compiler's front end, without its back end's minutes of C++
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_way_of_every_part_computes_the_same(dtype, tmp_path, capsys):
    assert main(["bench", "parts", *SHAPE, "--dtype", dtype, "--csv", str(tmp_path / "p.csv")]) == 0
    frame = pd.read_csv(tmp_path / "p.csv")
    assert frame.failure.isna().all()
    ways = frame.groupby("part", sort=False).way.apply(list).to_dict()
    assert ways == {
        "attention 32 x 4": ["auto, as is", "math, as is"]
        + [
            w
            for to in (8, 64)
            for w in (f"auto, padded to {to}", f"auto, padded to {to}, compiled", f"auto, {to} wide")
        ],
        "attention 2 x 64": ["auto, as is", "math, as is"],
        "softmax of 32 rows": ["in place, fp32", "log_softmax", "log_softmax, compiled", "F.cross_entropy"],
        "head and loss": ["ours", "ours, softmax in fp32", "whole logits", "whole logits, compiled"],
        "MLP": ["torch", "custom", "compiled"],
        "GELU": ["torch", "custom", "torch, compiled"],
        "residual and LayerNorm": ["eager", "compiled"] + ["16-bit stream, compiled"] * (dtype == "bf16"),
        "optimizer": ["fp32 moments", "bf16 moments", "8bit moments"],
    }
    assert (frame.groupby("part").over_first.first() == 1).all()
    assert (frame.both_ms > 0).all()
    timed = frame[frame.forward_ms.notna()]
    assert set(timed.part) == {part for part in ways if not part.startswith(("softmax", "optimizer"))}
    moved = frame[frame.part == "GELU"]
    size = 4 if dtype == "fp32" else 2
    assert (moved.gb_per_s * moved.both_ms * 1e6).tolist() == pytest.approx([5 * 32 * 4 * 128 * size] * len(moved))
    assert (frame.error <= parts_measure.TOLERANCE[{"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]]).all()
    printed = capsys.readouterr().out
    for word in ("copy ", "of product", "auto, 8 wide", "8bit moments"):
        assert word in printed


def test_a_way_that_computes_something_else_is_an_error_behind_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        parts_attention, "causal_attention", lambda qkv, multiple=1: qkv[:, :, :, 2].flatten(2) * multiple
    )
    words = ["--parts", "attention,gelu", "--no-compiled", "--csv", str(tmp_path / "p.csv")]
    assert main(["bench", "parts", *SHAPE, *words]) == 2
    printed = capsys.readouterr()
    assert "attention 32 x 4: math, as is" not in printed.err
    assert "attention 32 x 4: auto, padded to 8 differs by" in printed.err.splitlines()[-1]
    frame = pd.read_csv(tmp_path / "p.csv").set_index("way")
    assert frame.both_ms.notna()[["auto, as is", "torch"]].all()
    assert frame.both_ms.isna()["auto, padded to 8"]


def test_a_run_that_is_cut_short_leaves_its_whole_parts(monkeypatch, tmp_path):
    def end(shape):
        raise KeyboardInterrupt

    monkeypatch.setitem(parts_cases.PARTS, "norm", end)
    words = ["--parts", "gelu,norm,optimizer", "--no-compiled", "--csv", str(tmp_path / "p.csv")]
    with pytest.raises(KeyboardInterrupt):
        bench_parts.main([*SHAPE, *words])
    frame = pd.read_csv(tmp_path / "p.csv")
    assert frame.way.tolist() == ["torch", "custom"]
    assert (frame.both_ms > 0).all()
    assert (frame.copy_gb_per_s > 0).all()


def test_kernels_and_shapes_on_a_gpu(monkeypatch):
    """What would run there: seen by names, since no kernel is called before it is compared."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    shape = resolve(PartsOptions())
    assert shape.gpt == PRESETS["1.6b"]
    assert (shape.batch_size, shape.dtype, shape.device.type) == (33, torch.bfloat16, "cuda")
    assert parts_attention.kernels(shape) == ["auto", "flash", "cudnn", "efficient"]
    names = [name for name, _ in parts_cases.in_triton(torch.zeros(1), 50257)]
    assert names[0] == "Triton, 8192 by 16 warps"
    assert len(set(names)) == len(names) > 3
    with pytest.raises(Exception, match="whose module flash_attn_interface is not installed, in --attention"):
        resolve(PartsOptions(flash3=True))


REFUSED = {
    "part": (["--parts", "atention"], "unknown part 'atention', in --parts, did you mean 'attention'?"),
    "model": (["--model", "1.7b"], "did you mean '1.6b'?"),
    "batch": (["--batch-size", "0"], "batch_size 0 is out of range, in --batch-size, use 1 to 100000"),
    "heads of 64": (["--parts", "attention64", "--hidden", "60", "--heads", "6"], "has no other heads of 64 to compare with"),
    "csv": (["--csv", "nowhere/p.csv"], "nowhere/p.csv cannot be written, in --csv"),
    "flash3": (["--flash3"], "flash3 attention needs a CUDA device"),
    "no GPU": (["--device", "cuda"], "no CUDA device is visible, in --device cuda"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if case in ("no GPU", "flash3") and torch.cuda.is_available():
        pytest.skip("there is one")
    words, message = REFUSED[case]
    assert main(["bench", "parts", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
