"""Attention over ranks that have parts of a sequence, and which parts these are."""

import json

import torch
from worlds import ranks

from gptscale.recipes.context_parallel import shard

# The largest number is some 4. bf16 keeps 8 bits, and each of four ranks rounds.
TOLERANCE = {"16 bits": 0.1, "heads": 1e-5, "shared keys": 1e-5}


def test_attention_and_every_gradient_are_those_of_whole_sequences(tmp_path):
    ranks("world_context.py", 4, tmp_path)
    for rank in range(4):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(found) == 6
        for case, deviations in found.items():
            assert max(deviations) <= TOLERANCE[case.partition(" ")[2]], case


def test_each_rank_of_a_ring_has_a_chunk_from_the_front_and_from_the_back():
    tokens = torch.arange(16).view(1, 16)
    parts = [shard(tokens, rank, 4, "ring").flatten().tolist() for rank in range(4)]
    assert parts[:2] == [[0, 1, 14, 15], [2, 3, 12, 13]]
    # The work of a token is that of all tokens before it.
    assert len({sum(part) for part in parts}) == 1
    assert sorted(token for part in parts for token in part) == list(range(16))
    assert shard(tokens, 1, 4, "ulysses").tolist() == [[4, 5, 6, 7]]
