"""Everything that can be found wrong before a run starts: no process group, no GPU work, no file created."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from gptscale.common.checkpoint.reader import Reader, is_deepspeeds_own
from gptscale.common.data.loader import Batches, split
from gptscale.common.data.sources import TokenSource, open_source
from gptscale.common.errors import CheckpointError, ConfigError
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.model.attention import check_attention
from gptscale.common.model.compilation import check_compile
from gptscale.common.model.float8 import check_shapes, emulation
from gptscale.common.model.precision import check_precision
from gptscale.common.process.world import World
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.batch_plan import DEFAULT_GLOBAL_BATCH_SIZE, BatchPlan, plan_batch
from gptscale.common.settings.run import Run, workload
from gptscale.common.settings.run_config import MOMENT_BYTES, RunConfig
from gptscale.recipes import Recipe, get, unsupported
from gptscale.results.record.columns import SUMMARY_COLUMNS
from gptscale.results.record.files import csv_line
from gptscale.results.record.folders import check_results_folder, checkpoints_in, resume_folder
from gptscale.results.record.wandb_board import check_wandb


@dataclass(frozen=True)
class Plan:
    """A run that may start: resolved, and its data open.

    resume: the checkpoint folder to continue from, or the run folder whose newest valid one is meant; None to begin.
    """

    run: Run
    recipe_config: RecipeConfig
    train: TokenSource
    held_out: TokenSource
    fingerprint: str
    resume: Path | None

    def batches(self, source: TokenSource, data_rank: int, data_size: int) -> Batches:
        """The global batches of `source`, as one data rank sees them."""
        run = self.run
        return Batches(
            source,
            seq_len=run.seq_len,
            global_batch_size=run.batch.global_batch_size,
            seed=run.config.seed,
            data_rank=data_rank,
            data_size=data_size,
        )

    def describe(self) -> list[str]:
        """What will run, a line each."""
        run, gpt = self.run, self.run.gpt
        gflop = model_flops_per_token(gpt, run.seq_len) / 1e9
        return [
            f"recipe   {run.recipe} on {run.world.world_size} x {run.world.device.type}, {run.config.precision}",
            f"model    {run.config.model}: {gpt.n_params:,} parameters, {gpt.n_layer} layers, {gpt.n_head} heads of "
            f"{gpt.head_dim}, hidden {gpt.n_embd}, vocabulary {gpt.vocab_size} (table {gpt.padded_vocab_size})",
            f"compute  {gflop:.4f} GFLOP per token, {gflop * run.tokens_per_step / 1e3:,.3f} TFLOP per step",
            f"batch    {run.batch.describe()}; {run.tokens_per_step:,} tokens per step",
            f"data     {run.config.data}: {len(self.train):,} tokens to train on, {len(self.held_out):,} held out",
            f"state    {_state_bytes(run) / 2**30:,.2f} GiB of fp32 weights and gradients and {run.config.optimizer_state} AdamW "
            "state before any sharding",
            *emulation(run),
            *self.recipe_config.describe(run),
        ]


def _state_bytes(run: Run) -> float:
    """Weights and gradients, 4 bytes each, and what a parameter's two moments take."""
    return (8 + MOMENT_BYTES[run.config.optimizer_state]) * run.gpt.n_params


def preflight(recipe: str, config: RunConfig, recipe_config: RecipeConfig, world: World) -> Plan:
    """Check a run and resolve it; every GptscaleError is found here or is not the user's to prevent."""
    row = get(recipe)
    config = _with_axes(recipe, row, config, world)
    if row.needs_cuda and world.device.type != "cuda":
        raise ConfigError(
            f"{recipe} needs a CUDA device", "on this machine", "run `gptscale list` for recipes that do not"
        )
    run = Run(recipe, config, config.gpt(), _batch_plan(config, recipe_config, world), world)
    for check in (check_precision, check_attention, check_compile):
        check(run)
    if config.wandb:
        check_wandb()
    unsupported.check(recipe, config, recipe_config)
    row.check_imports()
    if lacking := recipe_config.lacks():
        raise lacking
    check_shapes(run)
    check_results_folder(
        config.out, config.run_name, "summary.csv", csv_line(SUMMARY_COLUMNS), resumes=config.resume is not None
    )
    recipe_config.check(run)
    source = open_source(config.data, tokenizer=config.tokenizer, vocab_size=run.gpt.vocab_size, seed=config.seed)
    train, held_out = split(source, seq_len=run.seq_len)
    plan = Plan(run, recipe_config, train, held_out, source.fingerprint, _resume_path(config))
    plan.batches(train, 0, run.batch.dp_size)  # its own checks: long enough for one sequence, batch divisible
    if plan.resume is not None and world.is_main and (plan.resume / "manifest.json").exists():
        check_same_work(Reader(plan.resume).verify(), plan)
    return plan


def why_not_here(recipe: str, *, cuda: bool = True) -> str | None:
    """Why a recipe cannot run on this machine (without `cuda`: on its CPUs), or None if it can."""
    row = get(recipe)
    try:
        lacking = getattr(row.load(), row.config)(**row.preset).lacks()
        row.check_imports()
    except ConfigError as error:
        return str(error)
    if row.needs_cuda and not (cuda and torch.cuda.is_available()):
        return "needs a CUDA device"
    return str(lacking) if lacking else None


def _with_axes(recipe: str, row: Recipe, config: RunConfig, world: World) -> RunConfig:
    """The run's options with tp_size and pp_size resolved: as said, else 1, else (a recipe's first axis) what is left."""
    world_size = world.world_size
    if not row.axes and world_size > 1:
        raise ConfigError(
            f"{recipe} is one process, not {world_size}", "in --nproc", "use --nproc 1, or recipe ddp or fsdp"
        )
    sizes = {"tp": config.tp_size, "pp": config.pp_size}
    for axis, size in sizes.items():
        if size is not None and size > 1 and axis not in row.axes:
            raise ConfigError(
                f"{recipe} has no {axis} axis, so {axis}_size {size} is meaningless", f"in --{axis}-size", "use 1"
            )
    said = math.prod(size or 1 for size in sizes.values())
    if world_size % said:
        below, above = world_size // said * said, -(-world_size // said) * said
        fits = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(f"world {world_size} is not divisible by tp*pp={said}", "in --nproc", f"use nproc {fits}")
    if row.axes and sizes.get(row.axes[0], 1) is None:
        sizes[row.axes[0]], said = world_size // said, world_size
    if world_size > said and "dp" not in row.axes:
        raise ConfigError(
            f"{recipe} has no dp axis for {world_size // said} times {' x '.join(f'{a} {s or 1}' for a, s in sizes.items())}",
            "in --nproc",
            f"use --nproc {said}, or recipe hybrid_3d",
        )
    return dataclasses.replace(config, tp_size=sizes["tp"] or 1, pp_size=sizes["pp"] or 1)


def _batch_plan(config: RunConfig, recipe_config: RecipeConfig, world: World) -> BatchPlan:
    """The batch arithmetic; a pipeline wants micro-batches where nothing is said of them."""
    pp_size = config.pp_size or 1
    dp_size = world.world_size // ((config.tp_size or 1) * pp_size)
    global_batch_size, accumulation = config.global_batch_size, config.grad_accum_steps
    if accumulation is None and config.micro_batch_size is None:
        sequences = max(1, (global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE) // dp_size)
        if accumulation := recipe_config.grad_accum_steps(sequences, pp_size):
            global_batch_size = global_batch_size or sequences * dp_size
    return plan_batch(
        dp_size,
        global_batch_size=global_batch_size,
        micro_batch_size=config.micro_batch_size,
        grad_accum_steps=accumulation,
    )


def _resume_path(config: RunConfig) -> Path | None:
    """Return where --resume points, which is a step-N folder or a folder of them, or None without it."""
    if config.resume is None:
        return None
    folder = resume_folder(config.out, config.run_name, config.resume)
    if not is_deepspeeds_own(folder):
        return checkpoints_in(folder, "--save-every N or --save-last")
    if not config.trust_checkpoint:
        raise CheckpointError(
            f"{folder} is in DeepSpeed's own format: pickle, which can run any code when it is read",
            "in --resume",
            "add --trust-checkpoint if it was made by you or by someone you trust with this account",
        )
    return folder


def check_same_work(reader: Reader, plan: Plan) -> None:
    """CheckpointError unless the saved run had this model, optimizer, seed and data; steps and rates may change."""
    saved, ours = reader.manifest["workload"], workload(plan.run, plan.fingerprint)
    fixed = [
        "n_layer",
        "n_head",
        "n_embd",
        "vocab_size",
        "activation",
        "optimizer",
        "seed",
        "seq_len",
        "global_batch_size",
    ]
    if different := [f"{k} {saved.get(k)} there, {ours[k]} here" for k in fixed if saved.get(k) != ours[k]]:
        raise CheckpointError("the saved run differs: " + "; ".join(different), f"in {reader.path}", "use its options")
    if saved.get("data_fingerprint") != plan.fingerprint and not plan.run.config.allow_data_change:
        raise CheckpointError(
            f"the data differs from the saved run's ({plan.run.config.data})",
            f"in {reader.path}",
            "add --allow-data-change to accept",
        )
    if reader.step >= plan.run.config.steps:
        raise ConfigError(f"step {reader.step} is saved already", "in --steps", f"use more than {reader.step} steps")
