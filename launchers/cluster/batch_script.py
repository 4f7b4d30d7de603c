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
PEERS_END_S = 60

RANKS = """\
# The ranks meet at the first node, on a port of the job's own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=${{SLURM_CPUS_PER_TASK:-1}}
# This start of the run, for run.json and status.json.
export GPTSCALE_START=$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$per_node; exec "$@"'

# A controller that is too busy to answer is asked again, but not for SIGTERM: a second one would end the ranks at once. Without
# a limit the programs of Slurm try to reach it for two minutes and say nothing.
ask() {{ for _ in {{1..10}}; do timeout 5 "$@" && return; sleep 1; done; }}
# Slurm warns this script, which hands SIGTERM on to every rank: they save and end with 75. srun itself would kill them. Before a
# warning Slurm sends SIGCONT, and calls the job SIGNALING until a node has answered, which may be later than the warning itself.
running() {{ [[ $(ask squeue --noheader --format %T --jobs "$SLURM_JOB_ID") == @(RUNNING|SIGNALING) ]]; }}
trap 'warned=yes interrupted=yes; echo "warned by SIGTERM: the ranks save and end"
    running && scancel --signal=TERM "$SLURM_JOB_ID"' TERM
# srun starts a task for each rank, and ends with the highest status of them.
srun --nodes="$nodes" --ntasks=$((nodes * per_node)) --ntasks-per-node="$per_node" \\
    --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" --kill-on-bad-exit=0 --wait={wait_s} \\
    bash -c "$rank" rank "${{command[@]}}" &
ranks=$!
# The trap ends a wait before its time. The ranks may end while it runs, and bash keeps their status for the next wait.
interrupted=yes
while [[ $interrupted ]]; do
    interrupted=
    wait "$ranks"
    status=$?
done
"""

ROW = """\
# A run that ended well gets its verdict from here. One whose rank 0 was killed gets its row: it is ok if all steps were done.
{python} -m gptscale.launchers.cluster.after_ranks "$folder" "$status" && status=0
"""

REQUEUE = """\
# In the queue again, the run goes on from its newest checkpoint: after a warning, and at most {restarts} times because a rank is
# gone (7, or more than 128). When a node is gone, Slurm does it itself. A cancelled job is not RUNNING, and stays cancelled.
((status == 75)) && again=yes
((status == 7 || status > 128)) && [[ ${{warned-}} || ${{SLURM_RESTART_COUNT:-0}} -lt {restarts} ]] && again=yes
if [[ ${{again-}} ]] && running; then
    echo "status $status: back into the queue"
    ask scontrol requeue "$SLURM_JOB_ID"
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
    head = ["#!/usr/bin/env bash", *(f"#SBATCH {shlex.quote(word)}" for word in directives), f"# {about}", ""]
    if len(tasks) == 1:
        head += _assignments(tasks[0])
    else:
        cases = [[f"{i})", *(f"    {line}" for line in _assignments(task)), "    ;;"] for i, task in enumerate(tasks)]
        head += ["case $SLURM_ARRAY_TASK_ID in", *(line for case in cases for line in case), "esac"]
    parts = ["\n".join(head) + "\n", RANKS.format(wait_s=PEERS_END_S), ROW.format(python=shlex.quote(python))]
    if requeue:
        parts.append(REQUEUE.format(restarts=RESTARTS_MAX))
    return "\n".join([*parts, 'exit "$status"\n'])


def _assignments(task: JobTask) -> list[str]:
    return [
        f"folder={shlex.quote(str(task.folder))}",
        f"command=({shlex.join(task.command)})",
        f"nodes={task.nodes or '$SLURM_JOB_NUM_NODES'}",
        f"export per_node={task.ranks_per_node}",
    ]
