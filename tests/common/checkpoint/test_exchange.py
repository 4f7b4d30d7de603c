"""Checkpoints for other programs and from them: every bit comes back, and what cannot be read is refused in one line."""

import json
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from gptscale.common.checkpoint.exchange import MOMENTS
from gptscale.common.checkpoint.folders import temporary_name
from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import Draft, write
from gptscale.common.model.hf_weights import to_hf
from gptscale.common.settings.families import model_class
from gptscale.common.settings.run_config import SHAPE, RunConfig
from gptscale.common.state import Shard
from gptscale.launchers.cli import main

pytest.importorskip("transformers")


@pytest.fixture(params=["tiny", "llama-tiny", "qwen3-tiny"])
def saved(request, tmp_path):
    """A model with random weights, and a checkpoint of it after 3 steps whose moments are random."""
    torch.manual_seed(0)
    # Longer sequences than the preset's.
    shape = RunConfig(model=request.param, n_layer=2, seq_len=160).gpt()
    model = model_class(shape)(shape)
    with torch.no_grad():
        for weight, name, _ in shape.parameters():
            model.get_parameter(name).normal_()
            if weight.cut == "ids":
                model.get_parameter(name)[shape.vocab_size :] = 0.0
    shards = [(f"model/{name}", p) for name, p in model.named_parameters()]
    for kind in MOMENTS:
        shards += [(f"adamw.{kind}/{name}", p * p.sign()) for name, p in model.named_parameters()]
    work = {"model": request.param, **{name: getattr(shape, name) for name in SHAPE}, "optimizer": "adamw"}
    work["seq_len"] = 160
    draft = Draft(tmp_path / "checkpoints" / "step-3", tmp_path / "checkpoints" / temporary_name("step-3"), {}, 0, {})
    facts = {"step": 3, "counters": {"optimizer_steps": 3.0}, "recipe": "fsdp", "world_size": 4, "workload": work}
    tensors = (Shard(name, t.detach(), tuple(t.shape), (0,) * t.dim()) for name, t in shards)
    write(draft, tensors, facts, keep=2, gather=lambda value: [value])
    return model, tmp_path


def test_transformers_reads_it_and_it_comes_back_with_equal_bits(saved, monkeypatch):
    from transformers import AutoModelForCausalLM

    model, folder = saved
    # In several files.
    monkeypatch.setattr("gptscale.common.checkpoint.writer.FILE_BYTES", 2**18)
    assert main(["checkpoint", "export", str(folder), "--out", str(folder / "hf")]) == 0
    assert len([*(folder / "hf").glob("*.safetensors")]) > 1
    ids = torch.arange(64).reshape(2, 32)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, to_hf(model).eval()(ids).logits)
    assert main(["checkpoint", "import", str(folder / "hf"), "--out", str(folder / "back")]) == 0
    reader = Reader(folder / "back" / "step-0").verify()
    for name, p in model.named_parameters():
        assert torch.equal(reader.read(f"model/{name}"), p)
        assert not any(reader.read(f"adamw.{kind}/{name}").any() for kind in MOMENTS)


@pytest.mark.parametrize("saved", ["tiny", "llama-tiny"], indirect=True)
def test_dcp_has_the_optimizer_too_for_a_program_with_transformers_model(saved):
    model, folder = saved
    assert main(["checkpoint", "export", str(folder), "--out", str(folder / "hf")]) == 0
    words = [str(folder / "checkpoints" / "step-3"), "--format", "dcp", "--out", str(folder / "dcp")]
    assert main(["checkpoint", "export", *words]) == 0
    theirs = to_hf(model)
    optimizer = torch.optim.AdamW(theirs.parameters())
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = dict(zip(("model", "optimizer"), get_state_dict(theirs, optimizer, options=flat), strict=True))
    wanted = {name: value.clone() for name, value in state["model"].items()}
    for value in (*state["model"].values(), *state["optimizer"].values()):
        if isinstance(value, torch.Tensor):
            value.zero_()
    # The groups of an optimizer are the program's own.
    dcp.load(state, checkpoint_id=folder / "dcp", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    known = dcp.FileSystemReader(folder / "dcp").read_metadata().state_dict_metadata
    for name, value in state["model"].items():
        assert torch.equal(value, wanted[name])
        if f"optimizer.state.{name}.exp_avg" in known:
            assert torch.equal(state["optimizer"][f"state.{name}.exp_avg"], wanted[name].abs())
            assert state["optimizer"][f"state.{name}.step"] == 3
    words = ["checkpoint", "import", str(folder / "dcp"), "--format", "dcp", "--out", str(folder / "back")]
    assert main([*words, "--config", str(folder / "hf"), "--trust"]) == 0
    ours, back = Reader(folder / "checkpoints" / "step-3"), Reader(folder / "back" / "step-3").verify()
    assert ours.shapes == back.shapes
    assert all(torch.equal(ours.read(name), back.read(name)) for name in ours.shapes)


@pytest.mark.parametrize("saved", ["tiny"], indirect=True)
def test_what_cannot_be_read_is_refused_and_nothing_is_written(saved, capsys, monkeypatch):
    folder = saved[1]
    assert main(["checkpoint", "export", str(folder), "--out", str(folder / "hf")]) == 0
    config = json.loads((folder / "hf" / "config.json").read_text())
    for name, change in (("other", {"n_inner": 99}), ("none", {"model_type": "bert"})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | change))
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text(json.dumps(config))
    lenet = Draft(folder / "step-1", folder / temporary_name("step-1"), {}, 0, {})
    facts = {"step": 1, "counters": {}, "workload": {"model": "lenet"}}
    write(lenet, [Shard("model/fc", torch.ones(2), (2,), (0,))], facts, keep=2, gather=lambda value: [value])
    (folder / "unsaved").mkdir()
    (folder / "unsaved" / "run.json").write_text("{}")
    of_dcp = ["--format", "dcp", "--config", folder / "empty", "--trust"]
    capsys.readouterr()
    for words, message in (
        (["export", folder / "step-1"], "its model is no preset of gptscale run"),
        (["export", folder / "unsaved"], "the run has saved no checkpoint"),
        (["import", folder / "empty"], "the checkpoint cannot be read"),
        (["import", folder / "empty", *of_dcp], "the checkpoint cannot be read"),
        (["export", "nowhere"], "there is no folder nowhere"),
        (["export", folder / "hf"], "manifest.json is missing"),
        (["export", folder, "--trust"], "no DCP folder is read, in --trust"),
        (["import", folder / "none"], "it is no model of transformers that this package has"),
        (["import", folder / "other"], "n_inner 99"),
        (["import", folder / "hf"], "has no weight transformer.wte.weight"),
        (["import", folder / "hf", "--format", "dcp"], "the metadata of a DCP folder is a pickle"),
    ):
        status = 5 if "cannot be read" in message else 2
        assert main(["checkpoint", *map(str, words), "--out", str(folder / "new")]) == status
        assert message in (printed := capsys.readouterr().err)
        assert printed.count("\n") == 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: Mock(free=10**6))
    assert main(["checkpoint", "import", str(folder / "hf"), "--out", str(folder / "new")]) == 5
    assert "bytes on the disk (1 checkpoints of 5," in capsys.readouterr().err
    assert not [*folder.glob("*new*")]
    for out, status in (("hf", 2), ("empty/config.json/x", 5)):
        assert main(["checkpoint", "export", str(folder), "--out", str(folder / out)]) == status
        assert ("is there already" if status == 2 else "Not a directory") in capsys.readouterr().err
