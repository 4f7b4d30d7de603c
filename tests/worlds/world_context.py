"""Run as ranks: attention of parts of sequences, by both styles, held against attention to whole ones.

usage: world_context.py OUT; writes OUT/rank<N>.json: {case: largest deviation of the output and of each gradient}
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from world_engine import end_well

from gptscale.common.engines.context_parallel import attend_by_heads, attend_in_ring
from gptscale.common.process.world import World, process_group
from gptscale.recipes.context_parallel import shard

CASES = {"heads": (8, 8, torch.float32), "shared keys": (8, 4, torch.float32), "16 bits": (8, 4, torch.bfloat16)}


def deviations(style, n_head, n_kv_head, dtype, world):
    torch.manual_seed(0)
    whole = [torch.randn(2, n, 32, 16, dtype=dtype) for n in (n_head, n_kv_head, n_kv_head, n_head)]
    # Attention on the ranks is that of a part of the tokens, whose dim `shard` takes to be the second.
    parts = [shard(x.transpose(1, 2), world.rank, world.world_size, style).transpose(1, 2) for x in whole]
    attend = attend_in_ring if style == "ring" else attend_by_heads
    options = {"is_causal": True, "enable_gqa": True}
    (q, k, v), (own_q, own_k, own_v) = ([x.detach().requires_grad_() for x in xs[:3]] for xs in (whole, parts))
    out = F.scaled_dot_product_attention(q, k, v, **options)
    own = attend(own_q, own_k, own_v, group=dist.group.WORLD, **options)
    out.backward(whole[3])
    own.backward(parts[3])
    pairs = [(own, out), (own_q.grad, q.grad), (own_k.grad, k.grad), (own_v.grad, v.grad)]
    return [
        float((part - shard(of_all.transpose(1, 2), world.rank, world.world_size, style).transpose(1, 2)).abs().max())
        for part, of_all in pairs
    ]


def main(out):
    torch.set_num_threads(1)
    world = World.from_environment("auto")
    with process_group(world):
        found = {
            f"{style} {name}": deviations(style, *case, world)
            for style in ("ring", "ulysses")
            for name, case in CASES.items()
        }
    (out / f"rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_well()
