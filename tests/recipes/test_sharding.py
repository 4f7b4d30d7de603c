"""The memory formula of each recipe's docstring, compared with the bytes of every live tensor on two ranks."""

import functools
import json
import math
import re
import signal
import time

import pytest
from worlds import Started, command, ok, ranks

from gptscale.common.engines.zero.swap_folder import abandoned
from gptscale.launchers.run.preflight import why_not_here
from gptscale.recipes import get

D = 2
# This is wide enough that no matrix is kept whole for being small (DeepSpeed's stage3_param_persistence_threshold).
WIDTH = 384
# The layers of tiny, its table (padded) and its positions, at this width.
N = 4 * (12 * WIDTH**2 + 13 * WIDTH) + (384 + 128 + 2) * WIDTH
# DeepSpeed's reduce bucket is this x N: 4 bytes x N / 8.
BUCKET = 0.5
# The largest parameter in fp32 is this x N: 4 x 589,824 bytes, and N is 7.3 million.
LARGEST = 0.33

# Recipe and options: bytes per parameter before the optimizer's step, and the constant that may come on top.
FORMULAS = {
    "ddp": (16, 0),
    "fsdp": (16 / D, 0),
    "zero1": (4 + 12 / D + 4 / D, LARGEST),
    "zero1 --precision bf16": (2 + 12 / D + 4 + 2, 0),
    "zero2": (4 + 12 / D + 4 / D, LARGEST),
    "zero2 --precision bf16": (2 + 12 / D + 4 / D, 0),
    "zero3": ((4 + 12 + 4) / D, BUCKET + 0.03),
    "zero3 --precision bf16": ((2 + 12 + 4) / D, BUCKET + 0.03),
    "zero_offload --precision bf16": (2 + (12 + 4 + 2) / D + 4 / D, LARGEST),
    "zero_offload --precision bf16 --stage 3": ((2 + 12 + 4 + 4) / D, BUCKET + 0.03),
    "fairscale_sdp": (4 + 4 + 8 / D, 0),
    "accelerate_fsdp": (16 / D, 0),
    "lightning_fabric": (16, 0),
    "lightning_fabric --strategy fully_shard": (16 / D, 0),
    # norms and biases of rowwise matrices are whole: 6 h per layer and 2 h
    "tensor_parallel": (16 / D * (1 + (4 * 6 + 2) * WIDTH / N), 0),
    "context_parallel": (16 / D, 0),
    "hybrid_3d --tp-size 2": (16 / D * (1 + (4 * 6 + 2) * WIDTH / N), 0),
    "hybrid_3d": (16 / D, 0),
    "hybrid_3d --data-parallel ddp": (16, 0),
}
SCHEDULES = {
    f"pipeline --grad-accum-steps 8 --schedule {name}": name for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
}
# Short sequences: activations are gone when the bytes are counted, and emulated bf16 is slow.
SEQ_LEN = 4


def measure(out, *cases):
    """Return what each rank of a world measured, by case."""
    shape = f"--n-embd {WIDTH} --seq-len {SEQ_LEN}"
    ranks("world_bytes.py", D, out, *(f"{case} {shape}" for case in cases))
    of_ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(D)]
    return {case: [found[f"{case} {shape}"] for found in of_ranks] for case in cases}


# Other engines leave something behind when they are closed, so that each case of them needs a world of its own.
OF_TORCH = [case for case in (*FORMULAS, *SCHEDULES) if get(case.split()[0]).engine == "torch"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return what each rank measured in a case, which several tests look at."""

    @functools.cache
    def world(*cases):
        return measure(tmp_path_factory.mktemp("bytes"), *cases)

    return lambda case: world(*(OF_TORCH if case in OF_TORCH else [case]))[case]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", FORMULAS)
def test_bytes_per_rank_are_those_of_the_formula(case, measured):
    if reason := why_not_here(case.split()[0]):
        pytest.skip(reason)
    formula, constant = FORMULAS[case]
    for found in measured(case):
        per_parameter = found["with_gradients"] / found["n"]
        assert 0.98 * formula <= per_parameter <= 1.02 * formula + constant
        # A run's row beside the formula of the docstring: without buckets and without what is gathered.
        live = found["live"]["total"] / found["n"]
        assert 0.98 * live <= per_parameter
        assert found["formula"][1] == pytest.approx(live * found["n"], rel=0.03), found["formula"][0]
        if "zero" in case:
            assert found["state"] / found["n"] == pytest.approx(12 / D, rel=0.02)


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_stage_holds_its_layers_and_both_ends_the_table(case, measured):
    """Expect 16 bytes for each parameter of its stages, and torch's buffers for what it receives."""
    found, schedule = measured(case), SCHEDULES[case]
    block, table, positions, norm = 12 * WIDTH**2 + 13 * WIDTH, 384 * WIDTH, 128 * WIDTH, 2 * WIDTH
    held = [2 * block + table + positions, 2 * block + table + norm]
    if schedule == "ZBVZeroBubble":
        # The first rank has both ends, and the table once.
        held = [2 * block + table + positions + norm, 2 * block]
    for rank, parameters in zip(found, held, strict=True):
        assert rank["state"] == 12 * parameters
        # A stage has up to three buffers for each micro-batch.
        buffers = (1 if schedule == "1F1B" else 2) * 3 * 8 * 4 * SEQ_LEN * WIDTH
        assert 0 <= rank["with_gradients"] - 16 * parameters <= buffers + 2**16


def test_stage_2_shards_gradients_during_accumulation_and_stage_1_does_not(measured):
    between = {}
    for recipe in ("zero1", "zero2"):
        found = measured(recipe)[0]
        between[recipe] = (found["between"] - found["built"]) / found["n"]
    assert 4 * 0.98 <= between["zero1"] <= 4 * 1.02 + BUCKET
    assert 4 / D * 0.98 <= between["zero2"] <= 4 / D * 1.02 + LARGEST


def test_zero_infinity_keeps_on_disk_what_it_says_and_deletes_it(tmp_path):
    """Expect 12 N bytes of fp32 weights and AdamW state in files, and of weights and gradients what is 1 MiB or more.

    On a rank those are the matrices of the MLP.
    """
    if reason := why_not_here("zero_infinity"):
        pytest.skip(reason)
    found = measure(tmp_path, "zero_infinity")["zero_infinity"][0]
    matrices = [3 * WIDTH**2, WIDTH**2, 4 * WIDTH**2, 4 * WIDTH**2]
    # Each of the 4 layers has these.
    swapped = 4 * sum(n for n in matrices if 4 * n / D >= 2**20)
    in_matrices = 4 * sum(matrices) + 256 * WIDTH + 128 * WIDTH
    assert found["disk"] == pytest.approx(12 * in_matrices + (4 + 4) * swapped, rel=0.02)
    assert {p.name for p in tmp_path.iterdir()} == {"rank0.json", "rank1.json"}
    assert math.isclose(found["state"] / found["n"], 12 / D, rel_tol=0.02)


@pytest.mark.timeout(900)
def test_sigterm_deletes_the_swap_folder_and_after_sigkill_the_next_run(tmp_path):
    if reason := why_not_here("zero_infinity"):
        pytest.skip(reason)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    words = ["run", "zero_infinity", "--nproc", 2, *"--n-embd 256 --n-layer 2 --seq-len 32".split()]
    words += ["--out", tmp_path, "--nvme-path", nvme]
    for number in (signal.SIGTERM, signal.SIGKILL):
        run = Started(command(*words, "--steps", 99999))
        assert next(line for line in run.stdout if re.match(r"step +10/", line))
        assert sum(f.stat().st_size for f in nvme.rglob("*.swp")) > 10 * 2**20
        run.process.send_signal(number)
        status, _, _ = run.ended()
        if number == signal.SIGTERM:
            assert status == 75
            assert list(nvme.iterdir()) == []
    # The kernel ends the ranks of a launcher that was killed outright.
    deadline = time.monotonic() + 120
    while not abandoned(nvme):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    ok(*words, "--steps", 2)
    assert list(nvme.iterdir()) == []
