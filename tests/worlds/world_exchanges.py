"""Two ranks: every way to begin an exchange is noted with its kind, ranks and bytes, and each wait tells what it is for."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from gptscale.common.measure.exchanges import ExchangeLog
from gptscale.common.process.progress import count_waits, progress
from gptscale.common.process.rendezvous import open_store
from gptscale.common.process.world import World

world = World.from_environment("cpu")
store = open_store(world.rank, world.timeout_s)
dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
count_waits()
rank, both = dist.get_rank(), (0, 1)
before = dist.all_reduce, dist.batch_isend_irecv, dist.Work.wait, functional.wait_tensor
x, twice = torch.ones(4), torch.empty(8)
with ExchangeLog().watching() as exchanges, progress.marking() as marks:
    progress.at("forward")
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(x, async_op=True)
    # Waits in another order than the exchanges.
    second.wait()
    first.wait()
    dist.all_gather_into_tensor(twice, x)
    progress.at("backward")
    y = functional.all_reduce(torch.ones(16), "sum", dist.group.WORLD)
    y = y + 1
    message = dist.P2POp(dist.isend if rank == 0 else dist.irecv, torch.ones(3), 1 - rank)
    for work in dist.batch_isend_irecv([message]):
        work.wait()
    dist.all_to_all_single(torch.empty(4), x, [2, 2], [2, 2])
assert (dist.all_reduce, dist.batch_isend_irecv, dist.Work.wait, functional.wait_tensor) == before
assert [exchange.name for exchange in exchanges] == [
    ("all_reduce", both, 0),
    ("all_reduce", both, 1),
    ("all_gather_into_tensor", both, 0),
    ("all_reduce", both, 2),
    ("send", both, 0),
    ("all_to_all_single", both, 0),
], exchanges
# The gather's bytes are those that come out.
assert [exchange.nbytes for exchange in exchanges] == [16, 16, 32, 64, 12, 16]
assert all(before.begun <= after.begun for before, after in pairwise(exchanges))
waits = [mark.exchange for mark in marks if mark.waits and mark.exchange >= 0]
# Whether a call that waits by itself is marked is the backend's affair.
assert [wait for wait in dict.fromkeys(waits) if wait not in (2, 5)] == [1, 0, 3, 4], waits
assert [mark.part for mark in marks if mark.exchange == 3] == ["backward"]
# Outside, nothing is noted.
dist.all_reduce(x)
assert len(exchanges) == 6
dist.destroy_process_group()
