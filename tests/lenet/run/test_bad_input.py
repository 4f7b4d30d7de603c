"""Tests of mistakes with `gptscale lenet`: one line says how to mend each, the exit status is 2, no file is created."""

import subprocess
import sys

import pytest
from worlds import overridden

from gptscale.launchers.cli import main

TRAIN = ["lenet", "train", "--device", "cpu"]
MINIGRAD, MEMORY = ["lenet", "minigrad"], ["lenet", "memory", "--device", "cpu"]
CASES = {
    "unknown word": (["lenet", "trian"], "unknown command 'trian', after lenet, did you mean 'train'?"),
    "unknown option": ([*TRAIN, "--epcohs", "1"], "unknown option '--epcohs', on the command line, did you mean '--epochs'?"),
    "unknown model": ([*TRAIN, "--model", "resnet81"], "did you mean 'resnet18'?"),
    "unknown gelu": ([*TRAIN, "--gelu", "relu6"], "'relu6'"),
    "no epochs": ([*TRAIN, "--epochs", "0"], "epochs 0 is out of range, in --epochs, use 1 to 1000000"),
    "rate": ([*TRAIN, "--lr", "nan"], "lr nan is out of range"),
    "workers": ([*TRAIN, "--num-workers", "2"], "the fast loader has no worker processes, in --num-workers"),
    "size": ([*TRAIN, "--image-size", "64"], "image_size 64 is out of range, in --image-size, use 28 or 32"),
    "small": ([*TRAIN, "--image-size", "16"], "image_size 16 is out of range, in --image-size, use 28 or 32"),
    "tf32 on a CPU": ([*TRAIN, "--precision", "tf32"], "tf32 needs a GPU of Ampere (8.0) or newer"),
    "no autocast": ([*TRAIN, "--no-amp"], "fp32 has no autocast to leave out, in --no-amp"),
    "adam in fp16": ([*TRAIN, "--precision", "fp16", "--no-amp"], "the second moments of adam underflow in fp16, in --no-amp"),
    "loss scale of bf16": ([*TRAIN, "--precision", "bf16", "--loss-scale", "dynamic"], "with bf16: bf16 has fp32's range"),
    "loss scale of fp32": ([*TRAIN, "--loss-scale", "none"], "pointless with fp32: nothing underflows, in --loss-scale"),
    "loss scale": ([*TRAIN, "--precision", "fp16", "--loss-scale", "high"], "use dynamic, none, or a number of 1 to 16777216"),
    "loss scale of 0": ([*TRAIN, "--precision", "fp16", "--loss-scale", "0"], "loss_scale '0' is neither a word nor a number"),
    "nccl on a CPU": ([*TRAIN, "--nproc", "2", "--backend", "nccl"], "nccl needs CUDA devices, in --backend, use gloo"),
    "backend of one": ([*TRAIN, "--backend", "gloo"], "one process needs no gloo, in --backend, leave it out"),
    "backend": ([*TRAIN, "--backend", "mpi"], "'mpi'"),
    "mode": (["lenet", "precision", "--modes", "fp32,bf61"], "unknown mode 'bf61', in --modes, did you mean 'bf16'?"),
    "tf32 asked for": (["lenet", "precision", "--device", "cpu", "--modes", "tf32"], "tf32 needs a GPU of Ampere"),
    "scale of a study": (["lenet", "precision", "--loss-scale", "-1"], "loss_scale '-1' is neither"),
    "batches": (["lenet", "batch", "--per-rank", "16;32"], "'16;32' is no list of numbers, in --per-rank, use for"),
    "no batch": (["lenet", "backend", "--per-rank", "0"], "'0' is no list of numbers, in --per-rank, use for example 32,128"),
    "too large a batch": (["lenet", "batch", "--device", "cpu", "--per-rank", "700"], "expected at least one batch of 1400"),
    "processes of batch": (["lenet", "batch", "--nproc", "0"], "nproc 0 is out of range, in --nproc, use 1 to 1024"),
    "processes of backend": (["lenet", "backend", "--nproc", "1"], "nproc 1 is out of range, in --nproc, use 2 to 1024"),
    "what to download": ([*TRAIN, "--download"], "digits is no data set of torchvision, in --download"),
    "data": ([*TRAIN, "--data", "nowhere"], "nowhere is no folder, in --data, give digits, mnist, cifar10 or a folder"),
    "data not there": ([*TRAIN, "--data", "cifar10"], "cifar10 is not there"),
    "batch": ([*TRAIN, "--batch-size", "5000"], "1348 training images, expected at least one batch of 5000"),
    "batch and processes": ([*TRAIN, "--nproc", "3"], "global batch 32 is not divisible by 3 ranks, in --batch-size, use 30"),
    "run name": ([*TRAIN, "--run-name", "../evil"], "bad run name '../evil'"),
    "resume of nothing": ([*TRAIN, "--resume", "nowhere"], "nowhere is no folder, in --resume"),
    "preset": (["lenet", "baseline", "--preset", "fastest"], "unknown preset 'fastest', in --preset, did you mean 'fast'?"),
    "seeds": (["lenet", "baseline", "--seeds", "1;2"], "'1;2' is no list of numbers, in --seeds"),
    "picture": (["lenet", "baseline", "--png", "no/where.png"], "is in a folder that does not exist, in --png"),
    "gelu of a baseline": (["lenet", "baseline", "--gelu", "exact"], "'exact'"),
    "unfair workers": (["lenet", "strategies", "--num-workers", "single=0,ddp=4"], "would be compared, not strategies"),
    "workers of the fast loader": (["lenet", "strategies", "--num-workers", "2"], "the fast loader has no worker processes"),
    "strategy": (["lenet", "strategies", "--strategies", "single,dpp"], "unknown strategy 'dpp', in --strategies"),
    "dataparallel": ([*TRAIN, "--strategy", "dataparallel"], "dataparallel needs two or more GPUs"),
    "single of two": ([*TRAIN, "--nproc", "2", "--strategy", "single"], "single is one process, not 2, in --strategy"),
    "numbers of workers": (["lenet", "workers", "--workers", "some"], "'some' is no list of numbers, in --workers"),
    "repeats": (["lenet", "workers", "--repeats", "0"], "repeats 0 is out of range"),
    "net": (["lenet", "fused", "--nets", "conv3"], "unknown net 'conv3', in --nets"),
    "steps of memory": ([*MEMORY, "--steps", "0"], "steps 0 is out of range, in --steps, use 1 to 1000"),
    "snapshot on a CPU": ([*MEMORY, "--snapshot", "s.pickle"], "the allocator's history is CUDA's, in --snapshot"),
    "picture of memory": ([*MEMORY, "--png", "no/where.png"], "is in a folder that does not exist, in --png"),
    "model of memory": ([*MEMORY, "--model", "resnet81"], "did you mean 'resnet18'?"),
    "batch of memory": ([*MEMORY, "--batch-size", "5000"], "expected at least one batch of 5000"),
    "memory without autocast": ([*MEMORY, "--no-amp"], "fp32 has no autocast to leave out"),
    "model of minigrad": ([*MINIGRAD, "--model", "lenet"], "--model"),
    "epochs of minigrad": ([*MINIGRAD, "--epochs", "0"], "epochs 0 is out of range, in --epochs, use 1 to 10000"),
    "batch of minigrad": ([*MINIGRAD, "--batch-size", "0"], "in --batch-size"),
    "lr is no number": ([*MINIGRAD, "--lr", "nan"], "lr nan is out of range"),
    "lr of 0": ([*MINIGRAD, "--lr", "0"], "lr 0.0 is out of range"),
    "momentum for adam": ([*MINIGRAD, "--momentum", "0.9"], "add --optimizer sgd"),
    "too much momentum": ([*MINIGRAD, *"--optimizer sgd --momentum 1".split()], "momentum 1.0 is out of range"),
    "no pooling": ([*MINIGRAD, *"--model simple_conv --pool-backward loop".split()], "simple_conv has no pooling"),
    "no pooling to time": (
        [*MINIGRAD, *"--model pure_linear --timed-steps 3".split()], "pure_linear has no pooling, in --timed-steps",
    ),
    "no convolution": ([*MINIGRAD, *"--model pure_linear --convolution im2col".split()], "pure_linear has no convolution"),
    "no such pooling": ([*MINIGRAD, "--pool-backward", "fast"], "--pool-backward"),
    "triton on a CPU": (
        [*MINIGRAD, *"--pool-backward triton --device cpu".split()],
        "triton needs tensors on a CUDA device, not on cpu, in --pool-backward",
    ),
    "no such folder": ([*MINIGRAD, "--data", "nowhere"], "nowhere is no folder, in --data"),
    "a folder without MNIST": ([*MINIGRAD, "--data", "."], "holds neither idx files nor train/CLASS/ folders"),
    "another end": ([*MINIGRAD, "--png", "curves.txt"], "curves.txt does not end as a picture does, in --png"),
    "nowhere to write": ([*MINIGRAD, "--csv", "no/rows.csv"], "is in a folder that does not exist, in --csv"),
    "a typing mistake": ([*MINIGRAD, "--poolbackward", "loop"], "did you mean '--pool-backward'"),
    "resume without a name": ([*TRAIN, "--resume"], "add --run-name NAME or give --resume PATH"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), CASES.values(), ids=CASES)
def test_a_mistake_is_one_line(words, message, refused):
    assert message in refused(words)


def test_folders_in_the_way(folder, refused):
    (folder / "file").write_text("in the way")
    assert "results folder file cannot be written" in refused([*TRAIN, "--out", "file"])
    (folder / "results" / "runs" / "mine").mkdir(parents=True)
    words = [*TRAIN, "--run-name", "mine"]
    assert "add --resume or choose another --run-name" in refused(words)
    assert "holds no checkpoint" in refused([*words, "--resume"])
    (folder / "results" / "lenet.csv").write_text("a,b\n1,2\n")
    assert "has other columns" in refused(TRAIN)


def test_a_checkpoint_of_another_run_lists_what_differs(capsys, folder, idx_folder, refused):
    words = [*TRAIN, "--data", str(idx_folder), "--save-every", "1", "--epochs", "1", "--no-tensorboard"]
    assert main([*words, "--run-name", "a"]) == 0
    capsys.readouterr()
    saved = str(next((folder / "results" / "runs" / "a" / "checkpoints").iterdir()))
    line = refused([*words, "--resume", saved, "--model", "cnn", "--seed", "7"])
    assert "model lenet there, cnn here" in line
    assert "seed 1234 there, 7 here" in line
    for place in ("auto", "results/runs/a"):
        line = refused([*words, "--run-name", "a", "--resume", place, "--seed", "7"])
        assert "the saved run differs: seed 1234 there, 7 here, in " in line
    longer = (*words, "--run-name", "a", "--resume", "--epochs", "2", "--weight-decay", "0.1")
    assert main([*overridden(longer)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {"epochs was 1, is 2", "weight_decay was 0.0, is 0.1"} == {line for line in said if " was " in line}
    assert "step 3 is saved already" in refused([*words, "--resume", saved])
    (folder / "results" / "runs" / "a" / "checkpoints" / "step-3" / "rank-00000-0000.safetensors").write_bytes(b"")
    assert "has 0 bytes" in refused([*overridden((*words, "--epochs", "2", "--resume", saved))])


@pytest.mark.promise(
    "C16 | a /dev/shm too small for data workers | lenet refuses the run before the start; a GPT run has no data workers"
)
@pytest.mark.slow
def test_a_shared_memory_too_small_for_data_workers(folder):
    """Docker's 64 MiB, made smaller. Without the check the worker dies of a bus error."""
    pytest.importorskip("torchvision")
    words = [*TRAIN, "--loader", "dataloader", "--num-workers", "2", "--epochs", "1", "--nproc", "1"]
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, who may mount a file system for one process")
    command = [*mount, sys.executable, "-m", "gptscale.launchers.cli", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "/dev/shm has 65,536 bytes free, 603,648 are needed by 2 data workers, in --num-workers" in line
    assert not list(folder.iterdir())
