"""Everything a user can get wrong: one line that says how to mend it, exit status 2, nothing created, fast."""

import dataclasses
import json
import os
import pickle
import subprocess

import numpy as np
import pytest
import torch
from holder import Holder

import gptscale.recipes
from gptscale.common.checkpoint.writer import save
from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.engines.zero import swap_folder
from gptscale.common.errors import ConfigError
from gptscale.common.settings.run import workload
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.cli import main
from gptscale.launchers.run import space
from gptscale.launchers.run.options import default_recipe_config
from gptscale.launchers.run.start import plan_run
from gptscale.ops.build import cache as build_cache
from gptscale.recipes import get

# Together they take most of a minute.
pytestmark = pytest.mark.slow
CASES = {
    "unknown command": (["swep"], "did you mean 'sweep'"),
    "no recipe": (["run"], "a recipe is missing"),
    "unknown recipe": (["run", "dpp"], "did you mean 'ddp'"),
    "unknown recipe in a sweep": (["sweep", "--recipes", "single,fsdpp"], "did you mean 'fsdp'"),
    "unknown option": (["run", "ddp", "--warmup-stps", "1"], "unknown option '--warmup-stps', on the command line, did you mean '--warmup-steps'?"),
    "unknown option in snake case": (["run", "ddp", "--weight_decai", "1"], "did you mean '--weight-decay'?"),
    "an option of another recipe": (["run", "single", "--bucket-cap-mb", "5"], "unknown option '--bucket-cap-mb'"),
    "value missing": (["run", "ddp", "--steps"], "Missing value for argument '--steps'"),
    "not a number": (["run", "ddp", "--steps", "many"], "invalid literal for int() with base 10: 'many'"),
    "unknown precision": (["run", "ddp", "--precision", "fp4"], "'fp4'"),
    "unknown model": (["run", "ddp", "--model", "gpt2-xxl"], "did you mean 'gpt2-xl'?"),
    "fp16 on a CPU": (["run", "single", "--precision", "fp16", "--device", "cpu"], "fp16 needs a GPU, in --precision, use fp32 or bf16 on CPU"),
    "NaN": (["run", "ddp", "--lr", "nan"], "lr nan is out of range, in --lr, use 0.0 to 100.0"),
    "no steps": (["run", "ddp", "--steps", "0"], "steps 0 is out of range, in --steps, use 1 to 1000000000"),
    "a profile of few": (["run", "single", "--steps", "3", "--profile"], "only a run of 20 steps with a verdict is traced, in --profile"),
    "absurd": (["run", "ddp", "--global-batch-size", "1000000000000"], "global_batch_size 1000000000000 is out of range"),
    "no processes": (["run", "ddp", "--nproc", "0"], "nproc 0 is out of range"),
    "world for one": (["run", "single", "--nproc", "2"], "single is one process, not 2, in --nproc, use --nproc 1"),
    "an axis it has not": (["run", "ddp", "--nproc", "2", "--tp-size", "2"], "ddp has no tp axis"),
    "replicas": (["run", "fsdp", "--nproc", "3", "--dp-replicate-size", "2"], "world 3 is not divisible by dp_replicate_size 2, in --dp-replicate-size, use one of [1, 3]"),
    "tensor ranks and heads": (["run", "tensor_parallel", "--nproc", "3"], "n_head 4 is not divisible by tp_size 3, in --tp-size, use one of [1, 2, 4]"),
    "tensor ranks and sequence": (["run", "tensor_parallel", "--nproc", "4", "--seq-len", "126"], "seq_len 126 is not divisible by tp_size 4, in --tp-size, use one of [1, 2]"),
    "tensor ranks and vocabulary": (["run", "tensor_parallel", "--nproc", "5", "--n-head", "5", "--n-embd", "160", "--seq-len", "125"], "the padded vocabulary 384 is not divisible by tp_size 5, in --tp-size, use one of [1]"),
    "tensor ranks and world": (["run", "hybrid_3d", "--nproc", "3", "--tp-size", "2"], "world 3 is not divisible by tp*cp*pp=2, in --nproc, use nproc 2 or 4"),
    "no data ranks": (["run", "tensor_parallel", "--nproc", "4", "--tp-size", "2"], "tensor_parallel has no dp axis for 2 times tp 2 x cp 1 x pp 1, in --nproc, use --nproc 2, or recipe hybrid_3d"),
    "ranks of a sequence": (["run", "context_parallel", "--nproc", "2", "--seq-len", "34"], "seq_len 34 is not divisible by 2 x cp_size 2, in --cp-size, use one of [1]"),
    "ranks of a sequence and heads": (["run", "context_parallel", "--nproc", "8", "--cp-style", "ulysses"], "n_head 4 is not divisible by cp_size 8, in --cp-size, use one of [1, 2, 4], or --cp-style ring"),
    "a ring and dropout": (["run", "context_parallel", "--nproc", "2", "--dropout", "0.1"], "a ring has no dropout, in --dropout, use --dropout 0, or --cp-style ulysses"),
    "a ring, compiled": (["run", "context_parallel", "--nproc", "2", "--compile"], "in --compile, leave it out, or --cp-style ulysses"),
    "a ring and its kernel": (["run", "hybrid_3d", "--nproc", "2", "--cp-size", "2", "--attention", "math"], "in --attention, use auto, or --cp-style ulysses"),
    "async TP on a CPU": (["run", "tensor_parallel", "--nproc", "2", "--async-tp", "--device", "cpu"], "async TP needs CUDA devices with NVLink, in --async-tp"),
    "stages and layers": (["run", "pipeline", "--nproc", "8"], "4 blocks are too few for 8 stages (8 processes x 1), in --pp-size, use at most 5"),
    "stages and layers, interleaved": (["run", "pipeline", "--nproc", "4", "--schedule", "Interleaved1F1B"], "4 blocks are too few for 8 stages (4 processes x 2), in --pp-size, use at most 2"),
    "schedule": (["run", "pipeline", "--nproc", "2", "--schedule", "2F2B"], "'2F2B'"),
    "micro-batches": (["run", "pipeline", "--nproc", "4", "--grad-accum-steps", "2"], "1F1B with 4 stages on 4 processes does not take 2 micro-batches, in --grad-accum-steps, use 4 or 8, or schedule GPipe"),
    "micro-batches in rounds": (["run", "pipeline", "--nproc", "2", "--schedule", "Interleaved1F1B", "--grad-accum-steps", "5", "--global-batch-size", "10"], "does not take 5 micro-batches, in --grad-accum-steps, use 2 or 10"),
    "stages of a V": (["run", "pipeline", "--nproc", "2", "--schedule", "DualPipeV", "--stages-per-rank", "3"], "DualPipeV has 2 stages per process, not 3, in --stages-per-rank, use 2"),
    "layers per stage": (["run", "pipeline", "--nproc", "2", "--layers-per-stage", "3,2"], "3,2 does not share 4 blocks among 2 stages, in --layers-per-stage, use for example 2,2"),
    "layers per stage, no numbers": (["run", "pipeline", "--nproc", "2", "--layers-per-stage", "all"], "'all' is no list of numbers, in --layers-per-stage, use balanced, or for example 2,2"),
    "a V in three dimensions": (["run", "hybrid_3d", "--nproc", "4", "--pp-size", "2", "--schedule", "ZBVZeroBubble"], "in --schedule, use 1F1B, Interleaved1F1B or InterleavedZeroBubble, or recipe pipeline"),
    "zero bubble and data ranks": (["run", "hybrid_3d", "--nproc", "4", "--pp-size", "2", "--schedule", "InterleavedZeroBubble"], "use 1F1B or Interleaved1F1B, or no data ranks"),
    "a schedule without stages": (["run", "hybrid_3d", "--nproc", "2", "--schedule", "GPipe"], "there is no pipeline in this mesh, in --schedule, leave it out, or use --pp-size 2"),
    "resume a sweep": (["sweep", "--recipes", "single", "--resume", "x"], "a sweep begins its runs anew, in --resume"),
    "techniques and recipes": (["sweep", "--techniques", "--recipes", "ddp"], "recipes of their own"),
    "techniques of another step": (["sweep", "--techniques", "--compile"], "the plain step"),
    "techniques on a cluster": (["sweep", "--techniques", "--submit"], "techniques are of one device"),
    "more than the memory": (["run", "single", "--n-embd", "1000000", "--device", "cpu"], "each rank needs 715,2"),
    "a batch of more": (["run", "ddp", "--global-batch-size", "10000000", "--device", "cpu"], "of 10,000,000 and 10,000,000"),
    "more than all memories": (["sweep", "--recipes", "ddp,fsdp", "--n-embd", "1000000", "--device", "cpu"], "in the model's size, use a smaller --model"),
    "heads": (["run", "single", "--n-head", "5"], "n_embd 128 is not divisible by n_head 5, in the model, use n_head 4"),
    "batch": (["run", "ddp", "--nproc", "2", "--global-batch-size", "7"], "use 6 or 8"),
    "batch and micro-batch": (["run", "ddp", "--nproc", "2", "--global-batch-size", "10", "--micro-batch-size", "4"], "use 8 or 16"),
    "batch, all three": (["run", "single", "--global-batch-size", "10", "--micro-batch-size", "4", "--grad-accum-steps", "2"], "use 8"),
    "tokenizer": (["run", "single", "--vocab-size", "100"], "257"),
    "data missing": (["run", "single", "--data", "nowhere.bin"], "nowhere.bin does not exist"),
    "data is a folder": (["run", "single", "--data", "."], ". is a folder"),
    "run name with a path": (["run", "single", "--run-name", "../evil"], "bad run name '../evil'"),
    "resume of nothing": (["run", "single", "--resume", "nowhere"], "nowhere is no folder"),
    "resume without a name": (["run", "single", "--resume"], "add --run-name NAME or give --resume PATH"),
    "fixed by the recipe": (["run", "fsdp_offload", "--no-cpu-offload"], "fsdp_offload fixes cpu_offload True"),
    "samples without weights": (["run", "single", "--steps", "2", "--data", "synthetic", "--sample", "1"], "the weights are those of the last checkpoint"),
    "samples without text": (["run", "single", "--steps", "2", "--data", "synthetic", "--sample", "1", "--save-last"], "synthetic is tokens without text"),
    "stage": (["run", "zero_offload", "--stage", "4"], "stage 4 is out of range, in --stage, use 1, 2 or 3"),
    "stage of a preset": (["run", "zero2", "--stage", "3"], "zero2 fixes stage 2, in --stage, leave it out, or use another recipe"),
    "nvme path missing": (["run", "zero_infinity", "--nvme-path", "nowhere"], "nowhere is no folder, in --nvme-path"),
    "nvme path for another": (["run", "zero3", "--nvme-path", "."], "nvme_path is for a recipe that offloads to nvme only"),
    "DeepSpeed's JSON missing": (["run", "zero2", "--ds-config", "nowhere.json"], "No such file or directory, in --ds-config"),
    "a pair that does not work": (["run", "zero3", "--compile"], "zero3 does not work with compile True: at stage 3 DeepSpeed"),
    "a GPU's row": (["run", "fairscale_fsdp", "--device", "cpu"], "fairscale_fsdp needs a CUDA device"),
    "prepare what": (["prepare", "--recipes", "zero9"], "did you mean 'zero3'?"),
    "doctor's disk": (["doctor", "--nvme-path", "nowhere"], "nowhere is no folder"),
    "doctor's model": (["doctor", "--nvme-path", ".", "--model", "1.6c"], "did you mean '1.6b'?"),
    "bf16 parity of what": (["parity", "--precision", "fp64"], "'fp64'"),
    "compare nothing": (["compare"], "no PATH is given"),
    "compare what cannot be read": (["compare", "/proc/self/mem"], "cannot be read (Input/output error), in compare"),
    "parity without blocks": (["parity", "--recipes", "ddp", "--n-layer", "0"], "n_layer 0 is out of range, in --n-layer"),
    "parity of the reference": (["parity", "--recipes", "single"], "the others are compared with single, in --recipes"),
    "compare an empty folder": (["compare", "."], "holds no summary.csv"),
    "parity of a GPU's row": (["parity", "--recipes", "ddp,fairscale_fsdp"], "fairscale_fsdp needs a CUDA device"),
    "parity of what": (["parity", "--optimizers", "lion"], "unknown optimizer 'lion'"),
}  # fmt: skip


def test_parity_is_refused_before_its_first_run(folder, refused):
    """The SGD run's folder is there already. AdamW's, which come first, do not begin."""
    (folder / "runs" / "ddp-2-sgd").mkdir(parents=True)
    assert "ddp-2-sgd" in refused(["parity", "--recipes", "ddp", "--out", "."])


@pytest.mark.promise("C1 | processes that tp and pp do not divide | refused with the counts that work")
@pytest.mark.promise("C2 | heads and tp | refused with the sizes that work")
@pytest.mark.promise("C3 | layers and stages | refused with the sizes that work")
@pytest.mark.promise("C4 | batch arithmetic | refused with the nearest that works")
@pytest.mark.promise(
    "C5 | vocabulary and tp | the table is padded to a multiple of 128; what then does not divide is refused"
)
@pytest.mark.promise("C6 | fp16 on a CPU | refused: use fp32 or bf16")
@pytest.mark.promise("C10 | an unknown option | the nearest is named; nothing is ignored")
@pytest.mark.promise("C12 | values out of range | field, value and range")
@pytest.mark.promise("X5 | run names with paths, newlines, 300 letters | refused, nothing is created")
@pytest.mark.parametrize("case", CASES)
def test_refused(case, refused):
    words, message = CASES[case]
    assert message in refused(words)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "is empty"),
        ([1] * 100, "expected at least 258"),
        ([1] * 700 + [300], "token id 300 is outside the vocabulary of 257, in tokens.bin at token 700"),
    ],
)
def test_data_files(ids, said, folder, refused):
    np.array(ids, dtype="<u2").tofile(folder / "tokens.bin")
    assert said in refused(["run", "single", "--data", "tokens.bin"])


@pytest.mark.promise("C8 | an engine that is missing | the line that installs it")
@pytest.mark.promise("C9 | an engine that is broken or of another version | one line with both versions")
def test_an_engine_that_is_missing_or_broken(lacking_engines, refused):
    assert "pip install 'gptscale[deepspeed-of-nowhere]'" in refused(["run", "absent"])
    assert (
        "broken-engine is installed but does not import (ModuleNotFoundError: No module named 'a_file_that_was_lost'), "
        "in this environment, pip install --force-reinstall 'gptscale[broken-engine]'" in refused(["run", "broken"])
    )


TOO_MANY = "2 processes need as many GPUs, 1 visible, in --nproc, use --nproc 1, or --device cpu"
TOO_OLD = "bf16 needs Ampere (8.0) or newer, not compute capability 7.5, in --precision, use fp16"
ON_A_TURING = {
    "run single --precision bf16": TOO_OLD,
    "lenet train --precision bf16": TOO_OLD,
    "lenet train --precision tf32": "tf32 needs a GPU of Ampere (8.0) or newer",
    **dict.fromkeys(("run ddp --nproc 2", "lenet train --nproc 2", "lenet backend"), TOO_MANY),
}


@pytest.mark.promise("C7 | bf16 before Ampere | refused")
@pytest.mark.parametrize("words", ON_A_TURING)
def test_what_one_older_gpu_cannot_do(words, monkeypatch, refused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert ON_A_TURING[words] in refused(words.split())


def test_results_folder_is_a_file(folder, refused):
    (folder / "results").write_text("in the way")
    assert "results folder results cannot be written" in refused(["run", "single"])


@pytest.mark.promise("X6")
def test_run_name_that_exists(folder, refused):
    words, run = ["run", "single", "--run-name", "mine"], folder / "results" / "runs" / "mine"
    run.mkdir(parents=True)
    assert "add --resume or choose another --run-name" in refused(words)
    assert "holds no checkpoint, in --resume, run with --save-every" in refused([*words, "--resume"])
    (run / "checkpoints").symlink_to(folder)
    assert "checkpoints is a symbolic link, in --run-name" in refused([*words, "--resume", "auto"])


class Canary:
    """A pickle that creates a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def sums(folder):
    """Record the hashes as the error says, which sets up the test of what happens then."""
    subprocess.run(["bash", "-c", "(cd own/step && sha256sum * > SHA256SUMS && chmod 600 SHA256SUMS)"], check=True)


PICKLES = {
    "no list": (lambda own: None, "own/step has no SHA256SUMS, in --trust-checkpoint, once you are sure of its files, run (cd own/step && sha256sum * > SHA256SUMS && chmod 600 SHA256SUMS)"),
    "changed": (lambda own: (sums(own), (own / "step" / "b_model_states.pt").write_bytes(b"x")), "'b_model_states.pt' does not match SHA256SUMS"),
    "added": (lambda own: (sums(own), (own / "step" / "c_model_states.pt").write_bytes(b"x")), "'c_model_states.pt' is not in SHA256SUMS"),
    "missing": (lambda own: (sums(own), (own / "step" / "b_model_states.pt").unlink()), "'b_model_states.pt' is missing"),
    "a link": (lambda own: (sums(own), (own / "step" / "SHA256SUMS").rename(own / "list"), (own / "step" / "SHA256SUMS").symlink_to(own / "list")), "own/step has no SHA256SUMS"),
    "list of others": (lambda own: (sums(own), (own / "step" / "SHA256SUMS").chmod(0o666)), "others can write own/step/SHA256SUMS"),
    "a path": (lambda own: (own / "latest").write_text("../own/step"), "latest names '../own/step'"),
}  # fmt: skip


@pytest.mark.promise("X1 | a malicious pickle | never read unless you listed its hash")
@pytest.mark.promise("X3 | a malicious folder of DeepSpeed's | refused without `--trust-checkpoint` and your hashes")
@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_the_user_has_not_listed_are_never_read(case, folder, refused):
    harm, message = PICKLES[case]
    own = folder / "own"
    (own / "step").mkdir(parents=True)
    (own / "latest").write_text("step")
    for name in ("a_model_states.pt", "b_model_states.pt"):
        (own / "step" / name).write_bytes(pickle.dumps(Canary(folder / "canary")))
    harm(own)
    for trust in (["--trust-checkpoint"], []):
        line = refused(["run", "zero2", "--resume", "own", *trust])
        assert (message if trust else "add --trust-checkpoint") in line
    assert not (folder / "canary").exists()


@pytest.mark.promise("X2 | a malicious `.metadata` of torch | never read")
@pytest.mark.parametrize("name", ["model.pt", ".metadata", "mp_rank_00_model_states.pt", "rank-00000-0000.safetensors"])
def test_pickles_of_other_programs_are_never_read(name, folder, refused):
    (folder / "step-4").mkdir()
    (folder / "step-4" / name).write_bytes(pickle.dumps(Canary(folder / "canary")))
    refused(["run", "ddp", "--resume", "step-4"])
    (folder / "step-4").rename(folder / "saved")
    refused(["run", "ddp", "--resume", "saved", "--trust-checkpoint"])
    assert not (folder / "canary").exists()


def test_an_explicit_checkpoint_that_is_damaged_never_falls_back(folder, refused):
    save(Holder(), folder, 2, {"workload": {}})
    path = save(Holder(), folder, 4, {"workload": {}})
    file = path / "rank-00000-0000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert "bytes, expected" in refused(["run", "single", "--resume", str(path)])
    (path / "manifest.json").unlink()
    assert f"manifest.json is missing, in checkpoint {path}" in refused(["run", "single", "--resume", str(path)])


@pytest.mark.promise("S20 | data that changed between save and resume | refused without `--allow-data-change`")
def test_a_checkpoint_of_other_data_is_refused_unless_allowed(folder, refused):
    words = ["run", "single", "--data", "synthetic", "--device", "cpu"]
    plan = plan_run("single", RunConfig(data="synthetic", device="cpu"), default_recipe_config("single"), 1)
    path = save(Holder(), folder, 4, {"workload": workload(plan.run, "of other data")})
    line = refused([*words, "--resume", str(path)])
    assert "the data differs from the saved run's (synthetic)" in line
    assert line.endswith("add --allow-data-change to accept")
    assert main([*words, "--resume", str(path), "--allow-data-change", "--dry-run"]) == 0


MINE = "results/runs/mine"


@pytest.mark.promise("C14 | another model on resume | refused with all fields that differ")
@pytest.mark.parametrize("resume", ["auto", "newest", MINE, f"{MINE}/checkpoints", f"{MINE}/checkpoints/step-4"])
def test_another_model_is_refused_before_the_start_whatever_the_run_name(resume, folder, refused):
    """The newest checkpoint with a sound manifest is compared. Nothing is verified or set aside yet."""
    checkpoints = folder / MINE / "checkpoints"
    save(Holder(), checkpoints, 4, {"workload": {"n_layer": 3, "seed": 7, "n_head": 4}})
    (save(Holder(), checkpoints, 6, {"workload": {}}) / "manifest.json").write_text("{}")
    line = refused(["run", "single", "--run-name", "mine", "--resume", resume])
    assert "n_layer 3 there, 4 here" in line
    assert "seed 7 there, 1234 here" in line
    assert "n_head" not in line
    assert "step-4" in line


def test_what_fits_when_it_is_split_is_not_refused(plan, monkeypatch):
    """Two ranks of one machine share its memory. Two machines have twice of it."""
    run = plan("--model", "tiny").run
    assert run.state_bytes == 16 * run.gpt.n_params
    memory = space.psutil.virtual_memory()
    monkeypatch.setattr(space.psutil, "swap_memory", lambda: memory._replace(total=0))
    monkeypatch.setattr(space.psutil, "virtual_memory", lambda: memory._replace(total=run.state_bytes))
    space.check_memory(run, "none")
    space.check_memory(dataclasses.replace(run, world=dataclasses.replace(run.world, world_size=2)), "none")
    monkeypatch.setattr(space.psutil, "virtual_memory", lambda: memory._replace(total=run.state_bytes - 1))
    space.check_memory(run, "nvme")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    space.check_memory(dataclasses.replace(run, world=dataclasses.replace(run.world, world_size=2)), "none")
    with pytest.raises(ConfigError, match="each rank needs"):
        space.check_memory(run, "none")


def test_dry_run_creates_nothing(capsys, folder):
    assert main([*"run fsdp --nproc 8 --model 1.6b --data synthetic --dry-run --out".split(), "my runs"]) == 0
    said = capsys.readouterr().out
    assert "1,557,611,200 parameters" in said
    assert "9.8017 GFLOP per token" in said
    assert "torchrun --standalone --nproc-per-node 8 -m gptscale.recipes fsdp --model 1.6b" in said
    assert said.endswith(" --data synthetic --out 'my runs'\n")
    assert not list(folder.iterdir())


@pytest.mark.promise("C9")
@pytest.mark.parametrize(
    ("recipe", "version", "works"),
    [
        *(("zero2", version, "==0.19.8") for version in ("0.9.5", "0.19.9", "0.19.80")),
        ("accelerate_fsdp", "0.0.1", ">=1.10,<"),
        *(("lightning_fabric", "2.4.9", ">=2.5,<"), ("ddp", "2.4.1", ">=2.5.1,<")),
    ],
)
def test_an_engine_at_a_version_that_is_not_known_to_work(recipe, version, works, monkeypatch, refused):
    engine = get(recipe).engine
    installed = gptscale.recipes.installed
    monkeypatch.setattr(gptscale.recipes, "installed", lambda name: version if name == engine else installed(name))
    said = refused(["run", recipe])
    assert f"{engine} {version} is installed, this recipe is known to work with {works}" in said
    assert f"pip install '{engine}{works}" in said


def test_an_operator_that_is_not_compiled_and_a_compiler_that_is_missing(monkeypatch, refused):
    monkeypatch.setattr(deepspeed_ops, "library", lambda op: build_cache.root() / "nowhere" / "nowhere.so")
    said = "DeepSpeed's cpu_adam not compiled yet, on this machine, run gptscale prepare"
    assert said in refused(["run", "zero_offload"])
    with monkeypatch.context() as patch:
        patch.setattr(build_cache.shutil, "which", lambda name, **options: None)
        said = "no C++ compiler, on this machine, apt-get install g++, then gptscale prepare"
        assert said in refused(["run", "zero_offload"])
        assert refused(["prepare", "--recipes", "zero_offload"]).endswith("apt-get install g++")
    monkeypatch.setattr(deepspeed_ops, "_has_libaio", lambda: False)
    assert "apt-get install libaio-dev" in refused(["run", "zero_infinity"])


def test_a_disk_that_is_too_small_or_cannot_be_written(folder, monkeypatch, refused):
    usage = swap_folder.shutil.disk_usage(folder)
    monkeypatch.setattr(swap_folder.shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    said = refused(["run", "zero_infinity", "--nvme-path", "."])
    # The run needs 20 bytes for each of 858,880 parameters.
    assert ". has 1,000,000 bytes free, 17,177,600 are needed, in --nvme-path" in said
    (folder / "disk").mkdir()
    monkeypatch.setattr(swap_folder.os, "access", lambda path, mode: path.name != "disk")
    assert "disk cannot be written" in refused(["run", "zero_infinity", "--nvme-path", "disk"])


def test_deepspeeds_json_may_not_contradict_the_run(folder, refused):
    theirs = {"zero_optimization": {"stage": 3}, "train_batch_size": 64, "gradient_clipping": 0.5}
    theirs["bf16"] = {"enabled": True}
    said = (
        "zero_optimization.stage is 3 there, 2 in this run; train_batch_size is 64 there, 8 in this run; "
        "gradient_clipping is 0.5 there, 1.0 in this run; bf16.enabled is True there, False in this run"
    )
    optimizer = {"optimizer": {"type": "Lamb"}}, "optimizer cannot be set there"
    for content, expected in ((theirs, said), optimizer, ([], "holds a list, not an object")):
        (folder / "ds.json").write_text(json.dumps(content))
        assert expected in refused(["run", "zero2", "--ds-config", "ds.json"])
