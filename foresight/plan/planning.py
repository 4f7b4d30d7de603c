"""Make the plan that the options of `gptscale plan` ask for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import psutil
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.process.world import World
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.calibrate.file import CalibratedMachine
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.plan.options import PlanOptions
from gptscale.foresight.plan.planner import WorkPlan, plan
from gptscale.foresight.plan.question import Cluster, cpu_cluster, gpu_cluster
from gptscale.foresight.plan.report import merged
from gptscale.foresight.plan.rows import PlannedRow
from gptscale.foresight.simulate.simulation import simulate
from gptscale.foresight.time.data_sheets import sheet_of
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import unsupported


def cluster_of(options: PlanOptions) -> Cluster:
    """Return the machines that are planned for."""
    if not options.here:
        cluster = gpu_cluster(options.device, options.nodes, options.gpus_per_node, options.link)
        if options.precision == "fp8" and sheet_of(options.device, "fp8") == options.device:
            raise ConfigError(
                f"{options.device} has no products in fp8", "in --precision", "use bf16 or another device"
            )
        return dataclasses.replace(cluster, jobs=options.jobs_on_links)
    return cpu_cluster(options.nproc or min(8, len(os.sched_getaffinity(0))), psutil.virtual_memory().available)


def plan_for(options: PlanOptions, cluster: Cluster, names: Sequence[str]) -> WorkPlan:
    """Return the plan of the recipes `names` on a cluster."""
    world = World(0, 0, cluster.ranks, torch.device("cpu" if cluster.is_cpu else "cuda"), 600.0)

    def resolved(recipe: str, config: RunConfig, own: RecipeConfig) -> Run:
        run = resolve(recipe, config, own, world)
        unsupported.check(recipe, run.config, own)
        if own.offload != "nvme":
            # A check of nvme would look at this machine's disk.
            own.check(run)
        return run

    work = options.work(cluster.ranks)
    memory = None if options.host_memory is None else int(options.host_memory * 2**30)
    machine = _this_machine(cluster.ranks) if cluster.is_cpu else None
    return plan(work, cluster, names, resolved, file=options.calibration, host_memory=memory, machine=machine)


def _this_machine(ranks: int) -> CalibratedMachine:
    """Return what a calibration of this machine's processors is filed under."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // ranks))
    version = torch.__version__.partition("+")[0]
    return CalibratedMachine(device_name(torch.device("cpu")), version, threads, ranks)


def best_by_devices(options: PlanOptions, plan: WorkPlan) -> dict[int, list[PlannedRow]]:
    """Return the best rows on half as many devices, a quarter and so on, with the same global batch."""
    cluster, plans = plan.cluster, {plan.cluster.ranks: merged(plan.best)[0]}
    names = list(dict.fromkeys(row.candidate.run.recipe for row in plans[cluster.ranks]))
    same = dataclasses.replace(options, global_batch_size=plan.config.global_batch_size)
    ranks = cluster.ranks // 2
    while ranks:
        nodes, per_node = (ranks // cluster.per_node, cluster.per_node) if ranks >= cluster.per_node else (1, ranks)
        fewer = dataclasses.replace(cluster, nodes=nodes, per_node=per_node)
        plans[ranks] = merged(plan_for(same, fewer, names).best)[0]
        ranks //= 2
    return {n: rows for n, rows in plans.items() if rows}


def simulated_memory(row: PlannedRow) -> RankMemory:
    """Return the memory of a row's rank that needs most: the first, and of stages also the last."""
    run, cluster = row.candidate.run, row.cluster
    memories = []
    for rank in dict.fromkeys((0, cluster.ranks - 1 if run.pp_size > 1 else 0)):
        simulated = simulate(
            run.recipe,
            dataclasses.replace(run.config, data="synthetic"),
            row.candidate.config,
            device=cluster.device,
            rank=rank,
            world_size=cluster.ranks,
            ranks_per_node=cluster.per_node,
        )
        memories.append(simulated.memory())
    return max(memories, key=lambda memory: (memory.fits is False, memory.needed))
