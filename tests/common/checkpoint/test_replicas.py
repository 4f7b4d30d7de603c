"""The hash of a tensor's bits, and ranks whose replicas differ by one of them."""

import pytest
import torch
from worlds import ranks

from gptscale.common.checkpoint.replicas import PIECE, bits_hash, odd_ones


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_flipped_bit_changes_the_hash(dtype):
    """1,000 random flips, among them signs and the last elements of a tensor that fills several pieces."""
    generator = torch.Generator().manual_seed(0)
    n = 2 * PIECE + 17 if dtype == torch.float32 else 1000
    tensor = torch.randint(0, 2, (n,), generator=generator).to(dtype)
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    before = bits_hash(tensor)
    for _ in range(1000):
        at = int(torch.randint(n, (), generator=generator))
        bit = int(torch.randint(8 * dtype.itemsize, (), generator=generator))
        flip = torch.tensor(1).bitwise_left_shift(bit).to(bits.dtype)
        bits[at] ^= flip
        assert bits_hash(tensor) != before
        bits[at] ^= flip
    assert bits_hash(tensor) == before


def test_order_and_place_count():
    a = torch.tensor([1.0, 2.0, 0.0])
    assert len({int(bits_hash(t)) for t in (a, a.flip(0), a.roll(1), -a)}) == 4
    assert bits_hash(a.view(3, 1)) == bits_hash(a)
    assert bits_hash(torch.empty(0)) == 0


def test_one_against_the_majority_is_the_odd_one():
    assert odd_ones({0: 7, 1: 7, 5: 7}) == []
    assert odd_ones({0: 7, 1: 8, 5: 7}) == [1]
    assert odd_ones({0: 7, 1: 8}) == [0, 1]
    assert odd_ones({0: 7, 1: 8, 2: 7, 3: 8}) == [0, 1, 2, 3]


TABLE = "model/wte.weight"
NORM = "model/blocks.0.ln_1.weight"
WORK = "--data synthetic --no-tensorboard --n-layer 2 --seq-len 32".split()
SLOW = pytest.mark.slow


@pytest.mark.promise(
    "N7 | a flipped bit in one replica | is found at the next check (`--check-replicas`), 6, the rank is named, nothing "
    "is saved; where ranks hold no copies the option is refused"
)
@pytest.mark.parametrize(
    ("recipe", "nproc", "weight", "expected"),
    [
        ("hybrid_3d --tp-size 2", 4, NORM, f"ranks 0, 1 hold different bits of {NORM}"),
        ("ddp", 3, TABLE, f"rank 1 does not hold the bits of {TABLE} that ranks 0, 2 agree on"),
        ("pipeline", 2, TABLE, f"ranks 0, 1 hold different bits of {TABLE}"),
    ],
)
def test_a_flipped_bit_is_found_and_nothing_is_saved(recipe, nproc, weight, expected, tmp_path, capfd):
    saves = "--steps 8 --save-every 2 --check-replicas 4 --global-batch-size 12".split()
    words = [*saves, *WORK, "--out", tmp_path]
    ranks("world_faulty.py", nproc, f"flipped,{weight}", *recipe.split(), *words, "--run-name", "r", status=6)
    err = capfd.readouterr().err
    assert f"gptscale: error: rank 0: {expected}" in err
    assert ", at step 4 (equal at step 2), " in err
    folder = tmp_path / "runs" / "r"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]


@pytest.mark.promise("N7")
@pytest.mark.parametrize("recipe", ["fsdp", pytest.param("zero1", marks=SLOW), pytest.param("zero3", marks=SLOW)])
def test_a_recipe_that_splits_all_has_nothing_to_compare_and_says_so(recipe, tmp_path, capfd):
    words = ["--steps", 2, *WORK, "--check-replicas", 1, "--out", tmp_path]
    ranks("world_faulty.py", 2, "none", recipe, *words, status=2)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("gptscale: error: ")]
    reason = "no two ranks hold the same part of what a checkpoint has, so that there are no bits to compare"
    assert lines
    assert all(f"{reason}, in --check-replicas, leave it out, or use a recipe with" in line for line in lines)


def test_healthy_replicas_stay_equal(tmp_path):
    words = ["--steps", 6, *WORK, "--check-replicas", 1, "--out", tmp_path, "--global-batch-size", 12]
    ranks("world_faulty.py", 3, "none", "fairscale_sdp", *words)
