"""Make the plan that the options of `gptscale plan` ask for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import GIB, SIMULATED
from gptscale.common.settings.plan_file import FORMAT_VERSION, hash_of, options_of
from gptscale.foresight.plan.options import PlanOptions
from gptscale.foresight.plan.planner import WorkPlan, plan
from gptscale.foresight.plan.question import Cluster, cpu_cluster, gpu_cluster
from gptscale.foresight.plan.rows import PlannedRow, words_of
from gptscale.foresight.plan.trials import measured, simulated
from gptscale.foresight.simulate.interpreters import prepare_mock
from gptscale.results.record.files import export


def cluster_of(options: PlanOptions) -> Cluster:
    """Return the machines that are planned for."""
    if not options.here:
        cluster = gpu_cluster(options.device, options.nodes, options.gpus_per_node, options.link)
        if options.precision == "fp8" and "fp8" not in SIMULATED[options.device].tflops:
            raise ConfigError(f"{options.device} has no fp8 products", "in --precision", "use bf16 or another device")
        return dataclasses.replace(cluster, jobs=options.jobs_on_links, calibration=options.calibration)
    return cpu_cluster(options.nproc or min(8, len(os.sched_getaffinity(0))), psutil.virtual_memory().available)


def plan_for(
    options: PlanOptions, cluster: Cluster, names: Sequence[str], tell: Callable[[str], None] = lambda words: None
) -> WorkPlan:
    """Return the plan of the recipes `names` on a cluster. tell: is told what is tried."""
    if not cluster.is_cpu:
        # Or the trials would compile it at the same time.
        prepare_mock()
    return plan(
        options.work(cluster.ranks),
        cluster,
        names,
        measured if cluster.is_cpu else simulated,
        wanted=options.rows,
        # Runs of this machine would slow each other down.
        at_once=1 if cluster.is_cpu else max(1, len(os.sched_getaffinity(0))),
        host_memory=None if options.host_memory is None else int(options.host_memory * 2**30),
        tell=tell,
    )


def best_by_devices(options: PlanOptions, plan: WorkPlan) -> dict[int, list[PlannedRow]]:
    """Return the best rows on half as many devices, a quarter and so on, with the same global batch."""
    cluster, plans = plan.cluster, {plan.cluster.ranks: plan.rows}
    names = list(dict.fromkeys(row.run.recipe for row in plans[cluster.ranks]))
    same = dataclasses.replace(options, global_batch_size=plan.config.global_batch_size)
    ranks = cluster.ranks // 2
    while ranks:
        nodes, per_node = (ranks // cluster.per_node, cluster.per_node) if ranks >= cluster.per_node else (1, ranks)
        fewer = dataclasses.replace(cluster, nodes=nodes, per_node=per_node)
        plans[ranks] = plan_for(same, fewer, names).rows
        ranks //= 2
    return {n: rows for n, rows in plans.items() if rows}


def write_plan(path: Path, plan: WorkPlan, argv: Sequence[str]) -> str:
    """Write the plan for `gptscale run --plan` and return its hash."""
    content = {
        "command": ["gptscale", "plan", *argv],
        "cluster": dataclasses.asdict(plan.cluster),
        "recommended": plan.recommended_number,
        "rows": [
            {
                "name": row.name,
                "recipe": row.run.recipe,
                "nodes": plan.cluster.nodes,
                "ranks": plan.cluster.ranks,
                "words": words_of(row),
                "options": options_of(row.run, row.config),
                "predicted_step_time_s": row.timing.seconds,
                "interval_s": [row.timing.low, row.timing.high],
                "grade": row.timing.grade,
                "predicted_peak_mem_gib": (row.simulated.allocated if row.simulated else row.places.on_device) / GIB,
                "memory_by": "simulation" if row.simulated else "bound",
            }
            for row in plan.rows
        ],
    }
    return save_plan(path, content)


def save_plan(path: Path, content: Mapping[str, Any]) -> str:
    """Write a plan under its hash and return that."""
    versions = {"gptscale": importlib.metadata.version("gptscale"), "torch": importlib.metadata.version("torch")}
    document = {"format": FORMAT_VERSION, "versions": versions, **content}
    document["sha256"] = hash_of(document)
    export(path, (json.dumps(document, indent=1) + "\n").encode())
    return str(document["sha256"])
