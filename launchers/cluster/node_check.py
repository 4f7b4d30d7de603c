"""One process on each node of an allocation: python -m gptscale.launchers.cluster.node_check OUT.

Their facts and speeds are laid side by side, for `gptscale doctor --nodes`.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from gptscale.common.errors import ConfigError
from gptscale.common.measure.speed import timed
from gptscale.common.process.begin import begin_process
from gptscale.common.process.ending import end_process
from gptscale.common.process.world import World, gather_objects, process_group
from gptscale.launchers.nvme import gemm_tflops
from gptscale.results.record.facts import node_facts
from gptscale.results.render import console, table

# Facts that must be the same on all nodes.
VERSIONS = ("python", "torch", "nccl", "driver", "gptscale")
SAME = (*VERSIONS, "device", "gpus")
CLOCKS_APART_S = 1.0
# A node is slow below this share of the median of all nodes.
SLOW = 0.8
ALL_REDUCE_BYTES, LINK_BYTES = 2**24, 2**22


def interface_to(address: str) -> str:
    """Return the name of the network interface by which this machine reaches an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(address), 9))
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(a.address == own for a in addresses)), own)


def best_s(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three calls, after one that warms up."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return min([timed(work, 1, device) for _ in range(4)][1:])


def to_first(rank: int, world_size: int) -> tuple[float, float]:
    """Return how far this node's clock is ahead of the first one's in seconds, and the GiB/s between the two."""

    def send() -> None:
        dist.send(large, 0)
        dist.recv(small, 0)

    def receive(other: int) -> None:
        dist.recv(large, other)
        dist.send(small, other)

    small, large = torch.zeros(1, dtype=torch.float64), torch.zeros(LINK_BYTES, dtype=torch.uint8)
    ahead, rate = 0.0, 0.0
    for other in range(1, world_size):
        if rank == other:
            trips = []
            for _ in range(5):
                began = time.time()
                dist.send(small, 0)
                dist.recv(small, 0)
                ended = time.time()
                trips.append((ended - began, (began + ended) / 2 - small.item()))
            # The shortest trip says it best.
            ahead = min(trips)[1]
            rate = LINK_BYTES / best_s(send) / 2**30
        elif rank == 0:
            for _ in range(5):
                dist.recv(small, other)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
            best_s(functools.partial(receive, other))
    return ahead, rate


def seen_by_all(out: Path, host: str) -> str:
    """Return what is wrong with the folder `out` on this node, nothing if all nodes write there and see all files."""
    token = gather_objects(uuid.uuid4().hex)[0]
    folder, problem = out / f".doctor-{token}", ""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / f"{dist.get_rank()}").write_text(host)
    except OSError as error:
        problem = f"cannot write into {out} ({error.strerror})"
    gather_objects(None)
    n_seen = len(list(folder.glob("*"))) if folder.is_dir() else 0
    if not problem and n_seen != dist.get_world_size():
        problem = f"sees {n_seen} of {dist.get_world_size()} files in {out}, which is not shared"
    gather_objects(None)
    shutil.rmtree(folder, ignore_errors=True)
    return problem


def problems(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Return what differs between the nodes and must not, a line each that names them."""
    lines = []
    for name in SAME:
        hosts: dict[str, list[str]] = {}
        for node in nodes:
            hosts.setdefault(str(node.get(name)), []).append(node["host"])
        if len(hosts) > 1:
            values = "; ".join(f"{value} on {', '.join(those)}" for value, those in hosts.items())
            lines.append(f"{name} differs: {values}")
    lines += [f"{node['host']} {node['folder']}" for node in nodes if node["folder"]]
    clocks = {node["host"]: node["clock_ahead_s"] for node in nodes if abs(node["clock_ahead_s"]) > CLOCKS_APART_S}
    return lines + [f"the clock of {host} is {s:+.1f} s from that of {nodes[0]['host']}" for host, s in clocks.items()]


def slow_ones(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each node that multiplies or sends much more slowly than is usual among them."""
    lines = []
    for what, unit, others in (("product_tflops", "TFLOP/s", nodes), ("link_gib_per_s", "GiB/s", nodes[1:])):
        usual = statistics.median(node[what] for node in others) if others else 0.0
        lines += [
            f"{node['host']} is slow: {node[what]:.2f} of the usual {usual:.2f} {unit}"
            for node in others
            if node[what] < SLOW * usual
        ]
    return lines


def show(nodes: Sequence[dict[str, Any]], all_reduce_gib_per_s: float) -> None:
    """Print the nodes side by side, and the slowest by name."""
    rows = [
        (
            node["host"],
            node["device"] + (f" x {node['gpus']}" if "gpus" in node else ""),
            ", ".join(f"{name} {node[name]}" for name in VERSIONS if node.get(name)),
            node["interface"],
            f"{node['clock_ahead_s'] * 1e3:+.1f} ms",
            f"{node['product_tflops']:.2f}",
            f"{node['link_gib_per_s']:.2f}" if node["link_gib_per_s"] else "",
        )
        for node in nodes
    ]
    terminal = console(log_columns=160)
    terminal.print(table(("node", "device", "versions", "interface", "clock", "TFLOP/s", "GiB/s to the first"), rows))
    slowest = min(nodes, key=lambda node: node["product_tflops"])
    rate = f"all-reduce of {ALL_REDUCE_BYTES // 2**20} MiB over {len(nodes)} nodes: {all_reduce_gib_per_s:.2f} GiB/s per node"
    terminal.print(f"{rate}; slowest in products: {slowest['host']}", highlight=False, soft_wrap=True)


def compare_nodes(out: Path) -> int:
    """Start a process on each node of the allocation that this runs in, and return 1 if the nodes differ."""
    job, n_nodes = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NUM_NODES")
    if not (job and job.isdecimal() and n_nodes):
        raise ConfigError("this is no allocation of Slurm", "in --nodes", "salloc --nodes 2 gptscale doctor --nodes")
    variables = "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) RANK=$SLURM_PROCID LOCAL_RANK=0"
    rank = f'export {variables} WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=1 MASTER_PORT={20000 + int(job) % 20000}; exec "$@"'
    words = [sys.executable, "-u", "-Pm", "gptscale.launchers.cluster.node_check", str(out)]
    srun = f"srun --nodes={n_nodes} --ntasks={n_nodes} --ntasks-per-node=1 bash -c".split()
    return subprocess.run([*srun, rank, "rank", *words], check=False).returncode


def main(out: Path) -> int:
    """Gather the facts of all nodes, which the first prints, and return 1 if they differ where they must not."""
    begin_process()
    world = World.from_environment("auto", 60.0)
    with process_group(world):
        facts = node_facts(world.device)
        facts["interface"] = interface_to(os.environ["MASTER_ADDR"])
        facts["product_tflops"] = gemm_tflops(world.device)
        facts["clock_ahead_s"], facts["link_gib_per_s"] = to_first(world.rank, world.world_size)
        facts["folder"] = seen_by_all(out, facts["host"])
        vector = torch.ones(ALL_REDUCE_BYTES // 4, device=world.device)
        n = world.world_size
        rate = 2 * (n - 1) / n * ALL_REDUCE_BYTES / best_s(lambda: dist.all_reduce(vector)) / 2**30
        nodes = gather_objects(facts)
    wrong = problems(nodes)
    if world.is_main:
        show(nodes, rate)
        print("\n".join(f"warning: {line}" for line in [*wrong, *slow_ones(nodes)]) or "nothing stands out", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
