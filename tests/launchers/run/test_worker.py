"""The worker in process: one rank, no launcher."""

import contextlib
import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch
from table_rows import rows

from gptscale.common.errors import DataError
from gptscale.common.process import begin as process
from gptscale.common.process.ending import as_known
from gptscale.launchers.cli import main
from gptscale.launchers.run import worker as entry
from gptscale.recipes import single

SMALL = "--data synthetic --n-layer 1 --seq-len 32".split()


@pytest.fixture(autouse=True)
def faulthandler_as_it_was(monkeypatch):
    """pytest's own writes to a copy of stderr that is made before any test."""
    monkeypatch.setattr(process, "signals_on_their_own_stack", lambda: None)


def row(tmp_path):
    (only,) = rows(tmp_path / "summary.csv")
    return only


@pytest.mark.promise(
    "S21 | a terminal or log that takes no line (`> /dev/full`, `head -1`, `>&-`) | the run goes on; its end and "
    "`status.json` have the bytes that were lost"
)
@pytest.mark.slow
@pytest.mark.parametrize("terminal", ["> /dev/full", "2>&1 | head -c 1", "<&- >&- 2>&-"])
def test_printing_is_never_worth_a_run(terminal, tmp_path):
    words = f"run single --run-name r --steps 2 {' '.join(SMALL)} --device cpu --timing-warmup-steps 0 --out {tmp_path}"
    line = f"{{ {sys.executable} -m gptscale.launchers.cli {words}; echo $? > {tmp_path}/status; }} {terminal}"
    said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=400, check=True).stderr
    assert (tmp_path / "status").read_text() == "0\n"
    assert row(tmp_path)["status"] == "ok"
    assert ("unprinted_bytes" in (tmp_path / "runs" / "r" / "status.json").read_text()) == ("&-" not in terminal)
    assert ("bytes of this run's output could not be written" in said) == (terminal == "> /dev/full")


UNDER_SIGNALS = """
import signal, torch
from gptscale.common.model.loss import product
from gptscale.common.process.begin import begin_process
begin_process()
torch.set_num_threads(1)
taken = []
signal.signal(signal.SIGALRM, lambda *_: taken.append(1))
signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
x, table, grad = torch.randn(256, 128), torch.randn(1024, 128), torch.randn(256, 1024)
while len(taken) < 500:
    product(x, table.t()), product(grad, table)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.slow
def test_signals_leave_the_heap_alone():
    """With handlers on the thread's own stack ten signals aborted it in each of 6 goes on an Intel Xeon (oneDNN 3.10.2)."""
    ended = subprocess.run([sys.executable, "-c", UNDER_SIGNALS], capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.promise("C19")
@pytest.mark.promise("X12")
def test_a_run_leaves_its_row_files_and_steps_and_no_secret(plan, tmp_path, monkeypatch, capsys):
    """On a host whose name is no text. No file holds a secret of the environment."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h\udcff")
    monkeypatch.setenv("GPTSCALE_TEST_TOKEN", "canary-3141592")
    assert entry.work(plan("--steps", "4", "--timing-warmup-steps", "1", "--eval-every", "2", "--save-last")) == 0
    found, folder = row(tmp_path), tmp_path / "runs" / "r"
    assert (found["status"], found["recipe"], found["steps"], found["world_size"]) == ("ok", "single", "4", "1")
    assert found["host"] == r"h\udcff"
    assert float(found["tokens_per_s"]) > 0
    assert not any(found[column] for column in found if column.startswith("offload_"))
    # The peak of a CPU is not in the table, and it is not guessed.
    assert found["mfu"] == found["device_peak_tflops"] == ""
    noted = json.loads((folder / "run.json").read_text())
    assert noted["config"]["steps"] == 4
    assert noted["workload_hash"] == found["workload_hash"]
    assert noted["command"][:5] == ["gptscale", "run", "single", "--nproc", "1"]
    assert {"--steps", "4", "--save-last"} <= set(noted["command"])
    assert json.loads((folder / "status.json").read_text()) == {"status": "ok", "error": "", "step": 4, "start": ""}
    assert len((folder / "steps.csv").read_text().splitlines()) == 5
    evals = (folder / "eval.csv").read_text().splitlines()
    assert len(evals) == 3
    assert evals[-1] == f"4,{found['eval_loss']}"
    # Random ids are no text.
    assert found["bits_per_byte"] == ""
    said, errors = capsys.readouterr()
    assert "step 4/4  loss" in said
    assert "summary.csv" in said
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"canary-3141592" in content for content in [*files, (said + errors).encode()])


@pytest.mark.parametrize(
    ("error", "status", "exit_status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom", 1),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), "oom", 1),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom", 1),
        # Python's own has no text.
        (MemoryError(), "oom", 1),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1234"), "failed", 7),
        (RuntimeError("Application timeout caused pair closure"), "failed", 7),
        (torch.distributed.DistBackendError("NCCL error"), "failed", 7),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "failed", 3),
        (ZeroDivisionError("a defect"), "failed", 1),
        (OSError(28, "No space left on device"), "failed", 5),
        (SystemExit(0), "failed", 1),
    ],
)
def test_whatever_ends_a_run_leaves_its_row(plan, tmp_path, monkeypatch, capsys, error, status, exit_status):
    def build(run, config):
        raise error

    monkeypatch.setattr(single, "build", build)
    assert entry.work(plan()) == exit_status
    found = row(tmp_path)
    assert found["status"] == status
    assert str(error).split("[")[0][:20].strip() in found["error"]
    assert found["loss_last"] == ""
    said = capsys.readouterr().err
    # Only a defect deserves a traceback.
    assert ("Traceback" in said) == isinstance(error, ZeroDivisionError)


def test_what_a_resumed_run_computes_otherwise_is_said(plan, capsys):
    assert entry.work(plan("--steps", "2", "--save-last")) == 0
    assert " was " not in capsys.readouterr().out
    other = "--dropout 0.1 --beta1 0.8 --clip-grad-norm 0.5 --precision bf16 --weight-decay 0.0".split()
    assert entry.work(plan("--steps", "3", "--resume", "auto", *other)) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if " was " in line] == [
        "dropout was 0.0, is 0.1",
        "steps was 2, is 3",
        "precision was fp32, is bf16",
        "weight_decay was 0.1, is 0.0",
        "beta1 was 0.9, is 0.8",
        "clip_grad_norm was 1.0, is 0.5",
    ]


@pytest.mark.parametrize(
    ("resume", "status", "said"),
    [
        ("auto", 0, "run r is done: its 2 steps and its row are in "),
        ("newest", 2, "step 2 is saved already, in --steps"),
    ],
)
def test_a_run_that_is_done_stays_as_it_is_unless_it_lacks_its_row(plan, tmp_path, capsys, resume, status, said):
    assert entry.work(plan("--steps", "2", "--save-last")) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ["--steps", "2", *SMALL, "--out", str(tmp_path), "--run-name", "r", "--resume", resume]
    assert main(["run", "single", *words]) == status
    with pytest.raises(SystemExit) as end:
        entry.run_recipe("single", words)
    assert end.value.code == status
    assert sum(said in text for text in "".join(capsys.readouterr()).splitlines()) == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # As if it had been killed after its last save.
    (tmp_path / "runs" / "r" / "status.json").unlink()
    (tmp_path / "summary.csv").unlink()
    assert main(["run", "single", *words]) == 0
    assert "killed after its last step, and its row is written now" in capsys.readouterr().out
    assert row(tmp_path)["status"] == "ok"
    assert float(row(tmp_path)["loss_last"]) > 0
    assert main(["run", "single", *words]) == status


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step_and_says_interrupted(plan, tmp_path, before_step, capsys, number, expected):
    before_step(2, lambda: os.kill(os.getpid(), number))
    assert entry.work(plan("--steps", "50", "--save-every", "50")) == expected
    assert row(tmp_path)["status"] == "interrupted"
    assert [p.name for p in (tmp_path / "runs" / "r" / "checkpoints").iterdir()] == ["step-3"]
    assert capsys.readouterr().err == ""


@pytest.fixture
def before_step(monkeypatch):
    """Do something in the run before a 0-based step."""

    def before_step(step, action):
        original = single.build

        def build(run, config):
            engine = original(run, config)
            train_step = engine.train_step

            def step_after_action(batch, lr):
                if batch.step == step:
                    action()
                return train_step(batch, lr)

            engine.train_step = step_after_action
            return engine

        monkeypatch.setattr(single, "build", build)

    return before_step


@pytest.mark.promise("S3")
@pytest.mark.slow
def test_a_disk_that_fills_up_ends_in_5_with_all_rows_on_the_terminal(plan, small_disk, before_step, capsys):
    def fill():
        with (small_disk / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    before_step(2, fill)
    small = "--n-layer 1 --seq-len 32 --no-verdict".split()
    assert entry.work(plan("--steps", "40", "--timing-warmup-steps", "1", *small)) == 5
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("rows are held in memory") == 1
    assert said.count("TensorBoard events end here") == 1
    kept = (small_disk / "runs" / "r" / "steps.csv").read_text().splitlines()
    printed = said.split("steps.csv lacks:\n")[1].splitlines()
    assert [line.split(",")[0] for line in [*kept[1:], *printed[: 41 - len(kept)]]] == [str(n) for n in range(1, 41)]
    table = said.split("which no file has:\n")[1].splitlines()
    (told,) = csv.DictReader(table)
    assert (told["run_id"], told["status"]) == ("r", "failed")
    assert "no space" in told["error"]


@pytest.mark.promise(
    "S1 | a disk that is full before the start | refused before step 0, by an estimate of checkpoints and logs, 5"
)
def test_a_disk_with_too_little_space_refuses_the_run(plan, small_disk, capsys):
    """The checkpoints of one layer take 3 MB each."""
    words = [*SMALL, "--save-every", "1", "--steps", "9"]
    assert main(["run", "single", "--out", str(small_disk), *words]) == 5
    (error,) = capsys.readouterr().err.splitlines()
    needed = 3 * 12 * plan().run.gpt.n_params_in_memory + 2**16 + 9 * (128 + 256)
    assert f"the run needs {needed:,} bytes on the disk (3 checkpoints of " in error
    assert " are free, in " in error
    # A rank of torchrun refuses too.
    assert entry.work(plan("--save-every", "1", "--steps", "9")) == 5
    assert not list(small_disk.iterdir())


@pytest.mark.promise("S11 | results that cannot be written | refused before the start, 5")
def test_a_disk_that_is_read_only_refuses_the_run(small_disk, capsys):
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    assert main(["run", "single", "--data", "synthetic", "--out", str(small_disk / "out")]) == 5
    (error,) = capsys.readouterr().err.splitlines()
    assert f"cannot be written, at {small_disk}" in error


@pytest.mark.promise("S12 | results removed during the run | the run says so and ends with 5")
def test_results_that_are_removed_during_the_run_end_it_with_5(plan, tmp_path, before_step, capsys):
    before_step(2, lambda: shutil.rmtree(tmp_path))
    assert entry.work(plan("--steps", "9")) == 5
    said = capsys.readouterr().err
    assert "steps.csv was removed or replaced during the run, and its rows are lost" in said
    assert "Traceback" not in said
    assert row(tmp_path)["status"] == "failed"


def test_a_thread_that_cannot_be_started_names_the_limit():
    for refused in ("can't start new thread", os.strerror(11)):
        assert "ulimit -u" in as_known(RuntimeError(refused)).fix


def test_a_connection_lost_in_the_data_loader_is_a_dead_worker():
    """The loader meets the broken connection before it knows that the worker is dead: seen once in some hundred kills."""
    found = []
    for file in ("/site-packages/torch/utils/data/dataloader.py", "/elsewhere.py"):
        with pytest.raises(ConnectionResetError) as error:
            exec(compile("raise ConnectionResetError(104, 'Connection reset by peer')", file, "exec"))
        found.append(as_known(error.value))
    assert isinstance(found[0], DataError)
    assert found[0].what == "a data worker died ([Errno 104] Connection reset by peer)"
    assert found[1] is None


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    """Twice as many threads cost two thirds of the speed. Other libraries are told of the number too."""
    cores, asked = len(os.sched_getaffinity(0)), []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for processes, said, threads in (("1", "1", 1), ("1", None, cores), ("2", None, max(1, cores // 2))):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        monkeypatch.setenv("OMP_NUM_THREADS", said or "")
        if said is None:
            monkeypatch.delenv("OMP_NUM_THREADS")
        process.share_cores()
        assert (asked[-1], os.environ["OMP_NUM_THREADS"]) == (threads, str(threads))
