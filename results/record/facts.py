"""Facts that a row states beside what was measured: peak memory over ranks, versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gptscale.common.measure.devices import device_name, driver_version
from gptscale.common.measure.live_state import LiveState
from gptscale.common.measure.speed import Figures
from gptscale.common.process.environments import installed
from gptscale.results.record.files import host_name


def highest(ranks: Sequence[Figures]) -> Figures:
    """Return the maximum over ranks of each figure, None where no rank has it."""
    return {name: max((x for rank in ranks if (x := rank[name]) is not None), default=None) for name in ranks[0]}


def state_columns(states: Sequence[LiveState | None], formula: tuple[str, float] | None) -> dict[str, Any]:
    """Return the columns on the state of the rank that holds the most, beside its recipe's formula."""
    columns: dict[str, Any] = {}
    if measured := [state for state in states if state is not None]:
        fullest = max(measured, key=lambda state: state.total)
        columns = {f"state_{place}_gib": nbytes / 2**30 for place, nbytes in asdict(fullest).items()}
    if formula:
        columns |= {"state_formula": formula[0], "state_formula_gib": formula[1] / 2**30}
    return columns


def node_facts(device: torch.device) -> dict[str, Any]:
    """Return what a node has: its name, system, devices and versions."""
    facts: dict[str, Any] = {"host": host_name(), "platform": platform.platform(), "python": platform.python_version()}
    facts |= {"device": device_name(device), "cpu_cores": len(os.sched_getaffinity(0))}
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
        facts |= {"gpus": torch.cuda.device_count(), "driver": driver_version(), "nccl": nccl}
    return facts | {name: installed(name) for name in ("gptscale", "torch")}


def nodes_of(facts_of_ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts of each node once, with the ranks on it."""
    nodes: dict[str, dict[str, Any]] = {}
    for rank, facts in enumerate(facts_of_ranks):
        nodes.setdefault(facts["host"], {**facts, "ranks": []})["ranks"].append(rank)
    return list(nodes.values())


def git_commit() -> str:
    """Return the checkout's commit, with a `+` behind it if files differ, or nothing for an installed package."""
    folder = Path(__file__).resolve().parent
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        # There is no git, or no checkout. The column is empty, as docs/guides/metrics.md says.
        return ""
