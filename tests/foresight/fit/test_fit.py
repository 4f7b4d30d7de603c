"""`gptscale fit`: programs that are written for a user's model, each run as a user runs it."""

import ast
import contextlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import is_emulated
from gptscale.common.measure.gpus import GIB
from gptscale.common.process.program import Program
from gptscale.common.process.task import run_captured
from gptscale.foresight.fit.answer import nearest
from gptscale.foresight.fit.configs import of_transformers
from gptscale.foresight.fit.splits import splits
from gptscale.foresight.fit.subject import subject_of
from gptscale.foresight.fit.trials import FitRow, Trials
from gptscale.foresight.fit.twin import on_meta, two_blocks
from gptscale.foresight.fit.write import Choice, program
from gptscale.foresight.plan.question import gpu_cluster
from gptscale.foresight.price.step_time import SPREAD
from gptscale.launchers.cli import main

OWN = Path(__file__).with_name("own_model.py")
SPLITS = splits(8, 8) | {"hsdp": splits(16, 8)["hsdp"]} | splits(1, 1)
NAMES = [name for name in SPLITS if name != "single"]
# Lines of a program beside the model: four are the plan of this one.
MOST_LINES = {"pipeline 2 x tensor": 240, "pipeline": 231, "": 150}
# All that these programs import, for the warm parent of their ranks.
LIBRARIES = ("accelerate", "deepspeed", "torch.distributed.fsdp", "torch.distributed.pipelining", "transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    shutil.copy(OWN, folder)
    (folder / "without" / "gptscale").mkdir(parents=True)
    (folder / "without" / "gptscale" / "__init__.py").write_text("raise ImportError('a program needs no gptscale')")
    return folder


def looked(folder, model, batch="", loss=""):
    """Return what fit sees of functions of own_model.py."""
    return subject_of(*(name and f"{folder}/own_model.py:{name}" for name in (model, batch, loss)), None, folder)


@pytest.fixture(scope="module")
def subject(folder):
    return looked(folder, "build")


def written(folder, subject, name, recompute=False):
    file = folder / f"train_{name.replace(' ', '_')}.py"
    choice = Choice(1 if name == "single" else 8, 1, 16, 2, "fp32", recompute)
    file.write_text(program(subject, SPLITS[name], choice, file.name))
    return file


def run(file, ranks, *words):
    """Run a program of one rank as a user does, or ranks forked from a process that has imported their libraries."""
    words, environ = [str(file), "--steps", "4", "--warmup", "2", *words], os.environ | {"OMP_NUM_THREADS": "1"}
    if ranks == 1:
        # There importing gptscale raises.
        environ |= {"PYTHONPATH": str(file.parent / "without")}
        command, options = [sys.executable, *words], {"capture_output": True, "text": True, "cwd": file.parent}
        done = subprocess.run(command, timeout=300, env=environ, **options)
    else:
        program = Program("gptscale.foresight.fit.ranks", (str(ranks), *words), imports=LIBRARIES)
        with contextlib.chdir(file.parent):
            done = run_captured(program, timeout=300, environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(printed):
    return [line.split(",")[:3] for line in printed.splitlines() if line[:1].isdigit()]


@pytest.fixture(scope="module")
def exact(folder):
    return looked(folder, "exact")


@pytest.fixture(scope="module")
def alone(folder, subject, exact):
    return [losses(run(written(folder, each, "single"), 1)) for each in (subject, exact)]


def test_tensor_ranks_cut_what_the_plan_of_the_model_names(subject):
    assert subject.plan == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def test_stages_cut_nothing_but_a_chain_of_blocks(folder):
    skipping = looked(folder, "Skipping")
    assert (skipping.chain, skipping.no_chain) == ({}, "what its blocks pass on is changed between them")


def test_a_batch_by_its_number_a_loss_and_tied_weights(folder):
    found = looked(folder, "exact", "logits_batch", "loss")
    assert losses(run(written(folder, found, "single"), 1)) != []


def test_a_loss_in_a_tuple_and_targets_that_are_the_loss_s_alone(folder):
    both, pair = looked(folder, "Both", "pair_batch"), looked(folder, "Logits", "pair_batch", "pair_loss")
    one, other = (losses(run(written(folder, each, "single"), 1)) for each in (both, pair))
    assert one == other != []


def test_stacks_a_scalar_a_recurrent_layer_and_what_is_for_the_loss_alone(folder):
    found = looked(folder, "Mixed", "mixed_batch", "mixed_loss")
    assert (found.block, found.beside, found.is_recurrent) == ("Block", ["Routed"], True)
    assert found.has_scalars
    assert found.has_decisions
    assert (found.kind, found.call_words) == ("nested", 'ids=inputs["ids"], power=inputs["power"]')
    assert [name.split(".")[0] for name in (found.idle[0], found.idle[-1])] == ["second", "heads"]
    assert (found.least, found.is_mean, found.renewed) == (2, False, "")
    renewing = looked(folder, "renewing", "logits_batch", "loss")
    assert (renewing.least, renewing.is_mean, renewing.renewed[:35]) == (1, True, "renews head.parametrizations.weight")


@pytest.mark.parametrize("recompute", [False, True])
def test_programs_are_clean(tmp_path, subject, recompute):
    for name in (*NAMES, "single"):
        written(tmp_path, subject, name, recompute)
    for words in (["check", "--select", "E,F,B,UP"], ["format", "--diff"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--line-length", "130", tmp_path]
        assert subprocess.run(command, timeout=300).returncode == 0


@pytest.mark.parametrize("name", [*NAMES, "single"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_program_is_the_recipe(folder, subject, name, recompute):
    file = written(folder, subject, name, recompute)
    imported = {getattr(node, "module", "") or "" for node in ast.walk(ast.parse(file.read_text()))}
    assert not any(module.startswith("gptscale") for module in imported)
    if name != "single":
        shard = inspect.getsource(import_module(f"gptscale.recipes.{SPLITS[name].recipe}").shard)
        # A program has the imports at its top.
        lines = [line for line in shard.splitlines() if line and line.split()[0] not in ("from", "import")]
        assert "\n".join(lines) in file.read_text().replace("\n\n", "\n")
    most = next(most for start, most in MOST_LINES.items() if name.startswith(start))
    assert recompute or file.read_text().count("\n") - len(subject.definitions.splitlines()) <= most


@pytest.mark.world
@pytest.mark.parametrize("name", [*NAMES])
def test_a_program_computes_as_one_process_does_and_resumes_to_the_bit(folder, subject, exact, alone, name):
    ranks, is_staged = SPLITS[name].least, SPLITS[name].stages > 1
    subject = exact if is_staged else subject
    # One of them computes its blocks again, which changes no bit.
    file = written(folder, subject, name, recompute=name == "ddp")
    saved = folder / f"saved-{name}"
    together = losses(run(file, ranks, "--save", str(saved), "--save-every", "2"))
    for one, many in zip(alone[is_staged], together, strict=True):
        assert one[0] == many[0]
        assert [*map(float, many[1:])] == pytest.approx([*map(float, one[1:])], rel=1e-5)
    shutil.rmtree(saved / "4")
    assert losses(run(file, ranks, "--save", str(saved), "--save-every", "2")) == together[2:]
    # Started by torchrun, which one rank alone calls, or already as ranks.
    printed = run(file, 1 if name in ("ddp", "zero1") else ranks, "--check")
    assert printed.count(": right, gradients deviate by at most ") == ranks


@pytest.mark.world
@pytest.mark.parametrize(("name", "worlds"), [("fsdp", (2, 4)), ("pipeline 2 x fsdp", (4, 2))])
def test_a_checkpoint_moves_to_another_world(folder, exact, name, worlds):
    file, saved = written(folder, exact, name), str(folder / f"moves-{name}")
    together = losses(run(file, worlds[0], "--save", saved, "--save-every", "2"))
    shutil.rmtree(f"{saved}/4")
    moved = [float(loss) for _, loss, _ in losses(run(file, worlds[1], "--save", saved))]
    assert moved == pytest.approx([float(loss) for _, loss, _ in together[2:]], rel=1e-5)


@pytest.mark.world
@pytest.mark.parametrize(
    ("split", "gpus", "names"),
    [
        ("single", 1, ["build"]),
        ("fsdp", 2, ["Mixed", "--batch", "mixed_batch", "--loss", "mixed_loss"]),
        # Its loss is of bf16, as its weights are.
        ("pipeline 2 x fsdp", 4, ["exact"]),
    ],
)
def test_the_command_writes_what_it_recommends(folder, monkeypatch, capsys, split, gpus, names):
    monkeypatch.chdir(folder)
    model, *others = (f"{'own_model.py:' * (name[:2] != '--')}{name}" for name in names)
    file = f"best_{split.replace(' ', '_')}_{names[0]}.py"
    words = ["fit", model, *others, "--gpus", str(gpus), "--splits", split, "--write", file]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"1  {split}" in printed
    # oneDNN has no LSTM in bf16 for a processor that only emulates it.
    fp32 = ["--precision", "fp32"] * (names[0] == "Mixed" and is_emulated("bf16"))
    assert len(losses(run(folder / file, gpus, "--global-batch-size", "8", "--micro-batch-size", "2", *fp32))) == 4
    assert main(words) == 2
    assert f"{file} is there already" in capsys.readouterr().err


@pytest.mark.world
def test_in_fp64_rounding_is_right_and_a_planted_bug_is_not(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(folder))
    trials = Trials(looked(folder, "Towers", "towers_batch"), gpu_cluster("h100-80", 1, 2, None), folder, print)
    trials.reference = Future()
    trials.reference.set_result(trials.record(SPLITS["single"], 1, "reference"))
    choice, own = Choice(2, 1, 8, 2, "fp32", False), SPLITS["ddp"].own
    wrong = replace(SPLITS["ddp"], own=own | {"backward": "(1.001 * loss / count).backward()"})
    right, planted = (trials.proved(FitRow("ddp", split, choice, 0), 2) for split in (SPLITS["ddp"], wrong))
    assert (right.proved, right.in_double, right.why, right.worst < 1e-9) == ((2,), True, "", True)
    assert (planted.proved, planted.why[:17]) == ((), "WRONG on 2 ranks:")
    # Ranks that hang are ended. They were forked from a process that goes on until the trials end.
    monkeypatch.setattr("gptscale.foresight.fit.trials.PROOF_S", 9)
    hanging = replace(SPLITS["ddp"], own=own | {"backward": "time.sleep(99)"})
    hung = trials.proved(FitRow("ddp", hanging, choice, 0), 2)
    assert hung.why == "not proved on 2 ranks: it made 0 of 3 steps in 9 s"
    assert "ranks" not in {process.name() for process in psutil.Process().children(recursive=True)}
    trials.close()


def test_what_comes_nearest_says_what_it_lacks():
    memory = SimpleNamespace(is_too_large=True, needed=81 * GIB, capacity=80 * GIB, out_of_memory="")
    memory.at_peak = {"parameter": 2**31}.copy
    row = SimpleNamespace(name="ddp", found=SimpleNamespace(memory=memory))
    assert "fits: ddp comes nearest and lacks 1.0 GiB, filled by parameter 2.0 GiB;" in nearest([row])
    # It had more to come.
    memory.out_of_memory = "CUDA out of memory."
    assert "ddp comes nearest and lacks more than 1.0 GiB" in nearest([row])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero2 offload", "tensor 2 x fsdp"])
def test_simulate_of_a_program_says_the_peak_of_the_table(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    broad = subject_of("own_model.py:broad", "", "", None, folder)
    trials = Trials(broad, gpu_cluster("h100-80", 1, 8, None), folder, print)
    # The table simulates two micro-batches of the four.
    choice = Choice(8, 1, 64, 2, "bf16", False)
    found = trials.simulated(FitRow(name, SPLITS[name], choice, 0)).found
    assert found.grade == "data sheet"
    # Its blocks are narrow: this host takes longer to ask for them than the device to compute.
    assert found.bound_by.startswith("the host (")
    assert SPREAD * found.low < found.seconds
    said = found.memory
    (folder / "whole.py").write_text(program(broad, SPLITS[name], choice, "whole.py"))
    command = [sys.executable, "whole.py", "--steps", "3"]
    assert main(["simulate", "--world", "8", "--json", "whole.json", "--", *command]) == 0
    figures = json.loads((folder / "whole.json").read_text())["ranks"][0]
    assert figures["peak_allocated_bytes"] == pytest.approx(said.allocated, rel=0.01)
    assert figures["needed_bytes"] == pytest.approx(said.needed, rel=0.01)


IDS, CLASSES = "torch.randint(0, 99, (size, 16))", "torch.randint(0, 7, (size,))"
LONG = {"rope_type": "longrope", "short_factor": 48 * [1.0], "long_factor": 48 * [1.0], "rope_theta": 1e4}
WHISPER, PIXELS = {"max_source_positions": 50, "max_target_positions": 8}, "torch.randn(size, 3, 224, 224)"


@pytest.mark.parametrize(
    ("name", "sizes", "inputs", "labels"),
    [
        ("Qwen3ForCausalLM", {"hidden_size": 64}, IDS, "inputs"),
        ("T5ForConditionalGeneration", {"d_model": 64, "decoder_start_token_id": 0}, IDS, "inputs"),
        ("BertForSequenceClassification", {"num_labels": 7}, IDS, CLASSES),
        ("ViTForImageClassification", {"num_labels": 7, "image_size": 64}, "torch.randn(size, 3, 64, 64)", CLASSES),
        ("SwinForImageClassification", {"num_labels": 7, "depths": [3, 3]}, PIXELS, CLASSES),
        # Rounding grows with each batch norm of a stage.
        ("ResNetForImageClassification", {"num_labels": 7, "depths": [3, 3], "hidden_sizes": [8, 16]}, PIXELS, CLASSES),
        ("PvtV2ForImageClassification", {"num_labels": 7}, PIXELS, CLASSES),
        # One limit in its config.json is infinite.
        ("Mamba2ForCausalLM", {}, IDS, "inputs"),
        # A factor for each element of a head, kinds of attention by layer, and parts with a config of their own.
        ("Phi3ForCausalLM", {"rope_parameters": LONG}, IDS, "inputs"),
        ("GPTNeoForCausalLM", {}, IDS, "inputs"),
        ("Gemma3ForConditionalGeneration", {}, IDS, "inputs"),
        ("WhisperForConditionalGeneration", WHISPER, "torch.randn(size, 80, 100)", "torch.randint(0, 99, (size, 8))"),
    ],
)
def test_a_config_of_transformers_is_text(tmp_path, name, sizes, inputs, labels):
    model = getattr(transformers, name)
    model.config_class(architectures=[name], vocab_size=99, **sizes).save_pretrained(tmp_path)
    text, narrow = of_transformers(str(tmp_path), 16)
    assert f"    inputs = {inputs}\n" in text
    assert ('"num_labels": 7' in text, "LABEL_" in text) == ("num_labels" in sizes, False)
    assert f'    return {{"{model.main_input_name}": inputs, "labels": {labels}}}' in text
    built = {}
    exec(f"import torch\n{narrow}", built)
    outputs = built["build"]()(**built["batch"](2))
    assert outputs.loss.isfinite()
    assert ("depths" in sizes) == ('"depths": [2, 1]' in narrow)


@pytest.mark.parametrize("name", ["CLIPModel", "BertModel", "Wav2Vec2ForCTC"])
def test_a_model_whose_inputs_are_unknown_is_refused(tmp_path, name):
    getattr(transformers, name).config_class(architectures=[name]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"the inputs of {name} are unknown; build it in a file of yours"):
        of_transformers(str(tmp_path), None)


def test_each_weight_of_a_twin_has_a_value():
    def build():
        normed = [norm(torch.nn.Linear(99, 99)) for norm in (weight_norm, spectral_norm)]
        return torch.nn.ModuleList([*[torch.nn.Transformer(32, 2, 3, 3, 32) for _ in range(3)], *normed])

    with on_meta():
        assert all(p.is_meta for p in build().parameters())
    twin = two_blocks(build, ["TransformerEncoderLayer"])
    assert len(twin[0].encoder.layers) == 2
    assert all(0 < value.abs().max() < 9 for value in twin.state_dict().values())


def test_a_model_that_cannot_be_narrow_is_proved_with_two_blocks_of_a_list(tmp_path, monkeypatch):
    # A rotary part that keeps its width is wider than a narrow head.
    monkeypatch.setattr("gptscale.foresight.fit.configs.OF_A_HEAD", ("head_dim",))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "qk_rope_head_dim": 16}
    sizes |= {"kv_lora_rank": 8, "q_lora_rank": 8, "moe_intermediate_size": 8, "vocab_size": 99}
    transformers.DeepseekV3Config(**sizes).save_pretrained(tmp_path)
    found = subject_of(f"hf:{tmp_path}", "", "", 16, tmp_path)
    assert found.small_words.startswith("two DeepseekV3DecoderLayer of each list, ")
    assert losses(run(written(tmp_path, found, "single"), 1)) != []


@pytest.mark.parametrize(
    ("file", "model", "name"),
    [
        ("gpt2_1_6b_fsdp.py", "1.6b", "fsdp"),
        ("gpt2_1_6b_zero3.py", "1.6b", "zero3"),
        ("llama3_1b_tensor_fsdp.py", "llama3-1b", "tensor 2 x fsdp"),
    ],
)
def test_the_examples_are_as_fit_writes_them_today(tmp_path, file, model, name):
    text = (Path(__file__).parents[3] / "examples" / "fit" / file).read_text()
    its = ast.literal_eval(re.search(r"defaults = (.*)", text)[1])
    choice = Choice(8, 1, its["global_batch_size"], its["micro_batch_size"], "bf16", "partial(checkpoint" in text)
    assert program(subject_of(model, "", "", None, tmp_path), SPLITS[name], choice, file) == text
