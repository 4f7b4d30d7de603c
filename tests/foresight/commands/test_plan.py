"""`gptscale plan` as it is typed, with trials that are told instead of simulated."""

import json
import re

import pytest
from told_trials import tried
from transformers import LlamaConfig

from gptscale.common.errors import ConfigError
from gptscale.common.model import own as own_model
from gptscale.foresight.commands.plan import main
from gptscale.foresight.plan import planning
from gptscale.foresight.simulate.simulation import simulate
from gptscale.launchers.commands.run import main as run
from gptscale.launchers.run.options import parse_run

SMALL = "--model gpt2 --gpus-per-node 2 --global-batch-size 16 --recipes ddp,fsdp,zero1".split()


@pytest.fixture(autouse=True)
def _no_simulation(monkeypatch):
    monkeypatch.setattr(planning, "simulated", tried)


def test_a_plan_recommends_a_command_and_leaves_its_files(tmp_path, capsys):
    files = [f"--{kind}={tmp_path}/plan.{kind}" for kind in ("png", "md", "html")]
    assert main([*SMALL, *files, "--explain", "1", "--save", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recommended  ddp dp2")
    assert "gptscale run ddp --nproc 2 --model gpt2 --global-batch-size 16" in out
    assert out.count("  Not ") == 2
    assert "data sheet: no such device was measured" in out
    # Each moment of a stream is a letter.
    streams = {line.split()[2]: line.split()[-1] for line in out.splitlines() if line.startswith("  rank 0 ")}
    assert re.fullmatch(r"P+[:.]*", streams["stream"])
    assert re.fullmatch(r"[~:.]+", streams["link"])
    assert len(streams["stream"]) == len(streams["link"]) == 80
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert " * | ddp dp2 |" in (tmp_path / "plan.md").read_text()
    assert "data:image/png;base64," in (tmp_path / "plan.html").read_text()
    content = json.loads((tmp_path / "plan.json").read_text())
    assert {row["memory_by"] for row in content["rows"]} == {"simulation"}
    assert {row["recipe"] for row in content["rows"]} == {"ddp", "fsdp", "zero1"}


def test_a_saved_row_starts_a_run_and_contradictions_are_refused(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    main([*SMALL, "--save", str(plan)])
    capsys.readouterr()
    its = ["--plan", str(plan), "--dry-run", "--data", "synthetic", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert run(its) == 0
    out = capsys.readouterr().out
    assert "recipe   ddp on 2 x cpu, bf16" in out
    assert f"--plan {plan}" in out
    with pytest.raises(ConfigError, match="not what the plan predicts: micro_batch_size"):
        run([*its, "--micro-batch-size", "1"])


@pytest.fixture
def own(tmp_path):
    """A config of transformers, whose products are large enough for the mock of CUDA to share its host's memory."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4
    )
    config.update({"num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(tmp_path)
    return ["--model", f"hf:{tmp_path}", "--seq-len", "64"]


def widen(folder, width):
    """Change the config, as another process would see it."""
    file = folder / "config.json"
    file.write_text(re.sub(r'"intermediate_size": \d+', f'"intermediate_size": {width}', file.read_text()))
    own_model.look.cache_clear()
    own_model._shape_of.cache_clear()


def test_a_plan_of_a_model_of_ones_own(own, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    words = f"--gpus-per-node 4 --global-batch-size 16 --recipes ddp,tensor_parallel --save {plan}".split()
    assert main([*own, *words]) == 0
    out = capsys.readouterr().out
    assert f"gptscale run ddp --nproc 4 --model {own[1]} --seq-len 64" in out
    assert "left out: tensor_parallel: hf:" in out
    assert "num_key_value_heads 2 is not divisible by 4" in out
    widen(tmp_path, 4096)
    with pytest.raises(ConfigError, match="not what the plan predicts"):
        run(["--plan", str(plan), "--dry-run", "--data", "synthetic", "--out", str(tmp_path / "out")])


@pytest.mark.slow
def test_a_simulation_of_a_changed_file_is_a_new_one(own, tmp_path):
    peaks = []
    for width in (2048, 4096):
        widen(tmp_path, width)
        config, its = parse_run("hybrid_3d", [*own, *"--tp-size 2 --data synthetic --device cuda".split()])
        its_world = {"world_size": 4, "ranks_per_node": 4}
        peaks.append(simulate("hybrid_3d", config, its, device="h100-80", rank=0, **its_world).memory().allocated)
    assert peaks[1] > 1.3 * peaks[0]


def recorded(words, world_size):
    """Return what a step of a recipe asks of its device, from a simulation."""
    recipe, *options = f"{words} --model tiny --micro-batch-size 2 --data synthetic --device cuda".split()
    ready = parse_run(recipe, options)
    return simulate(recipe, *ready, device="h100-80", rank=0, world_size=world_size, ranks_per_node=8).recorded


@pytest.mark.slow
def test_replicas_of_hybrid_3d_average_once_a_step():
    words = "hybrid_3d --tp-size 2 --data-parallel ddp --grad-accum-steps"
    steps = [recorded(f"{words} {n}", world_size=8) for n in (1, 3)]
    once, thrice = (sum((work.name, work.ranks) == ("all-reduce", 4) for work in step) for step in steps)
    assert once == thrice > 1


@pytest.mark.slow
def test_tensor_ranks_gather_in_the_type_of_products():
    steps = [recorded(f"tensor_parallel --precision {precision}", world_size=2) for precision in ("fp32", "bf16")]
    whole, half = (sum(work.nbytes for work in step if work.name == "all-gather") for step in steps)
    # The embedding and the head's input are in fp32.
    assert 1.6 < whole / half <= 2


def test_more_devices_are_drawn(tmp_path):
    assert main([*SMALL, "--scaling", "--png", str(tmp_path / "scaling.png")]) == 0
    assert (tmp_path / "scaling.png").exists()
