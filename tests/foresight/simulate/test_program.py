"""`gptscale simulate -- COMMAND`: programs that know nothing of it, as one rank of a world that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptscale.common.errors import ConfigError
from gptscale.common.process import environments
from gptscale.foresight.simulate import interpreters, processes
from gptscale.foresight.simulate.own_program import MOST, most_that_fits, place_of
from gptscale.launchers.cli import main

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def simulate(tmp_path, monkeypatch, capfd):
    """Return a function that simulates a command in an empty folder: the exit status, the figures and what was printed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)

    def run(*words, options=()):
        status = main(["simulate", "--json", str(tmp_path / "figures.json"), *options, "--", *map(str, words)])
        file = tmp_path / "figures.json"
        assert "LD_PRELOAD" not in os.environ
        return status, json.loads(file.read_text())["ranks"] if file.exists() else None, capfd.readouterr()

    return run


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a program."""
    file = tmp_path / "train.py"
    return lambda text: file.write_text(text) and file


# Its number is this process's own, since another suite may run beside this one.
SLEEP = ["sleep", str(98765 + os.getpid() / 10**8)]
SPARSE = "torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 64), device='cuda')"
STEP = """
from importlib.util import find_spec; find_spec("torch"); import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_ddp_of_a_tutorial_runs_as_one_rank_of_eight(simulate, tmp_path):
    options = ["--world", "8", "--rank", "last", "--steps", "2"]
    status, (rank,), printed = simulate(sys.executable, PROGRAMS / "ddp.py", options=options)
    assert (status, rank["world_size"], rank["steps"], rank["ended_by"]) == (0, 8, 2, "its last step")
    parameters = 4 * 4096 * 1024
    owners = rank["peak_by_owner_bytes"]
    # Moments; the step count of each parameter lies on the host.
    assert [owners[kind] / parameters for kind in ("parameter", "gradient", "optimizer state")] == [1, 1, 2]
    assert rank["peak_allocated_bytes"] > 4 * parameters
    assert max(c["nbytes"] for c in rank["step"]["collectives"]) == parameters
    time = rank["time"]
    assert 0 < time["busy"]["collectives"] < time["step_s"] < time["high_s"]
    # Nothing is computed again, and small kernels leave the device mostly idle.
    assert 0 < time["mfu"] <= time["hfu"] * 1.01
    assert (time["guessed"], "\ntime     " in printed.out, "every value was zero" in printed.out) == ({}, True, True)
    assert {file.name for file in tmp_path.iterdir()} == {"figures.json"}


@pytest.mark.slow
def test_a_python_with_another_torch_runs_with_its_own(simulate):
    python = environments.python("colossalai")
    if not Path(python).exists():
        pytest.skip("needs the environment of colossalai")
    status, (rank,), _ = simulate(python, PROGRAMS / "ddp.py", options=["--world", "8", "--steps", "2"])
    assert (status, rank["steps"], rank["torch"][:4]) == (0, 2, "2.5.")


@pytest.mark.slow
def test_torchrun_names_the_world_and_each_interval_has_its_peak(simulate):
    words = [*TORCHRUN, "--nproc-per-node", "8", "--nnodes", "2", PROGRAMS / "fsdp.py"]
    status, (first, last), printed = simulate(*words, options=["--rank", "0,last"])
    assert (status, first["rank"], last["rank"], last["world_size"]) == (0, 0, 15, 16)
    # The program makes two steps of the three, and ends by itself.
    assert (last["steps"], last["ended_by"]) == (2, "its own end")
    assert [interval["steps"] for interval in last["intervals"]] == [0, 1, 2]
    assert last["peak_allocated_bytes"] == max(interval["allocated"] for interval in last["intervals"])
    assert last["peak_by_owner_bytes"]["parameter"] == 4 * 4 * (2048 * 2048 + 2048) // 16
    assert "up to step 2" in printed.out


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "sends_to"), [(1, [[1], [0, 2], [1]]), (2, [[1], [0]])])
def test_the_stages_of_a_pipeline_are_found_by_what_they_send(stages, sends_to, simulate):
    """With two stages each, the first rank waits for what the last one's first stage sends, which is simulated before."""
    n = len(sends_to)
    words = [*TORCHRUN, "--nproc-per-node", n, PROGRAMS / "pipeline.py", stages]
    status, ranks, _ = simulate(*words, options=["--rank", "all-stages", "--steps", "2"])
    assert (status, [rank["rank"] for rank in ranks]) == (0, [*range(n)])
    assert [sorted(rank["sends_to"]) for rank in ranks] == sends_to
    # They wait for each other.
    steps_s = [rank["time"]["step_s"] for rank in ranks]
    assert max(steps_s) < 1.2 * min(steps_s)
    status, _, printed = simulate(*words, options=["--rank", "last", "--steps", "2"])
    assert status == 2
    lacks = f"rank {n - 1} needs objects that rank {n - 2} sends it"
    assert f"{lacks}, in the program, give --rank all-stages" in printed.err


@pytest.mark.slow
def test_a_program_that_does_not_fit_has_a_status_of_its_own(simulate, script):
    file = script(STEP.replace("64, 64", "20000, 20000") + "step()")
    status, (rank,), printed = simulate(sys.executable, file, options=["--memory-gib", "1"])
    assert (status, bool(rank["out_of_memory"])) == (7, True)
    assert "does not fit: CUDA out of memory. Tried to allocate 1.49 GiB. That was after 0 steps." in printed.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("raise ValueError('no data')", [], "exit status 1 before a step (ValueError: no data)"),
        ("print('the end')", [], "it ended before a step, in the program, see its last lines\nthe end"),
        (STEP + "step()\nraise ValueError('no data')", [], "it failed after 1 steps (ValueError: no data)"),
        # Its stack shows where it waits.
        (
            "import time\ndef wait_for_a_peer():\n    time.sleep(99)\nwait_for_a_peer()",
            ["--time-limit", "15"],
            "it made no 3 steps in 15 s ... in wait_for_a_peer",
        ),
        (
            "import torch, urllib.request\nurllib.request.urlopen('http://192.0.2.1/weights', timeout=5)",
            [],
            "a program under gptscale has no network, and asks for 192.0.2.1",
        ),
        ("kept = bytearray(10**9)\nimport time\ntime.sleep(99)", ["--host-limit", "0.5"], "it took more than 0.5 GiB"),
        (
            f"import os, subprocess, time\nsubprocess.Popen({SLEEP}, env={{}}, start_new_session=True)\ntime.sleep(12)\n"
            f"if os.fork(): os._exit(0)\nos.setsid()\nos.execvp('sleep', {SLEEP})",
            [],
            "before a step",
        ),
        ("print('word ' * 10**6)\nimport os\nos._exit(3)", [], "exit status 3 before a step"),
        ("import os\nos.kill(os.getpid(), 11)", [], "it was ended by SIGSEGV"),
        (STEP.replace('"cuda"', '"cpu"') + "for _ in range(3): step()", [], "it made its steps without a GPU"),
        (STEP + f"{SPARSE} @ model.weight", [], "it calls cusparse"),
        (
            "import torch\ntorch.distributed.init_process_group('nccl', rank=0, world_size=4, init_method='env://')",
            [],
            "the program asks for 4 ranks and the world has 1, in the program, give --world 4",
        ),
        (
            "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=4)",
            ["--world", "2"],
            "the program asks for 4 ranks and the world has 2",
        ),
    ],
)
def test_a_program_that_makes_no_steps_is_told_so_and_leaves_nothing(text, options, message, simulate, script):
    status, figures, printed = simulate(sys.executable, script(text), options=options)
    assert (status, figures) == (2, None)
    assert all(part in printed.err for part in message.split(" ... "))
    assert printed.err.startswith("gptscale: error: ")
    assert len(printed.err) < 2 * processes.TAIL_BYTES
    left = subprocess.run(["pgrep", "-f", " ".join(SLEEP)], capture_output=True, text=True, check=False)
    assert left.stdout == ""


@pytest.mark.slow
def test_the_end_cannot_be_caught_and_the_sitecustomize_of_the_user_runs(simulate, script, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 'mine'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    loop = "assert mine == 'mine'\nwhile True:\n    try:\n        step()\n    except BaseException:\n        pass\n"
    status, (rank,), printed = simulate(sys.executable, script(STEP + loop), options=["--balanced-experts"])
    assert (status, rank["steps"]) == (0, 3)
    assert "--balanced-experts found no router" in printed.out


WITHOUT_WEIGHTS = """
import json, pathlib, torch
pathlib.Path("config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}))
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(".", dtype=torch.bfloat16).cuda()
model.lm_head.load_state_dict(torch.load("no-such-file.pt")["head"])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
attend = torch.nn.functional.scaled_dot_product_attention
def without_mask(*tensors, attn_mask=None, **options):
    assert attn_mask is None, "positions that read as zeros were taken for packed rows"
    return attend(*tensors, **options)
torch.nn.functional.scaled_dot_product_attention = without_mask
def batches():
    yield torch.zeros(2, 16, dtype=torch.long)
    raise RuntimeError("a second batch")
class Text(torch.utils.data.IterableDataset):
    __iter__ = lambda self: batches()
for ids in torch.utils.data.DataLoader(Text(), batch_size=None):
    model(ids.cuda(), labels=ids.cuda()).loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_weights_and_batches_need_not_be_there(simulate, script):
    options = ["--no-weights", "--fake-batches"]
    status, (rank,), _ = simulate(sys.executable, script(WITHOUT_WEIGHTS), options=options)
    assert (status, rank["steps"]) == (0, 3)
    weights = 50257 * 64 + 1024 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert 2 * weights <= rank["peak_by_owner_bytes"]["parameter"] < 2 * weights + 2**20
    status, _, printed = simulate(sys.executable, script(WITHOUT_WEIGHTS), options=["--fake-batches"])
    assert status == 2
    assert "no file named" in printed.err


SOLVERS = """
numbers = torch.arange(1, 65).cuda()
assert numbers.tolist() == [*range(1, 65)]
del numbers
x, square = torch.ones(8, 64, device="cuda"), torch.ones(2, 64, 64, device="cuda", requires_grad=True)
assert (len(x[x > 0]), len(x.unique()), x.sum().item()) == (0, 0, 0.0)
found = [torch.distributions.Normal(square, 1).rsample(), torch.stft(square[0], 32, return_complex=True, window=x[0, :32])]
solvers = [getattr(torch.linalg, name) for name in ("inv", "cholesky", "det", "qr", "eigvalsh", "svdvals")]
for result in [*found, torch.fft.rfft(square), *(solve(matrix) for solve in solvers for matrix in (square, square[0]))]:
    ((result[0] if isinstance(result, tuple) else result).abs() + 0j).sum().abs().backward()
    step()
"""


# Its Adam on the device and on the host is compiled at first use.
DEEPSPEED = """
import deepspeed
for place in ("none", "cpu", "none"):
    zero = {"stage": 2, "offload_optimizer": {"device": place}}
    words = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(64, 64), config=words)
    engine.backward(engine(torch.ones(8, 64, device="cuda")).sum())
    engine.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [SOLVERS, DEEPSPEED])
def test_what_needs_a_gpu_or_its_compiler_is_there(text, simulate, script):
    status, _, printed = simulate(*TORCHRUN, script(STEP + text))
    assert (status, "lacks" in printed.out) == (0, False), printed.err


EXPERTS = """
import torch.distributed.fsdp
from transformers import MixtralConfig, MixtralForCausalLM
class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(64, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 128) for _ in range(8))
    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        assert torch.bincount(chosen.flatten(), minlength=8).tolist() == 8 * [64]
        out = x.repeat(1, 2)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out[token] += weights[token, place, None] * expert(x[chosen.eq(number).any(-1)])
        return out
sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
mixtral = MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, experts_implementation="eager", **sizes)).cuda()
by_hand, ids = Experts().cuda(), torch.ones(2, 128, dtype=torch.long, device="cuda")
torch.distributed.init_process_group()
# DTensor asks for shapes by fake tensors, which are not the program's.
torch.distributed.fsdp.fully_shard(by_hand)
rows, product, lengths = [], torch.nn.functional.linear, torch.full((2,), 4)
torch.nn.functional.linear = lambda x, w, *b: (len(w) == 128 and rows.append(len(x))) or product(x, w, *b)
optimizer = torch.optim.SGD([*mixtral.parameters(), *by_hand.parameters()], lr=0.1, foreach=False)
for _ in range(3):
    rows.clear()
    (mixtral(ids, labels=ids).loss + by_hand(torch.ones(256, 64, device="cuda")).sum()).backward()
    assert rows == 16 * [64], rows
    mixtral(ids).logits[ids.cumsum(1) % 4 == 0].sum().backward()
    scores = mixtral(ids).logits.transpose(0, 1).log_softmax(-1)
    torch.nn.functional.ctc_loss(scores, ids[:, :4], 2 * lengths, lengths).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_each_expert_gets_as_many_tokens_as_any_other(simulate, script):
    status, _, printed = simulate(sys.executable, script(EXPERTS), options=["--balanced-experts"])
    assert (status, "tokens were dealt to 8 experts in turn, 12 times in all" in printed.out) == (0, True), printed.err


SELECTIVE = """
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
keep = dict(use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default]))
for number in range(3):
    number == 2 and model.compile(fullgraph=True)
    # The work of compiled code is recorded, and the work after it.
    checkpoint(torch.nn.functional.gelu, model(torch.ones(8, 64, device="cuda")), **keep).sum().backward()
    checkpoint(model, torch.ones(8, 64, device="cuda"), **keep).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_program_may_compile_in_the_step_that_is_recorded(simulate, script):
    status, (rank,), printed = simulate(sys.executable, script(STEP + SELECTIVE))
    assert (status, "triton" in str(rank["step"]["kernels"])) == (0, True), printed.err
    assert rank["time"]["mfu"] == rank["time"]["hfu"] > 0


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found(simulate, script, tmp_path):
    text = STEP.replace("8, 64, device", "n * 2**18, 64, device") + "while True: step()"
    file = script(text.replace("import torch", "import sys, torch\nn = int(sys.argv[2])"))
    options = ["--fit", "n", "--memory-gib", "1", "--png", str(tmp_path / "memory.png"), "--steps", "2"]
    status, (rank,), printed = simulate(sys.executable, file, "--n", "1", options=options)
    assert (status, rank["fits"]) == (0, True)
    tries = [line.split() for line in printed.out.splitlines() if line.startswith("try")]
    fitting = {int(number): words == ["fits"] for _, _, number, *words in tries}
    most = max(number for number, fits in fitting.items() if fits)
    assert fitting[most + 1] is False
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_the_interpreter_of_a_script_is_that_of_its_first_line(tmp_path):
    for name, first in {"a": "#!" + sys.executable, "b": f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\""}.items():
        file = tmp_path / name
        file.write_text(f"{first}\n")
        file.chmod(0o755)
        assert interpreters.interpreter_of([str(file)]) == sys.executable


def test_a_torch_without_cuda_is_refused(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="this torch was built without CUDA"):
        interpreters.torch_of(sys.executable)


@pytest.mark.parametrize(
    ("command", "name", "found"),
    [
        ("python a.py --batch-size 8", "batch_size", (3, "", 8)),
        ("python a.py --batch_size=8 --steps 3", "--batch-size", (2, "--batch_size=", 8)),
        ("python a.py train.batch=2 batch=4", "batch", (3, "batch=", 4)),
        ("torchrun a.py --training.batch_size 2", "training.batch_size", (3, "", 2)),
    ],
)
def test_a_number_is_found_however_it_is_written(command, name, found):
    assert place_of(command.split(), name) == found


@pytest.mark.parametrize("command", ["python a.py", "p a.py --batch x", "python --batch 1 --batch 2", "p --batch 0"])
def test_a_number_that_is_not_there_once_is_refused(command):
    with pytest.raises(ConfigError, match="in --fit, write the command with --batch 1"):
        place_of(command.split(), "batch")


@pytest.mark.parametrize(("start", "most"), [(1, 13), (8, 13), (13, 13), (14, 13), (100, 13), (8, 0), (3, 1)])
def test_the_largest_that_fits_is_found_with_few_tries(start, most):
    tried = []
    assert most_that_fits(start, lambda number: tried.append(number) or number <= most) == most
    assert len(tried) == len(set(tried)) <= 9
    assert tried[0] == start
    assert most_that_fits(1, lambda number: True) == MOST
