"""The options that every recipe shares, validated once.

A recipe adds only the options of its own strategy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import OptionNeed, check_name, check_ranges, check_run_name
from gptscale.common.settings.families import MODELS, own_shape, preset
from gptscale.common.settings.optimizers import OPTIMIZERS, OptimizerName

if TYPE_CHECKING:
    from gptscale.common.settings.shape import ModelConfig

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
OptimizerState = Literal["fp32", "bf16", "8bit"]

# The modes of torch.compile that record the kernels of a block once and replay them at fixed addresses.
CUDA_GRAPHS = ("max-autotune", "reduce-overhead")
# The axes of a mesh beside dp, and the options of their sizes.
MODEL_AXES = ("tp", "cp", "pp")
AXIS_SIZES = tuple(f"{axis}_size" for axis in MODEL_AXES)
# How a run computes its work, by the names of RunConfig's fields.
SPLIT = "micro_batch_size grad_accum_steps activation_checkpointing compile compile_mode attention".split()
SPLIT += AXIS_SIZES
# When a run looks at itself, where it begins, and what it leaves behind.
KEPT = (
    "eval_every eval_batches sample timing_warmup_steps log_every check_replicas save_every save_last save_async "
    "keep_checkpoints resume trust_checkpoint allow_data_change plan plan_row out run_name tensorboard verdict profile wandb"
).split()
# Any other option makes the work of two runs unequal. A tokenizer shows in the tokens, which have a fingerprint.
NOT_WORK = frozenset({*SPLIT, *KEPT, "device", "dist_timeout_s", "tokenizer"})
# The model's shape beside its preset, and the options that a continued run may not change.
SHAPE = "n_layer n_head n_embd vocab_size activation".split()
FIXED = [*SHAPE, "optimizer", "seed", "seq_len", "global_batch_size"]

# A shorter run has no verdict.
VERDICT_STEPS_MIN = 20
# Field: (lowest, highest). The highest values are far beyond any use and catch typing errors.
RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 10**9), "global_batch_size": (1, 10**7), "micro_batch_size": (1, 10**6), "grad_accum_steps": (1, 10**6),
    "seq_len": (1, 2**22), "seed": (0, 2**31 - 1), "warmup_steps": (0, 10**9), **dict.fromkeys(AXIS_SIZES, (1, 4096)),
    "eval_every": (0, 10**9), "eval_batches": (1, 10**6), "sample": (0, 100), "timing_warmup_steps": (0, 10**6),
    "log_every": (1, 10**6), "save_every": (0, 10**9), "check_replicas": (0, 10**9), "plan_row": (1, 10**6),
    "decay_from": (0, 10**9), "keep_checkpoints": (2, 10**6), "n_layer": (1, 10**4), "n_head": (1, 10**4),
    "n_embd": (1, 10**6), "vocab_size": (2, 2**31),
    "lr": (0.0, 100.0), "weight_decay": (0.0, 100.0), "beta1": (0.0, 1.0), "beta2": (0.0, 1.0),
    "muon_momentum": (0.0, 1.0), "min_lr_ratio": (0.0, 1.0), "clip_grad_norm": (0.0, 1e9), "dropout": (0.0, 0.999),
    "dist_timeout_s": (1.0, 86400.0),
}  # fmt: skip


def _optimizer_need(field: str) -> OptionNeed:
    """Return the need of an option that only some optimizers read."""
    readers = {name: row for name, row in OPTIMIZERS.items() if field in row.options.split(",")}
    why = next(iter(readers.values())).why
    return OptionNeed(field, lambda c: c.optimizer in readers, why, f"use --optimizer {next(iter(readers))}")


@dataclass(frozen=True)
class RunConfig:
    """The options that every recipe has: what a run trains, on which data, for how long, and what it leaves behind."""

    model: str = "tiny"
    """Preset: tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, 1.6b, gpt3-2.7b, gpt3-6.7b, gpt3-13b, gpt3-175b, llama-tiny,
    qwen3-tiny, smollm-135m, llama-1b, llama3-1b, llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b. Or one's own:
    hf:FOLDER_OR_CONFIG.json of transformers, FILE.py:NAME or package.module:NAME (docs/guides/models.md)."""
    n_layer: int | None = None
    """Overrides the preset's number of blocks."""
    n_head: int | None = None
    """Overrides the preset's number of attention heads."""
    n_embd: int | None = None
    """Overrides the preset's hidden size."""
    vocab_size: int | None = None
    """Overrides the preset's vocabulary; the table in memory is padded to a multiple of 128."""
    seq_len: int | None = None
    """Tokens per sequence; default the model's block_size, which it also sets when longer."""
    activation: str | None = None
    """Overrides the preset's: gelu_tanh | gelu_erf | gelu_sigmoid | custom-tanh | custom-erf | custom-sigmoid (our kernels)."""
    dropout: float = 0.0
    """Dropout of embeddings, attention and residual branches; 0 for comparisons."""

    data: str = "stdlib"
    """synthetic | stdlib | a .txt or .bin file | hf:NAME_OR_PATH[:SPLIT[:COLUMN]]."""
    tokenizer: str = "bytes"
    """bytes | gpt2 (needs the hub or its cache) | a folder with vocab.json and merges.txt; for stdlib, text and hf."""
    seed: int = 1234
    """Fixes weights, order of the data and dropout."""

    steps: int = 50
    """Optimizer steps in all, resumed ones included."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all devices; default 8, or what the next two make."""
    micro_batch_size: int | None = None
    """Sequences per forward on one device; default the global batch over data ranks."""
    grad_accum_steps: int | None = None
    """Micro-batches per optimizer step; default solved from the other two."""

    precision: Precision = "fp32"
    """fp32 | bf16 (autocast, fp32 weights and optimizer state) | fp16 (with a loss scaler, GPU only) | fp8 (bf16, and the
    blocks' matrix products in float8; GPUs from compute capability 8.9, on a CPU emulated)."""
    optimizer: OptimizerName = "adamw"
    """adamw | muon (blocks' matrices by their orthogonalised momentum) | sgd (no momentum), for parity of weights."""
    optimizer_state: OptimizerState = "fp32"
    """AdamW's moments: fp32 | bf16 | 8bit, 8, 4 or 2.03 bytes per parameter (docs/measurements/optimizer_state.md)."""
    lr: float | None = None
    """Peak learning rate; default the preset's."""
    lr_schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """Shape after warm-up: cosine | constant | wsd (constant, then a straight line down)."""
    decay_from: int | None = None
    """Step at which wsd begins to fall, such as that of a checkpoint. By default nine tenths of the steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up of the learning rate."""
    min_lr_ratio: float = 0.1
    """Where cosine and wsd end, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Of matrices; vectors (norms, biases) have none."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    muon_momentum: float = 0.95
    """Muon's decay of the mean gradient of a matrix, in Nesterov's form."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute in backward: nothing, whole blocks, or all but matrix products and attention."""
    compile: bool = False
    """torch.compile every block."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead"] = "default"
    """Of --compile: default | max-autotune-no-cudagraphs (tries many) | reduce-overhead (CUDA graphs) | max-autotune (both)."""
    attention: Literal["auto", "flash", "flash3", "cudnn", "efficient", "math"] = "auto"
    """Its kernel: auto (torch's choice) | flash | flash3 (not part of torch) | cudnn | efficient | math; on CPU auto or math."""
    tp_size: int | None = None
    """Tensor-parallel ranks; default 1, or all that there are where a recipe's first axis is tp."""
    cp_size: int | None = None
    """Ranks that share each sequence. Default 1, or all that there are where a recipe's first axis is cp."""
    pp_size: int | None = None
    """Pipeline ranks; default 1, or all that there are where a recipe's first axis is pp."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when it is there."""
    dist_timeout_s: float | None = None
    """Longest wait for another rank in seconds; default 120 on CPU, 600 on GPU."""

    eval_every: int = 0
    """Evaluate on held-out sequences every N steps; 0 never."""
    eval_batches: int = 4
    """Global batches per evaluation."""
    sample: int = 0
    """Print N continuations of held-out text after the last step, each the likeliest and one drawn by --seed. Rank 0 reads all
    weights of the last checkpoint into host memory for that."""
    timing_warmup_steps: int = 3
    """First steps left out of speed figures (compilation, caches); they are trained and logged like any other."""
    log_every: int = 1
    """Steps between synchronisations with the device; rows are written then, each step still has its own."""
    on_spike: Literal["warn", "skip", "stop"] = "warn"
    """When loss or gradient norm is 6 standard deviations above the last 128 steps: say it | leave the step out | end the run."""
    check_replicas: int | None = None
    """Compare the bits that ranks hold in common at each save (default), and also every N steps. 0 never compares."""
    save_every: int = 0
    """Save a checkpoint every N steps; 0 saves none unless --save-last."""
    save_last: bool = False
    """Save a checkpoint after the last step."""
    save_async: bool = False
    """Hold the steps only while the state is copied aside, and write it behind them. Takes the state once more in host memory."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept, at least 2."""
    resume: str | None = None
    """Newest checkpoint of --run-name that verifies. `auto` begins at step 0 if there is none. Or the path of a run or step-N."""
    trust_checkpoint: bool = False
    """With --resume, read a checkpoint in DeepSpeed's own format: pickle, which can run any code of whoever made it. Its files
    must be those that you listed in SHA256SUMS beside them."""
    allow_data_change: bool = False
    """Resume although the data differs from the saved run's."""
    plan: Path | None = None
    """A file of `gptscale plan --save`: its row fills in the split (`gptscale run`), and what it predicts is recorded."""
    plan_row: int | None = None
    """The number of the row in the table of --plan. Default: the recommended row."""
    out: Path = Path("results")
    """Folder for summary.csv and runs/."""
    run_name: str | None = None
    """Name of the folder under runs/; default recipe and time."""
    tensorboard: bool = True
    """Write TensorBoard events beside the CSV."""
    verdict: bool = True
    """Trace a few further steps after the last one, and say what limits the speed. Shorter runs than 20 steps have no verdict."""
    profile: bool = False
    """Keep the operations of one more step on every rank in runs/NAME/trace.json, for ui.perfetto.dev."""
    wandb: bool = False
    """The same scalars for Weights & Biases, in runs/NAME/wandb; WANDB_MODE=offline keeps them on this machine."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("tokenizer", lambda c: _is_text(c.data), "{data} is tokens already", "use --data stdlib"),
        OptionNeed("min_lr_ratio", lambda c: c.lr_schedule != "constant", "a constant rate is flat", "use --lr-schedule cosine"),
        OptionNeed("decay_from", lambda c: c.lr_schedule == "wsd", "{lr_schedule} has no such step", "use --lr-schedule wsd"),
        *map(_optimizer_need, sorted({name for row in OPTIMIZERS.values() for name in row.options.split(",") if name})),
        OptionNeed("eval_batches", lambda c: c.eval_every, "the run does not evaluate", "add --eval-every 10"),
        OptionNeed("sample", lambda c: c.save_last, "the weights are those of the last checkpoint", "add --save-last"),
        OptionNeed("sample", lambda c: _is_text(c.data), "{data} is tokens without text", "use --data stdlib"),
        OptionNeed("keep_checkpoints", lambda c: c.save_every or c.save_last, "the run saves no checkpoint", "add --save-last"),
        OptionNeed("profile", lambda c: c.verdict and c.steps >= VERDICT_STEPS_MIN,
            f"only a run of {VERDICT_STEPS_MIN} steps with a verdict is traced",
            f"use --steps {VERDICT_STEPS_MIN} or more, without --no-verdict"),
        OptionNeed("plan_row", lambda c: c.plan, "there is no plan whose row it could be", "add --plan FILE"),
        OptionNeed("save_async", lambda c: c.save_every, "the last save has no steps behind it", "add --save-every N"),
        OptionNeed("trust_checkpoint,allow_data_change", lambda c: c.resume, "the run resumes nothing", "add --resume PATH"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        if ":" not in self.model:
            check_name(self.model, MODELS, "model", "in --model")
        check_run_name(self.run_name, self.resume)
        if self.optimizer_state not in OPTIMIZERS[self.optimizer].state_bytes:
            others = [name for name, row in OPTIMIZERS.items() if self.optimizer_state in row.state_bytes]
            fix = f"leave it out, or use --optimizer {' or '.join(others)}"
            raise ConfigError(f"{self.optimizer} has no state in {self.optimizer_state}", "in --optimizer-state", fix)
        # This checks heads and sizes.
        self.gpt()

    def gpt(self) -> ModelConfig:
        """Return the model's shape: the preset with this run's overrides."""
        if self.is_own:
            return own_shape(self)
        shape = preset(self.model)
        changes = {name: value for name in SHAPE if (value := getattr(self, name)) is not None}
        block_size = max(shape.block_size, self.seq_len or 0)
        return dataclasses.replace(shape, dropout=self.dropout, block_size=block_size, **changes)

    @property
    def peak_lr(self) -> float:
        return self.gpt().lr if self.lr is None else self.lr

    @property
    def is_own(self) -> bool:
        """Return whether the model is none of the presets."""
        return self.model not in MODELS

    @property
    def data_imports(self) -> list[str]:
        """Return the modules that a command imports to read the data before it forks ranks. There may be none."""
        return ["gptscale.common.data.library"] if (self.data, self.tokenizer) == ("stdlib", "bytes") else []


def _is_text(data: str) -> bool:
    """Return whether a tokenizer encodes what `--data` names."""
    return data != "synthetic" and not data.endswith(".bin")
