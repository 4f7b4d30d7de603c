"""`gptscale sweep`: the same work by several recipes, one after another, ending in their comparison."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gptscale.common.errors import INTERRUPTED_EXIT_STATUS, PREEMPTED_EXIT_STATUS, ConfigError
from gptscale.common.process.warm_parent import begin_warm_parent, make_warm_parents, wait_for_warm_parents
from gptscale.common.settings.checks import OptionNeed, check_ranges, refuse_changed
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.cluster.submission import Allocation, split_sbatch
from gptscale.launchers.run.options import default_recipe_config
from gptscale.recipes import get

# Techniques for one device beside the plain step, each at equal data: the recipe, and the options that differ.
TECHNIQUES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("single", {}),
    "bf16": ("single", {"precision": "bf16"}),
    "accumulation": ("single", {"grad_accum_steps": 4}),
    "selective": ("single", {"activation_checkpointing": "selective"}),
    "full": ("single", {"activation_checkpointing": "full"}),
    "8bit": ("single", {"optimizer_state": "8bit"}),
    "compiled": ("single", {"compile": True}),
    "offload": ("fsdp_offload", {}),
}
# Options of sbatch that the job which compares the runs has from them, if the user named them.
SHARED = ("--account", "--partition", "--qos", "--time")


@dataclass(frozen=True)
class SweepOptions:
    """What to sweep over."""

    recipes: str = "all"
    """Names with commas between, or all that can run here."""
    techniques: bool = False
    """Techniques of one device in the place of recipes: bf16, accumulation, recomputed blocks, 8-bit state, compile, offload."""
    nproc: int | None = None
    """Processes for each recipe that splits its batch; default one per GPU, or 2 on a CPU."""
    repeats: int = 1
    """Runs of each recipe, interleaved, so that a drifting machine does not favour one."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("recipes,nproc", lambda c: not c.techniques, "techniques have recipes of their own, on one device"),
    )

    def __post_init__(self) -> None:
        check_ranges(self, {"nproc": (1, 1024), "repeats": (1, 1024)})


@dataclass(frozen=True)
class SweepAllocation(Allocation):
    """The nodes of each run, if the sweep is a job of Slurm."""

    submit: bool = False
    """As a job array of Slurm, one task for each run, and their comparison when the last has ended. --nproc is for each node."""
    dry_run: bool = False
    """Print the script of the array and stop. Nothing is created."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed(
            "nodes,min_nodes,gpus_per_node,dry_run", lambda c: c.submit, "the runs stay on this machine", "add --submit"
        ),
    )


@dataclass(frozen=True)
class RunAndSweepOptions:
    """A run's options and the sweep's."""

    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepOptions = field(default_factory=SweepOptions)
    allocation: SweepAllocation = field(default_factory=SweepAllocation)


def main(argv: Sequence[str]) -> int:
    """Plan every run, start one after another, compare them, and return 1 if any failed.

    A run that fails leaves its row, and the sweep goes on.
    """
    about = "Train the same work with several recipes, then compare."
    sbatch, words = split_sbatch(argv) if "--submit" in argv else ([], list(argv))
    options = parse(RunAndSweepOptions, words, prog="gptscale sweep", about=about)
    config = options.run
    refuse_changed(config, ["resume"], "a sweep begins its runs anew", "resume one run with gptscale run RECIPE")
    if options.sweep.techniques:
        changed = sorted({name for _, changes in TECHNIQUES.values() for name in changes})
        refuse_changed(config, changed, "techniques are compared with the plain step", "leave it out")
        if options.allocation.submit:
            raise ConfigError("techniques are of one device", "in --techniques", "leave out --submit")
    if options.allocation.submit:
        return _submit(options, sbatch, f"gptscale sweep {shlex.join(argv)}")
    begin_warm_parent(config.device, imports=["gptscale.launchers.run.start", *config.data_imports])
    # After the options are parsed, because it imports torch.
    from gptscale.launchers.run.record import new_run_id
    from gptscale.launchers.run.space import check_memory
    from gptscale.launchers.run.start import nproc_of, plan_run, recipes_named, start

    if options.sweep.techniques:
        chosen = TECHNIQUES
        # Or accumulation would make the batch larger.
        batch = plan_run("single", config, default_recipe_config("single"), 1).run.batch.global_batch_size
        config = dataclasses.replace(config, global_batch_size=batch)
    else:
        chosen = {name: (name, {}) for name in recipes_named(options.sweep.recipes, config, same_work=True)}
    rows = [get(recipe) for recipe in dict.fromkeys(recipe for recipe, _ in chosen.values())]
    for row in rows:
        row.check_installed()
        row.check_imports()
    make_warm_parents((row.environment, row.imports) for row in rows)
    plans = []
    for name, (recipe, changes) in chosen.items():
        recipe_config, its = default_recipe_config(recipe), dataclasses.replace(config, **changes)
        nproc = 1 if options.sweep.techniques else nproc_of(recipe, config, options.sweep.nproc)
        check_memory(plan_run(recipe, its, recipe_config, nproc).run, recipe_config.offload)
        plans.append((name, recipe, its, recipe_config, nproc))
    # Or their imports would slow the first run.
    wait_for_warm_parents()
    failures = 0
    for repeat in range(options.sweep.repeats):
        for name, recipe, its, recipe_config, nproc in plans:
            run_id = f"{config.run_name}-{name}-{repeat}" if config.run_name else new_run_id(name)
            processes = f"{nproc} process{'es' if nproc > 1 else ''}"
            print(f"\n== {name} on {processes} ({repeat + 1} of {options.sweep.repeats})", flush=True)
            status = start(recipe, dataclasses.replace(its, run_name=run_id), recipe_config, nproc)
            if status in (PREEMPTED_EXIT_STATUS, INTERRUPTED_EXIT_STATUS):
                return status
            failures += status != 0
    print(flush=True)
    from gptscale.results.comparison.write import write_comparison

    write_comparison([config.out], config.out)
    return 1 if failures else 0


def _submit(options: RunAndSweepOptions, sbatch: Sequence[str], about: str) -> int:
    """Submit all runs as one job array, and a job that compares them when the last has ended."""
    from gptscale.launchers.cluster.batch_script import batch_script
    from gptscale.launchers.cluster.submission import directives, fit_to_nodes, job_task, submit
    from gptscale.launchers.run.record import new_run_id
    from gptscale.launchers.run.start import recipes_named

    allocation, out = options.allocation, options.run.out
    name = options.run.run_name or new_run_id("sweep")
    per_node = options.sweep.nproc or allocation.gpus_per_node or (2 if allocation.nodes == 1 else 1)
    tasks, requeue = [], False
    for repeat in range(options.sweep.repeats):
        for recipe in recipes_named(options.sweep.recipes, options.run, same_work=True):
            recipe_config = default_recipe_config(recipe)
            config = dataclasses.replace(options.run, run_name=f"{name}-{recipe}-{repeat}")
            ranks = per_node if get(recipe).axes else 1
            config = fit_to_nodes(recipe, config, recipe_config, allocation, ranks)
            requeue = config.resume is not None
            tasks.append(job_task(recipe, config, recipe_config, per_node))
    log = out / "jobs" / f"{name}-%A_%a.log"
    words = directives(name, allocation, per_node, log, sbatch, requeue=requeue)
    script = batch_script([*words, f"--array=0-{len(tasks) - 1}"], tasks, about, sys.executable, requeue=requeue)
    if allocation.dry_run:
        print(script, end="")
        return 0
    job = submit(script, out / "jobs" / f"{name}.sbatch")
    files = [word for kind in ("csv", "md", "png", "html") for word in (f"--{kind}", str(out / f"comparison.{kind}"))]
    compare = shlex.join([sys.executable, "-Pm", "gptscale.launchers.cli", "compare", str(out), *files])
    its_log = out / "jobs" / f"{name}-comparison.log"
    shared = [f"#SBATCH {shlex.quote(word)}" for word in sbatch if word.partition("=")[0] in SHARED]
    script = "\n".join(["#!/usr/bin/env bash", *shared, f"exec {compare}", ""])
    file = out / "jobs" / f"{name}-comparison.sbatch"
    after = submit(script, file, f"--dependency=afterany:{job}", f"--output={its_log}", f"--job-name={name}-comparison")
    print(f"job     {job}: {name}, {len(tasks)} runs on {allocation.nodes} nodes each")
    print(f"logs    {str(log).replace('%A', job).replace('%a', '*')}")
    print(f"then    job {after} compares them: {its_log} and {out / 'comparison.html'}")
    print(f"follow  squeue --jobs {job},{after}")
    return 0
