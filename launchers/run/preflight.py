"""The checks before a run starts, which need no process group, do no GPU work and create no file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptscale.common.checkpoint.folders import check_sums, deepspeeds_folder, is_deepspeeds_own
from gptscale.common.checkpoint.reader import Reader, newest_readable
from gptscale.common.data.loader import Batches, split
from gptscale.common.data.sources import TokenSource, open_source
from gptscale.common.errors import CheckpointError, ConfigError
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.model.attention import check_attention
from gptscale.common.model.precision import check_precision, emulation
from gptscale.common.process.world import World
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.batch_plan import DEFAULT_GLOBAL_BATCH_SIZE, BatchPlan, nearest_multiples, plan_batch
from gptscale.common.settings.mesh import Mesh
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.common.settings.run import Run, workload
from gptscale.common.settings.run_config import FIXED, MODEL_AXES, RunConfig
from gptscale.launchers.run.options import default_recipe_config
from gptscale.recipes import get, names_with, unsupported
from gptscale.results.columns import SUMMARY
from gptscale.results.record.run_folder import check_results_folder, checkpoints_in, has_its_row, resume_folder


@dataclass(frozen=True)
class ReadyRun:
    """A run that may start, with everything resolved and its data open.

    resume: the checkpoint to continue from, or the folder whose newest valid checkpoint is meant; None to begin.
    """

    run: Run
    recipe_config: RecipeConfig
    train: TokenSource
    held_out: TokenSource
    fingerprint: str
    resume: Path | None

    @property
    def work(self) -> dict[str, Any]:
        """Return what two runs must share for their speed and loss to be comparable."""
        return workload(self.run, self.fingerprint) | self.recipe_config.own_work(self.run)

    @property
    def data(self) -> str:
        """Return the name of the data, which is a recipe's own or what --data says."""
        return str(self.recipe_config.own_work(self.run).get("data", self.run.config.data))

    def check_same_work(self, reader: Reader) -> None:
        """Raise CheckpointError for a checkpoint of another run, and ConfigError if all steps of this run are saved already."""
        check_same_model(reader, self)
        if reader.step >= self.run.config.steps:
            fix = f"use more than {reader.step} steps"
            raise ConfigError(f"step {reader.step} is saved already", "in --steps", fix)

    def batches(self, source: TokenSource, data_rank: int, data_size: int) -> Batches:
        """Return the global batches of `source`, or of the recipe's own data, as one data rank sees them."""
        run = self.run
        if "data" in self.recipe_config.own_work(run):
            return get(run.recipe).load().batches(run, self.recipe_config, data_rank, data_size)  # type: ignore[no-any-return]
        sizes = {"seq_len": run.seq_len, "global_batch_size": run.batch.global_batch_size, "seed": run.config.seed}
        return Batches(source, **sizes, data_rank=data_rank, data_size=data_size)

    def describe(self) -> list[str]:
        """Say what will run, in a few lines."""
        run, gpt = self.run, self.run.gpt
        gflop = model_flops_per_token(gpt, run.seq_len) / 1e9
        row = OPTIMIZERS[run.config.optimizer]
        moments = f"{run.config.optimizer_state} {row.title} state" if row.state_keys else "no optimizer state"
        shared = f" ({gpt.n_kv_head} of keys and values)" if gpt.n_kv_head < gpt.n_head else ""
        return [
            f"recipe   {run.recipe} on {run.world.world_size} x {run.world.device.type}, {run.config.precision}",
            f"model    {run.config.model}: {gpt.n_params:,} parameters, {gpt.n_layer} layers, {gpt.n_head} heads of "
            f"{gpt.head_dim}{shared}, hidden {gpt.n_embd}, vocabulary {gpt.vocab_size} (table {gpt.padded_vocab_size})",
            f"compute  {gflop:.4f} GFLOP per token, {gflop * run.tokens_per_step / 1e3:,.3f} TFLOP per step",
            f"batch    {run.batch.describe()}; {run.tokens_per_step:,} tokens per step",
            f"data     {self.data}: {len(self.train):,} tokens to train on, {len(self.held_out):,} held out",
            f"state    {run.state_bytes / 2**30:,.2f} GiB of fp32 weights and gradients and {moments} before any sharding",
            *emulation(run.config.precision, run.world.device),
            *self.recipe_config.describe(run),
        ]


def resolve(recipe: str, config: RunConfig, recipe_config: RecipeConfig, world: World) -> Run:
    """Return a run with its mesh and its batch arithmetic, or raise ConfigError if they do not work out."""
    mesh, axes = mesh_of(recipe, config, world.world_size), get(recipe).mesh
    sizes: dict[str, Any] = {f"{axis}_size": mesh.size(axis) for axis in MODEL_AXES}
    config = dataclasses.replace(config, **sizes)
    return Run(recipe, config, config.gpt(), _batch_plan(config, recipe_config, mesh), world, axes)


def check_without_device(run: Run, recipe_config: RecipeConfig) -> None:
    """Check what can be checked on a machine that has not the devices of the run."""
    config = run.config
    unsupported.check(run.recipe, config, recipe_config)
    if config.plan is not None:
        from gptscale.common.settings.plan_file import check_planned

        check_planned(run, recipe_config, config.plan, config.plan_row)
    check_results_folder(config.out, config.run_name, SUMMARY, resumes=config.resume is not None)


def preflight(recipe: str, config: RunConfig, recipe_config: RecipeConfig, world: World) -> ReadyRun:
    """Resolve a run and check it, so that errors which the user can prevent are found before anything starts."""
    run = resolve(recipe, config, recipe_config, world)
    config = run.config
    _check_rare_options(run)
    check_precision(config.precision, world.device)
    check_attention(config, world.device)
    check_without_device(run, recipe_config)
    get(recipe).check_imports()
    if lack := recipe_config.lacks():
        raise lack
    recipe_config.check(run)
    data = "synthetic" if "data" in recipe_config.own_work(run) else config.data
    source = open_source(data, tokenizer=config.tokenizer, vocab_size=run.gpt.vocab_size, seed=config.seed)
    train, held_out = split(source, seq_len=run.seq_len)
    resume = _resume_path(config, is_main=world.is_main)
    ready = ReadyRun(run, recipe_config, train, held_out, source.fingerprint, resume)
    # A recipe's own data may be less than a batch.
    ready.batches(train, 0, run.batch.dp_size)
    if ready.resume is not None and world.is_main:
        if (ready.resume / "manifest.json").exists():
            ready.check_same_work(Reader(ready.resume).verify())
        elif (newest := newest_readable(ready.resume)) is not None:
            # Its bytes are verified when it is loaded, and an older one may take its place, of the same run.
            check_same_model(newest, ready)
            folder = config.out / "runs" / str(config.run_name)
            if config.resume == "newest" and newest.step >= config.steps and has_its_row(folder, config.steps):
                # A damaged one is set aside later, and the one before it continues the run.
                with suppress(CheckpointError):
                    ready.check_same_work(newest.verify())
    return ready


def why_not_here(recipe: str, *, cuda: bool = True) -> str | None:
    """Return why a recipe cannot run on this machine (without `cuda`: on its CPUs), or None if it can."""
    row = get(recipe)
    try:
        lack = default_recipe_config(recipe).lacks()
        row.check_imports()
    except ConfigError as error:
        return str(error)
    if row.needs_cuda and not (cuda and torch.cuda.is_available()):
        return "needs a CUDA device"
    return str(lack) if lack else None


def mesh_of(recipe: str, config: RunConfig, world_size: int) -> Mesh:
    """Return the mesh of a run: what the user asked for, and what follows from it.

    An axis without a size gets 1, except a recipe's first axis, which gets all processes that remain, and dp, which is what
    remains then.
    """
    row = get(recipe)
    if not row.axes and world_size > 1:
        others = names_with(lambda other: other.engine == "torch" and other.axes == ("dp",))
        what = f"{recipe} is one process, not {world_size}"
        raise ConfigError(what, "in --nproc", f"use --nproc 1, or recipe {others}")
    asked = {axis: getattr(config, f"{axis}_size") for axis in MODEL_AXES}
    for axis, size in asked.items():
        if size is not None and size > 1 and axis not in row.axes:
            what = f"{recipe} has no {axis} axis, so {axis}_size {size} is meaningless"
            raise ConfigError(what, f"in --{axis}-size", "use 1")
    model_size = math.prod(size or 1 for size in asked.values())
    if world_size % model_size:
        what = f"world {world_size} is not divisible by {'*'.join(MODEL_AXES)}={model_size}"
        raise ConfigError(what, "in --nproc", f"use nproc {nearest_multiples(world_size, model_size)}")
    sizes = {axis: size or 1 for axis, size in asked.items()} | {"dp": world_size // model_size}
    if row.axes and asked.get(row.axes[0], 1) is None:
        sizes |= {row.axes[0]: sizes["dp"], "dp": 1}
    if sizes["dp"] > 1 and "dp" not in row.axes:
        others = names_with(lambda other: other.engine == "torch" and {"dp", *row.axes} <= {*other.axes})
        split = " x ".join(f"{axis} {sizes[axis]}" for axis in asked)
        what = f"{recipe} has no dp axis for {sizes['dp']} times {split}"
        raise ConfigError(what, "in --nproc", f"use --nproc {model_size}, or recipe {others}")
    return Mesh({axis: sizes[axis] for axis in row.mesh})


def _batch_plan(config: RunConfig, recipe_config: RecipeConfig, mesh: Mesh) -> BatchPlan:
    """Return the batch arithmetic, in which a pipeline gets several micro-batches unless the options give their number."""
    pp_size, dp_size = mesh.size("pp"), mesh.size("dp")
    global_batch_size, accumulation = config.global_batch_size, config.grad_accum_steps
    if accumulation is None and config.micro_batch_size is None:
        sequences = max(1, (global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE) // dp_size)
        if accumulation := recipe_config.grad_accum_steps(sequences, pp_size):
            global_batch_size = global_batch_size or sequences * dp_size
    return plan_batch(dp_size, global_batch_size, config.micro_batch_size, accumulation)


def _check_rare_options(run: Run) -> None:
    """Check the device, and options whose modules are imported only where a run has them."""
    if get(run.recipe).needs_cuda and run.world.device.type != "cuda":
        what = f"{run.recipe} needs a CUDA device"
        raise ConfigError(what, "on this machine", "`gptscale doctor` says which recipes run here")
    if run.config.wandb:
        from gptscale.results.record.wandb_board import check_wandb

        check_wandb()
    if run.config.compile or run.config.compile_mode != "default":
        from gptscale.common.model.compilation import check_compile

        check_compile(run)
    if run.config.precision == "fp8":
        from gptscale.common.model.float8 import check_shapes

        check_shapes(run)


def _resume_path(config: RunConfig, *, is_main: bool) -> Path | None:
    """Return where --resume points, which is a step-N folder or a folder of them, or None for a run that begins."""
    folder = resume_folder(config.out, config.run_name, config.resume)
    if folder is None:
        return None
    if not is_deepspeeds_own(folder):
        return checkpoints_in(folder, "--save-every N or --save-last")
    if not config.trust_checkpoint:
        what = f"{folder} is in DeepSpeed's own format: pickle, which can run any code when it is read"
        fix = "add --trust-checkpoint if it was made by you or by someone you trust with this account"
        raise CheckpointError(what, "in --resume", fix)
    folder = deepspeeds_folder(folder)
    if is_main:
        check_sums(folder)
    return folder


def check_same_model(reader: Reader, ready: ReadyRun) -> None:
    """Raise CheckpointError, with all that differs, unless the saved run had this model, optimizer, seed and data."""
    saved, current = reader.manifest["workload"], ready.work
    # An imported checkpoint says what it is, and nothing of a run.
    saved = current | saved if "imported_from" in saved else saved
    check_fixed(reader.path, saved, current, [*FIXED, "model"] if ready.run.config.is_own else FIXED)
    if saved.get("data_fingerprint") != current["data_fingerprint"] and not ready.run.config.allow_data_change:
        what = f"the data differs from the saved run's ({ready.run.config.data})"
        raise CheckpointError(what, f"in {reader.path}", "add --allow-data-change to accept")


def check_fixed(path: Path, saved: Mapping[str, Any], work: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise CheckpointError, with all that differs, unless the saved run has these parts of its work in common with this one."""
    if different := [f"{k} {saved.get(k)} there, {work[k]} here" for k in names if saved.get(k) != work[k]]:
        raise CheckpointError("the saved run differs: " + "; ".join(different), f"in {path}", "use its options")
