"""The script that Slurm's sbatch is given: a run on several nodes, or an array of runs, each of which resumes by itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# How often a job goes back into the queue because a rank or a node is gone. After a warning from Slurm it always does.
RESTARTS_MAX = 10
# Seconds between Slurm's warning and the end of a job, in which a run finishes its step and saves.
WARNING_S = 60
# Seconds that the ranks which are left may take to end after the first has ended.
PEERS_END_S = 30

HEAD = """\
# The ranks meet at the first node, on a port of the job's own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# This start of the run, for run.json and status.json.
export GPTSCALE_START=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
"""

# srun has one task for each rank. Its exit status is the highest of the ranks.
RANKS = """\
rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={per_node}; exec "$@"'
# Slurm warns this script. srun hands SIGTERM on to every rank, which then saves and ends with 75.
trap 'warned=yes; kill -TERM ${{ranks-}}' TERM
srun --nodes={nodes} --ntasks={ntasks} --ntasks-per-node={per_node} --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
    --kill-on-bad-exit=0 --wait={wait_s} bash -c "$rank" rank "${{command[@]}}" &
ranks=$!
wait "$ranks"
status=$?
# The trap ends a wait before its time.
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
    status=$?
done
"""

ROW = """\
# A run whose rank 0 was killed gets its row from here.
((status == 0)) || {python} -m gptscale.launchers.run.lost_row "$folder" "$status"
"""

REQUEUE = """\
# In the queue again, the run goes on from its newest checkpoint: after a warning, and at most {restarts} times because a rank or
# a node is gone (7, or more than 128). A cancelled job is no longer RUNNING, and stays cancelled.
((status == 75)) && again=yes
((status == 7 || status > 128)) && [[ ${{warned-}} || ${{SLURM_RESTART_COUNT:-0}} -lt {restarts} ]] && again=yes
if [[ ${{again-}} && $(squeue --noheader --format %T --jobs "$SLURM_JOB_ID") == RUNNING ]]; then
    echo "status $status: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


@dataclass(frozen=True)
class JobTask:
    """One run of a job: its folder, the command of each rank, the ranks on each node, and the nodes, 0 for all of the job."""

    folder: Path
    command: Sequence[str]
    ranks_per_node: int
    nodes: int = 0


def batch_script(directives: Sequence[str], tasks: Sequence[JobTask], about: str, python: str, *, requeue: bool) -> str:
    """Return the script for one run, or for an array with a run in each of its tasks.

    directives: the options of sbatch. about: a line for readers. requeue: whether the job goes back into the queue when it is
    preempted, out of time, or has lost a rank or a node.
    """
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {shlex.quote(word)}" for word in directives), f"# {about}", ""]
    if len(tasks) == 1:
        lines += _assignments(tasks[0])
        per_node, nodes = str(tasks[0].ranks_per_node), tasks[0].nodes or '"$SLURM_JOB_NUM_NODES"'
        ntasks = f"$((SLURM_JOB_NUM_NODES * {per_node}))"
    else:
        lines.append("case $SLURM_ARRAY_TASK_ID in")
        for i, task in enumerate(tasks):
            lines += [f"{i})", *(f"    {line}" for line in _assignments(task))]
            lines += [
                f"    nodes={task.nodes or '$SLURM_JOB_NUM_NODES'}",
                f"    per_node={task.ranks_per_node}",
                "    ;;",
            ]
        lines.append("esac")
        per_node, nodes, ntasks = "$per_node", '"$nodes"', "$((nodes * per_node))"
    # The ranks read per_node in a shell of their own.
    lines += ["export per_node"] if len(tasks) > 1 else []
    ranks = RANKS.format(per_node=per_node, nodes=nodes, ntasks=ntasks, wait_s=PEERS_END_S)
    parts = ["\n".join(lines) + "\n", HEAD, ranks, ROW.format(python=shlex.quote(python))]
    if requeue:
        parts.append(REQUEUE.format(restarts=RESTARTS_MAX))
    return "\n".join([*parts, 'exit "$status"\n'])


def _assignments(task: JobTask) -> list[str]:
    return [f"folder={shlex.quote(str(task.folder))}", f"command=({shlex.join(task.command)})"]
