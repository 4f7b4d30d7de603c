"""Models of one's own: transformers' by their config, and a module in a file, against one process and against mistakes."""

import json
import sys

import pytest
import torch
import transformers
from worlds import assert_same_state, ok, rows, steps

from gptscale.common.errors import ConfigError
from gptscale.common.model.tensor_plan import tensor_plan
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.cli import main
from gptscale.recipes import unsupported

SIZES = {"vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=2, tie_word_embeddings=True),
    # Its keys have a bias of their own, whose gradient is truly zero.
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64, dropout=0.0),
    "mixtral": transformers.MixtralConfig(**SIZES, intermediate_size=96, num_key_value_heads=2, num_local_experts=4),
}
LLAMA = CONFIGS["llama"].to_dict()
MINE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(n), nn.Linear(n, n), nn.Linear(n, n)
    def forward(self, x):
        return x + self.out(torch.tanh(self.mix(self.norm(x).cumsum(1) / 9)))

class Mine(nn.Module):
    def __init__(self, vocabulary=257):
        super().__init__()
        self.table, self.stack = nn.Embedding(vocabulary, 32), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, vocabulary, bias=False)
        self.register_buffer("scale", torch.tensor(20.0), persistent=False)
        self.head.weight = self.table.weight
    def forward(self, inputs, targets):
        x = self.table(inputs) * self.scale
        for block in [*self.stack, self.stack[0]]:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")
"""
MIXING = """
class Mixing(Block):
    def forward(self, x):
        return x + self.out(torch.softmax(self.mix(self.norm(x)), -1))

def mixing():
    m = Mine()
    m.stack = nn.ModuleList(Mixing() for _ in range(3))
    return m
"""
MISTAKES = {
    "raise ValueError('no\\nluck')": "cannot be built (ValueError: no luck)",
    "return 3": "returns int",
    "m = Mine(); m.stack = m.stack[:1]; return m": "no list of equal modules",
    "return Mine().bfloat16()": "in torch.bfloat16, where weights are fp32",
    "m = Mine(); m.table.weight.requires_grad = False; return m": "without a gradient",
    "m = Mine(); m.more = nn.Linear(2, 2); return m": "does not use more.weight, more.bias",
    "m = Mine(); m.stack[1].mix.weight = m.stack[0].mix.weight; return m": "of another block",
    "with torch.device('meta'): return Mine()": "on the meta device, without values",
    "m = Mine(); m.forward = lambda i, t: m.table(i); return m": "returns no loss but a tensor (2, 16, 32)",
    "m = Mine(); m.forward = lambda i, t: m.table(i).mean(); return m": "returns a mean",
    "return Mine(100)": "tokenizer bytes has 257 ids, the model's vocabulary 100",
}


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for name, config in CONFIGS.items():
        config.save_pretrained(name)
    transformers.LlamaConfig(**LLAMA | {"num_hidden_layers": 4}).save_pretrained("deep")
    (tmp_path / "mine.py").write_text(f"{MINE}\ndef build():\n    return Mine()\n{MIXING}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [*(f"hf:{name}" for name in CONFIGS), "mine.py:build"])
def test_a_model_of_ones_own_is_trained_as_by_one_process(model, models, tmp_path):
    recipes = {"hf:opt": "ddp,pipeline", "hf:llama": "fsdp,zero3,fairscale_sdp,pipeline"}.get(model, "fsdp,zero3")
    words = ["--model", model, "--recipes", f"{recipes},tensor_parallel", "--optimizers", "sgd", "--steps", 4]
    ok("parity", *words, "--seq-len", 32, "--out", tmp_path, timeout=880)
    figures = [float(row[k]) for row in rows(tmp_path / "parity.csv") for k in ("loss", "grad_norm", "weights")]
    assert max(figures) <= 1e-5


@pytest.mark.timeout(600)
def test_three_axes_train_it_as_one_process(models, tmp_path):
    words = "--model hf:llama --seq-len 32 --steps 3 --no-verdict --global-batch-size 16"
    work = [*words.split(), "--out", tmp_path]
    ok("run", "single", *work, "--run-name", "one")
    ok("run", "hybrid_3d", "--nproc", 4, "--tp-size", 2, "--pp-size", 2, *work, "--run-name", "four")
    one, four = (steps(tmp_path / "runs" / name)[["loss", "grad_norm"]] for name in ("one", "four"))
    assert ((one - four).abs() / one).max().max() <= 1e-5


@pytest.mark.timeout(600)
def test_it_resumes_to_the_bit_and_moves_to_one_process(models, tmp_path):
    work = ["--model", "hf:llama", "--seq-len", 32, "--steps", 4, "--no-verdict", "--out", tmp_path, "--dropout", 0.1]
    ok("run", "fsdp", "--nproc", 2, *work, "--save-every", 2, "--run-name", "whole")
    whole = tmp_path / "runs" / "whole"
    resume = ["--resume", whole / "checkpoints" / "step-2", "--save-last"]
    ok("run", "fsdp", "--nproc", 2, *work, *resume, "--run-name", "again")
    assert ok("run", "single", *work, *resume, "--run-name", "moved").stderr == ""
    again = tmp_path / "runs" / "again"
    assert steps(whole).loc[3:, ["loss", "grad_norm"]].equals(steps(again)[["loss", "grad_norm"]])
    assert_same_state(again / "checkpoints" / "step-4", whole / "checkpoints" / "step-4")


def test_weights_are_those_of_the_folder_and_any_other_shape_is_refused(models, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    model.save_pretrained("whole")
    shape = RunConfig(model="hf:whole").gpt()
    for name, p in model.named_parameters():
        assert torch.equal(shape.given(f"own.{name}")[0 : len(p)], p)
    (tmp_path / "whole" / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 48}))
    with pytest.raises(ConfigError, match="in its files, and"):
        RunConfig(model="hf:whole", seed=1)


def is_refused(words, said, tmp_path, capsys):
    assert main(["run", *words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("body", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(body, models, tmp_path, capsys, monkeypatch):
    name = f"mistake_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"{MINE}\ndef build():\n    {body}\n")
    words = ["fsdp", "--nproc", "2", "--seq-len", "16", "--model", f"{name}.py:build"]
    is_refused(words, MISTAKES[body], tmp_path, capsys)


BAD_CONFIGS = {
    "has no model_type 'nonesuch'": ({"model_type": "nonesuch", "vocab_size": 9}, ""),
    "it has no vocab_size": ({"model_type": "llama"}, ""),
    "cannot be read": (None, ""),
    "is trained as it is, in --n-layer": (LLAMA, "--n-layer 3"),
    "work with presets only": (LLAMA, "--optimizer muon"),
    "positions for 128 tokens, not 129": (LLAMA, "--seq-len 129"),
}


@pytest.mark.parametrize("said", BAD_CONFIGS)
def test_a_config_that_cannot_be_trained_is_one_line(said, tmp_path, capsys):
    config, words = BAD_CONFIGS[said]
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    is_refused(["ddp", "--model", f"hf:{tmp_path}/config.json", *words.split()], said, tmp_path, capsys)


PLANS = {"late": "stack.2.mix", "lost": "stack.*.nothing", "half": "stack.*.mix", "odd": "stack.*.norm"}
NO_SPLITS = {
    "num_key_value_heads 2 is not divisible by 4": "tensor_parallel hf:llama --nproc 4",
    "use a tp_size that divides it": "hybrid_3d hf:llama --nproc 8 --tp-size 4",
    "names stack.*.nothing, which is no module": "tensor_parallel mine.py:build --nproc 2 --tp-plan lost.json",
    "fails with RuntimeError": "tensor_parallel mine.py:build --nproc 2 --tp-plan half.json",
    "cannot be multiplied": "tensor_parallel mine.py:build --nproc 2 --tp-plan late.json",
    "is a LayerNorm, and colwise cuts a nn.Linear": "tensor_parallel mine.py:build --nproc 2 --tp-plan odd.json",
    "is no plan: it cannot be read": "tensor_parallel mine.py:build --nproc 2 --tp-plan none.json",
    "presets have a plan of their own": "tensor_parallel tiny --nproc 2 --tp-plan lost.json",
    "with nothing between that mixes them": "tensor_parallel mine.py:mixing --nproc 2",
    "its blocks are not called once": "pipeline mine.py:build --nproc 2",
    "ties a weight of them": "pipeline hf:deep --nproc 2 --schedule ZBVZeroBubble",
    "2 blocks are too few": "pipeline hf:llama --nproc 4",
    "only presets have attention that ranks can share": "hybrid_3d hf:llama --nproc 2 --cp-size 2",
}


@pytest.mark.parametrize("said", NO_SPLITS)
def test_what_cannot_be_cut_is_one_line_and_leaves_nothing(said, models, tmp_path, capsys):
    for name, plan in PLANS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({plan: "colwise"}))
    recipe, model, *words = NO_SPLITS[said].split()
    is_refused([recipe, "--model", model, *words, "--seq-len", "32"], said, tmp_path, capsys)


def test_products_between_which_nothing_mixes_are_cut(models):
    config = RunConfig(model="mine.py:build").gpt()
    exact = {f"own.stack.{i}.{name}": how for i in range(3) for name, how in (("mix", "colwise"), ("out", "rowwise"))}
    assert tensor_plan(config, 2, None) == exact
    cut = tensor_plan(RunConfig(model="hf:mixtral").gpt(), 2, None)
    assert "own.model.layers.1.self_attn.o_proj" in cut
    assert not any("experts" in name for name in cut)


@pytest.mark.parametrize("recipe", ["context_parallel", "handout"])
def test_recipes_that_know_weights_by_name_refuse_it(recipe, models):
    with pytest.raises(ConfigError, match="that it knows by their names"):
        unsupported.check(recipe, RunConfig(model="hf:llama"), None)
