"""`gptscale submit`: a run as a job of Slurm, on one node or several."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_range
from gptscale.launchers.cluster.batch_script import batch_script
from gptscale.launchers.cluster.submission import Allocation, split_sbatch
from gptscale.launchers.run.options import parse_launch, take_recipe
from gptscale.recipes import get


@dataclass(frozen=True)
class SubmitOptions(Allocation):
    """The nodes of a job and its ranks."""

    nproc: int | None = None
    """Ranks on each node. The default is one per GPU, or one."""
    dry_run: bool = False
    """Print the script and stop. Nothing is created."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.nproc, 1, 1024, "nproc")


def main(argv: Sequence[str]) -> int:
    """Check a run, write its script, and hand it to sbatch."""
    usage = "gptscale submit RECIPE --nodes N [--gpus-per-node N] [options of sbatch] [options of gptscale run]"
    recipe, rest = take_recipe(argv, usage)
    sbatch, words = split_sbatch(rest)
    config, recipe_config, options = parse_launch(recipe, words, SubmitOptions, "submit")
    assert options is not None
    # After the options are parsed, because they import torch.
    from gptscale.launchers.cluster.submission import directives, fit_to_nodes, job_task, submit
    from gptscale.launchers.run.record import new_run_id

    per_node = options.nproc or options.gpus_per_node or 1
    if not get(recipe).axes and options.nodes * per_node > 1:
        raise ConfigError(f"{recipe} is one process", "in --nodes", "use --nodes 1 --nproc 1")
    name = config.run_name or new_run_id(recipe)
    config = dataclasses.replace(config, run_name=name)
    config = fit_to_nodes(recipe, config, recipe_config, options, per_node)
    requeue, log = config.resume is not None, config.out / "jobs" / f"{name}-%j.log"
    words = directives(name, options, per_node, log, sbatch, requeue=requeue)
    about = f"gptscale submit {shlex.join(argv)}"
    task = job_task(recipe, config, recipe_config, per_node)
    script = batch_script(words, [task], about, sys.executable, requeue=requeue)
    if options.dry_run:
        print(script, end="")
        return 0
    job = submit(script, log.with_name(f"{name}.sbatch"))
    log_of_job = str(log).replace("%j", job)
    print(f"job     {job}: {name} on {options.nodes} nodes, {per_node} rank{'s' if per_node > 1 else ''} on each")
    print(f"script  {log.with_name(f'{name}.sbatch')}")
    print(f"log     {log_of_job}")
    print(f"follow  squeue --jobs {job}; tail -F {shlex.quote(log_of_job)}")
    print(
        f"stop    scancel --batch --signal=TERM {job}  (saves, and goes back into the queue); scancel {job}  (ends it)"
    )
    if not requeue:
        print("note    the run saves nothing, so it is not started again if it is preempted: add --save-every N")
    return 0
