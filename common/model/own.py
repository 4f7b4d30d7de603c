"""Models of one's own: transformers' causal models by their config, and modules that a function of the user's returns.

A module is built with its matrices on the meta device. Vectors and buffers are small, and have the values that its own code gives
them. What cannot be trained right is refused by its name, before anything is created.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gptscale.common.errors import ConfigError
from gptscale.common.model.build import aliases
from gptscale.common.model.hf_weights import safetensors_in
from gptscale.common.model.loss import IGNORE
from gptscale.common.settings.checks import refuse_changed
from gptscale.common.settings.families import HF
from gptscale.common.settings.own_config import OwnConfig
from gptscale.common.settings.run_config import SHAPE, RunConfig
from gptscale.common.settings.shape import Weight
from gptscale.common.settings.user_code import read_hf_config, user_function

# Bytes of a file of weights that tell it from another.
HASHED = 2**20
# Tokens of a sequence without --seq-len, unless the model has fewer positions.
SEQ_LEN = 1024
# Names of weights begin so here, since the user's module is `own`.
PREFIX = "own."


def refused(source: str, why: str, fix: str) -> ConfigError:
    """Return the error for a model that cannot be trained."""
    return ConfigError(f"{source} {why}".replace("\n", " ")[:300], "in --model", fix)


def config_of_transformers(source: str, dropout: float) -> Any:
    """Return transformers' config of a config.json or its folder. All its dropouts are the run's, as in the presets."""
    import transformers

    def refuse(why: str) -> ConfigError:
        return refused(source, f"is no config of transformers: {why}", "name a config.json or its folder")

    found = read_hf_config(source.removeprefix(HF), refuse)
    if "vocab_size" not in found:
        raise refuse("it has no vocab_size")
    config: Any = transformers.CONFIG_MAPPING[found["model_type"]].from_dict(found)
    for name, value in config.to_dict().items():
        if "drop" in name and type(value) in (int, float):
            setattr(config, name, dropout)
    return config


def build(source: str, dropout: float, *, with_values: bool) -> nn.Module:
    """Return the user's module, or transformers'. with_values: whether transformers fills its weights."""
    if not source.startswith(HF):
        module: Any = user_function(source, "--model")[0]()
        if not isinstance(module, nn.Module):
            raise refused(source, f"returns {type(module).__name__}", "let it return a torch.nn.Module")
        return module
    import transformers
    from transformers.initialization import no_init_weights

    make: Any = transformers.AutoModelForCausalLM.from_config
    with nullcontext() if with_values else no_init_weights():
        module = make(config_of_transformers(source, dropout), dtype=torch.float32, trust_remote_code=False)
    # transformers ties weights only where it fills them.
    module.tie_weights()
    return module  # type: ignore[no-any-return]


@contextmanager
def weights_on_meta(wanted: Callable[[nn.Parameter], bool]) -> Iterator[None]:
    """Give the wanted weights their shapes, but no memory. All else is as its module makes it, on the CPU."""
    register, made = nn.Module.register_parameter, dict[int, nn.Parameter]()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type not in ("cpu", "meta"):
            raise ValueError(f"it makes {name} on {parameter.device}")
        # A weight that is registered again is tied, and keeps its place.
        if parameter is not None and id(parameter) not in made and wanted(parameter):
            attributes = dict(parameter.__dict__)
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            parameter.__dict__.update(attributes)
            made[id(parameter)] = parameter
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Means(TorchFunctionMode):
    """Keep each tensor that a function of torch returns as a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, options, name = function(*args, **(kwargs or {})), kwargs or {}, getattr(function, "__name__", "")
        if name == "mean" or (name in ("cross_entropy", "nll_loss") and options.get("reduction", "mean") == "mean"):
            self.found.append(result)
        return result


def loss_of_logits(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of a model of transformers."""
    rows = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
    return functional.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE, reduction="sum")


def loss_of_module(source: str, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss that a user's module returns. Raises ConfigError for anything else."""
    loss = model(inputs, targets)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        fix = "let its forward(inputs, targets) return the summed loss, a scalar"
        raise refused(source, f"returns no loss but {what}", fix)
    return loss


class OwnModel(nn.Module):
    """A model of one's own behind forward(inputs, targets), which returns the summed loss.

    Built under `torch.device("meta")` it has values for vectors and buffers alone. `blocks` are what strategies gather, compile
    and recompute one by one, `block` is their class, and names of their weights begin with `prefixes`: those of the list of equal
    modules with the most weights.
    """

    blocks: list[nn.Module]

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.config, self.source, on_meta = config, config.source, torch.get_default_device().type == "meta"
        with weights_on_meta(lambda p: p.dim() > 1) if on_meta else nullcontext():
            self.own = build(config.source, config.dropout, with_values=on_meta)
        self.loss_of = loss_of_logits if self.source.startswith(HF) else partial(loss_of_module, self.source)
        lists = [(n, [*m.children()]) for n, m in self.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        # Modules without parts, such as products side by side, are no blocks.
        equal = [(n, b) for n, b in lists if len(b) > 1 and len({*map(type, b)}) == 1 and [*b[0].children()]]
        if not equal:
            why = "has no list of equal modules, which strategies gather one after the other"
            raise refused(self.source, why, "keep its layers in a nn.ModuleList")
        name, blocks = max(equal, key=lambda pair: sum(p.numel() for b in pair[1] for p in b.parameters()))
        # They are parts of `own` already.
        self.__dict__["blocks"], self.block = blocks, type(blocks[0])
        self.prefixes = tuple(f"{name}.{i}." for i in range(len(blocks)))
        parameters = self.named_parameters()
        self.rows = {name: Weight(name, tuple(p.shape), name.removeprefix(PREFIX)) for name, p in parameters}
        self.files: dict[str, Path] = {}

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss over the targets that count, (). inputs, targets: token ids, (batch, seq)."""
        return self.loss_of(self.own, inputs, targets)

    def given(self, name: str) -> Any:
        """Return a vector's values, or a weight in a file, to be read by rows. None: no file has this matrix."""
        if name in self.files:
            return opened(self.files[name]).get_slice(name.removeprefix(PREFIX))
        value = self.get_parameter(name)
        return None if value.is_meta else value.detach()

    def check(self) -> None:
        """Raise ConfigError for weights that strategies cannot hold, cut or train alike, by name."""
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            is_weight = isinstance(value, nn.Parameter)
            why = {
                "on the meta device, without values": value.is_meta and not (is_weight and value.dim() > 1),
                f"in {value.dtype}, where weights are fp32": is_weight and value.dtype != torch.float32,
                "without a gradient (requires_grad is False)": is_weight and not value.requires_grad,
                "without a dimension that could be cut": is_weight and not value.dim(),
            }
            for reason in (reason for reason, is_so in why.items() if is_so):
                raise refused(self.source, f"has {name.removeprefix(PREFIX)} {reason}", "change that")
        for name, first in aliases(self):
            owners = {next((p for p in self.prefixes if n.startswith(p)), "") for n in (name, first)}
            if len(owners) > 1 and len({*map(id, self.blocks)}) == len(self.blocks):
                raise refused(self.source, f"ties {name} to {first}, of another block", "untie them")


def shape_of(run: RunConfig) -> OwnConfig:
    """Return the shape of the model of a run. Raises ConfigError for what cannot be trained, and for options of presets alone."""
    of_presets = [*SHAPE, "attention", "sample", *([] if run.model.startswith(HF) else ["dropout"])]
    refuse_changed(run, of_presets, f"{run.model[:80]} is trained as it is", "leave it out, or use a preset")
    if run.precision == "fp8" or run.optimizer == "muon":
        what = "fp8 and muon work with presets only"
        raise ConfigError(what, "in --precision and --optimizer", "use bf16 and adamw")
    return _shape_of(run.model, run.dropout, run.seed, run.seq_len)


@cache
def _shape_of(source: str, dropout: float, seed: int, seq_len: int | None) -> OwnConfig:
    model = look(source, dropout, seed)
    theirs = model.own.config if source.startswith(HF) else None
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise refused(source, "has no nn.Embedding, whose rows would be its vocabulary", "use one for its tokens")
    longest = getattr(theirs, "max_position_embeddings", None) or 2**22
    if (seq_len or 0) > longest:
        raise refused(source, f"has positions for {longest} tokens, not {seq_len}", f"use --seq-len {longest}")
    try_step(model, seq_len or min(longest, SEQ_LEN))
    uses = [(m, p) for m in model.modules() for p in m.parameters(recurse=False)]
    multiplied = {p for m, p in uses if p.dim() > 1 and not isinstance(m, nn.Embedding)}
    # A token passes some of the experts, which lie in one weight.
    used = getattr(theirs, "num_experts_per_tok", None)
    sizes = [p.numel() for p in model.parameters()]
    return OwnConfig(
        n_layer=len(model.blocks),
        n_head=getattr(theirs, "num_attention_heads", 1),
        n_embd=getattr(theirs, "hidden_size", tables[0].embedding_dim),
        block_size=min(longest, SEQ_LEN),
        vocab_size=getattr(theirs, "vocab_size", tables[0].num_embeddings),
        dropout=dropout if theirs else max((m.p for m in model.modules() if isinstance(m, nn.Dropout)), default=0.0),
        source=source,
        seed=seed,
        identity=identity_of(model, theirs),
        is_tied=any(table.weight in multiplied for table in tables),
        n_params_in_memory=sum(sizes),
        n_matmul_params=sum(p[0].numel() * (used or len(p)) if p.dim() > 2 else p.numel() for p in multiplied),
        largest_weight=max(sizes),
    )


@cache
def look(source: str, dropout: float, seed: int) -> OwnModel:
    """Build a model without its matrices, and check it and the files of its weights, if there are any."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            torch.manual_seed(seed)
            model = OwnModel(OwnConfig(1, 1, 1, 1, 1, dropout, source=source, seed=seed))
        folder = Path(source.removeprefix(HF))
        files = safetensors_in(folder) if source.startswith(HF) and any(folder.glob("*.safetensors*")) else {}
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        why = f"cannot be built ({type(error).__name__}: {error})"
        raise refused(source, why, "let it be built on a CPU") from None
    model.check()
    if not files:
        if pickles := [*folder.glob("pytorch_model*.bin")] if folder.is_dir() else []:
            raise refused(source, f"has weights in {pickles[0].name}, a pickle", "save it as safetensors")
        return model
    known, tied = model.own.state_dict(), {name.removeprefix(PREFIX) for name, _ in aliases(model)}
    fix = "name a folder that transformers saved whole"
    for name in sorted(files.keys() | known.keys() - tied):
        if name not in files or name not in known:
            where = "its files lack" if name in known else "its config has no place for"
            raise refused(source, f"has a weight that {where}: {name}", fix)
        shape, here = opened(files[name]).get_slice(name).get_shape(), list(known[name].shape)
        if shape != here:
            raise refused(source, f"has {name} of shape {shape} in its files, and {here} by its config", fix)
    for name, buffer in model.own.named_buffers():
        if name in files:
            buffer.copy_(opened(files[name]).get_tensor(name))
    model.files = {f"{PREFIX}{name}": file for name, file in files.items()}
    return model


def try_step(looked: OwnModel, seq_len: int) -> None:
    """Compute a loss and its gradients without memory. Raises ConfigError if there is none, or a weight has no part in it.

    A model that looks at values, as a router of experts does, cannot be tried so. Its first step tells.
    """
    model, source = copy.deepcopy(looked).to("meta"), looked.source
    ids = torch.zeros(2, seq_len, dtype=torch.int64, device="meta")
    try:
        with Means() as means:
            loss = model(ids, ids)
        if any(loss is mean for mean in means.found):
            raise refused(source, "returns a mean", "let it return the sum over the targets (reduction='sum')")
        loss.backward()
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
            return
        fix = "let it take token ids (batch, seq) and targets on a CPU"
        raise refused(source, f"fails at a step ({type(error).__name__}: {error})", fix) from None
    if idle := [name.removeprefix(PREFIX) for name, p in model.named_parameters() if p.grad is None]:
        raise refused(source, f"does not use {', '.join(idle[:4])}, which would get no gradient", "remove them")


@cache
def opened(file: Path) -> Any:
    """Return an open file of safetensors, whose tensors are read as they are asked for."""
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def identity_of(model: OwnModel, theirs: Any) -> str:
    """Return a hash of a model's config or code, and of the size and the first MiB of each file of its weights."""
    if theirs:
        name, code = "", theirs.to_json_string(use_diff=False)
    else:
        _, where, name = user_function(model.source, "--model")
        code = Path(sys.modules[where].__file__ or "").read_text()
    digest = hashlib.sha256(f"{name} {code}".encode())
    for file in sorted({*model.files.values()}):
        with file.open("rb") as content:
            digest.update(f"{file.name} {file.stat().st_size}".encode() + content.read(HASHED))
    return f"own {digest.hexdigest()[:16]}"
