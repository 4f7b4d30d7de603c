"""The bench of the model at shapes of milliseconds: contenders do equal work, and figures are what they say."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from benchmarks.model import contenders as model_contenders
from benchmarks.model import options as model_options
from benchmarks.model import scale as model_scale
from benchmarks.model import worker as model_worker
from benchmarks.model.__main__ import main
from gptscale.common.errors import GptscaleError
from gptscale.launchers.cli import start

SHAPE = "--hidden 32 --layers 2 --heads 2 --seq-len 32 --vocab-size 301 --batch-size 2 --threads 1 --device cpu".split()
WORDS = [*SHAPE, "--steps", "3", "--rounds", "2"]


@pytest.mark.slow
def test_all_contenders_do_the_same_work_and_the_figures_belong_together(in_process, tmp_path, capsys):
    pytest.importorskip("transformers")
    files = {name: tmp_path / f"b.{name}" for name in ("csv", "png")}
    assert start(main, [*WORDS, *(word for name, file in files.items() for word in (f"--{name}", str(file)))]) == 0
    frame = pd.read_csv(files["csv"])
    contenders = frame[frame.kind == "contender"].set_index("name")
    assert list(contenders.index) == [*model_options.OF_THIS_PACKAGE, *model_options.OTHERS]
    assert (contenders.steps_timed == 6).all()
    assert contenders.loss_last.max() - contenders.loss_last.min() < 1e-5
    assert contenders.tokens_per_s.to_numpy() == pytest.approx((64 / contenders.seconds).to_numpy())
    ratios = frame[frame.kind == "ratio"].set_index("name").ratio
    assert contenders.over_ours.to_numpy() == pytest.approx([ratios[f"over_{name}"] for name in contenders.index])
    our_rows = contenders.loc[list(model_options.OF_THIS_PACKAGE)]
    assert ratios[f"over_{our_rows.seconds.idxmin()}"] == 1
    assert (frame[frame.kind.isin(["product", "ceiling"]) & (frame.name != "copy")].seconds > 0).all()
    parts = frame[frame.kind == "part"].set_index("name")
    for name in model_options.OF_THIS_PACKAGE:
        of_one = parts[parts.index.str.startswith(f"{name}: ")]
        assert of_one.us_per_token.sum() == pytest.approx(our_rows.seconds[name] / 64 * 1e6)
        # Every part but the gaps has work in it.
        assert (of_one.us_per_token[:5] > 0).all()
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for word in ("all products of a step", "handout_best", "of GEMM rate", "matrix products", "gaps"):
        assert word in printed


@pytest.mark.parametrize("fault", ["learning rate", "weights", "batches"])
def test_other_work_is_told_behind_its_figures(fault, in_process, monkeypatch, tmp_path, capsys):
    make = model_contenders.CONTENDERS["minimal"]

    def wrong(task):
        step, engine = make(task)
        if fault == "batches":
            return model_contenders.Contender(lambda b: step(type(b)(b.step, b.targets.clamp(0), b.targets)), engine)
        return model_contenders.Contender(step, engine)

    monkeypatch.setitem(model_contenders.CONTENDERS, "minimal", wrong)
    if fault == "learning rate":
        original = model_contenders.make_step
        monkeypatch.setattr(model_contenders, "make_step", lambda m, **o: original(m, **{**o, "lr": 1e-3}))
    if fault == "weights":
        monkeypatch.setattr(model_contenders, "take_weights", lambda model, gpt: None)
    assert start(main, [*WORDS, "--contenders", "single,minimal", "--csv", str(tmp_path / "b.csv")]) == 2
    result = capsys.readouterr()
    printed = result.err.splitlines()[-1]
    assert "in minimal and" in printed
    assert "more than 0.0001 apart, in benchmarks.model" in printed
    rows = pd.read_csv(tmp_path / "b.csv").query("kind == 'contender'").set_index("name")
    assert (rows.tokens_per_s > 0).all()
    assert rows.failure.isna()["single"]
    assert rows.failure["minimal"] in printed
    assert f"minimal: {rows.failure['minimal']}" in result.out


@pytest.mark.parametrize(
    ("error", "status", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 0, "out of memory"),
        (GptscaleError("minimal failed", "in bench", "see it"), 1, "minimal failed"),
    ],
)
def test_a_contender_that_fails_is_a_row(error, status, failure, in_process, monkeypatch, tmp_path, capsys):
    def fail(task):
        raise error

    monkeypatch.setitem(model_contenders.CONTENDERS, "minimal", fail)
    assert start(main, [*WORDS, "--contenders", "single,minimal", "--csv", str(tmp_path / "b.csv")]) == status
    frame = pd.read_csv(tmp_path / "b.csv")
    assert frame[frame.kind == "failed"].name.tolist() == ["minimal"]
    assert failure in frame[frame.kind == "failed"].failure.item()
    assert f"minimal: {failure}" in capsys.readouterr().out


@pytest.mark.parametrize(("floor", "status"), [("0.001", 0), ("1000", 1)])
def test_floors(floor, status, in_process, tmp_path, capsys):
    file = tmp_path / "floors.csv"
    file.write_text(f"name,floor\nover_minimal,{floor}\nshare_of_gemm_rate,0.0001\n")
    assert start(main, [*WORDS, "--contenders", "single,minimal", "--floors", str(file)]) == status
    printed = capsys.readouterr().out
    assert "share_of_gemm_rate" in printed
    assert printed.count("NOT REACHED") == status


@pytest.mark.parametrize(
    ("kind", "column", "sizes"), [("seq", "seq_len", (8, 16, 32)), ("layers", "layers", (1, 2, 3))]
)
def test_scaling(kind, column, sizes, in_process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(model_scale, {"seq": "SEQ_LENS", "layers": "LAYERS"}[kind], sizes)
    files = ["--csv", str(tmp_path / "s.csv"), "--png", str(tmp_path / "s.png")]
    own = {"seq": "--seq-len", "layers": "--layers"}[kind]
    shape = [word for pair in zip(SHAPE[::2], SHAPE[1::2], strict=True) if pair[0] != own for word in pair]
    assert start(main, [*shape, "--steps", "3", "--scale", kind, *files]) == 0
    frame = pd.read_csv(tmp_path / "s.csv")
    assert tuple(frame[column]) == sizes
    assert (frame.seq_len * frame.batch_size == 64).all()
    assert frame.tokens_per_s.to_numpy() == pytest.approx((1e6 / frame.us_per_token).to_numpy())
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "us per token = " in printed
    assert " 1 threads, fp32, single\n" in printed


def test_the_peak_is_that_of_the_warm_up_too(monkeypatch):
    """A step that is replayed from a CUDA graph allocates nothing."""
    done = []
    monkeypatch.setattr(model_worker, "reset_peak_memory", lambda device: done.append("reset"))
    data = SimpleNamespace(get=lambda i: done.append(i) or torch.zeros(()))
    result = model_worker.timed_steps(lambda loss: loss, data, {"warmup_steps": 2, "steps": 3}, torch.device("cpu"))
    assert done == ["reset", 0, 1, 2, 3, 4]
    assert (len(result["step_times_s"]), len(result["losses"])) == (3, 5)
