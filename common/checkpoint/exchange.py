"""Checkpoints for other programs and from them: folders of transformers, and of torch.distributed.checkpoint (DCP).

Weights and AdamW's moments have the names and the layout of transformers there. Each tensor is read when it is written, so that
the whole state is never in memory.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptscale.common.checkpoint.folders import check_free, temporary_name
from gptscale.common.checkpoint.manifest import reading
from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import Draft, groups, write
from gptscale.common.errors import ConfigError
from gptscale.common.model.hf_weights import INDEX, safetensors_in
from gptscale.common.settings.families import FAMILIES, MODELS, in_transformers
from gptscale.common.settings.run_config import SHAPE, RunConfig
from gptscale.common.settings.shape import ModelConfig, Weight
from gptscale.common.state import Shard, shard_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def shape_of(reader: Reader) -> ModelConfig:
    """Return the shape of the model of a checkpoint. Raises ConfigError if that is none of a family."""
    work = reader.manifest["workload"]
    if work.get("model") not in MODELS:
        what = "its model is no preset of gptscale run"
        raise ConfigError(what, f"in {reader.path}", "name a run of a language model")
    # A run with longer sequences than its preset has more positions.
    return RunConfig(**{name: work[name] for name in ("model", *SHAPE)}, seq_len=work.get("seq_len")).gpt()


def to_transformers(reader: Reader, folder: Path) -> None:
    """Write a folder that `from_pretrained` of transformers reads. It holds no optimizer state."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    shape = shape_of(reader)
    theirs = in_transformers(shape.family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs.hf_config(shape, shape.vocab_size))
    model.config.architectures = [type(model).__name__]
    # With this mark, which transformers 4 leaves there, `from_pretrained` would take eager attention and round otherwise.
    vars(model.config).pop("_attn_implementation_autoset", None)
    model.config.save_pretrained(folder)
    files: dict[str, str] = {}
    named = ((hf, row, reader.read(f"model/{name}")) for row, name, hf in shape.parameters())
    weights = (shard_of(hf_name, _theirs(value, weight, shape, theirs)) for hf_name, weight, value in named)
    for number, group in enumerate(groups(weights), 1):
        file = f"model-{number:05d}.safetensors"
        save_file({shard.name: shard.tensor for shard in group}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys((shard.name for shard in group), file)
    total = 4 * sum(p.numel() for p in model.parameters())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1))


def to_dcp(reader: Reader, folder: Path) -> None:
    """Write a folder of DCP: model.NAME, optimizer.state.NAME.exp_avg, .exp_avg_sq and .step, and step.

    Raises ConfigError if the moments are not AdamW's in fp32.
    """
    import torch.distributed.checkpoint as dcp

    shape, work = shape_of(reader), reader.manifest["workload"]
    if (work.get("optimizer"), work.get("optimizer_state", "fp32")) != ("adamw", "fp32"):
        what = f"its optimizer state is {work.get('optimizer')}'s in {work.get('optimizer_state')}"
        raise ConfigError(what, f"in {reader.path}", "export weights alone, with --format hf")
    theirs, step = in_transformers(shape.family), torch.tensor(float(reader.manifest["counters"]["optimizer_steps"]))
    known: dict[str, Tensor] = {"step": torch.tensor(reader.step)}
    lazy: dict[str, tuple[str, Weight]] = {}
    for weight, name, hf_name in shape.parameters():
        lazy[f"model.{hf_name}"] = f"model/{name}", weight
        lazy |= {f"optimizer.state.{hf_name}.{kind}": (f"adamw.{kind}/{name}", weight) for kind in MOMENTS}
        known[f"optimizer.state.{hf_name}.step"] = step

    class Lazily(dcp.DefaultSavePlanner):
        """It reads a tensor when it is written."""

        def lookup_object(self, index: Any) -> Tensor:
            if index.fqn in known:
                return known[index.fqn]
            name, weight = lazy[index.fqn]
            return _theirs(reader.read(name), weight, shape, theirs)

    planned = known | {
        key: _theirs(torch.empty(reader.shapes[name], device="meta"), weight, shape, theirs)
        for key, (name, weight) in lazy.items()
    }
    with _alone():
        # torch keeps all tensors of a file until it is whole.
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(planned, storage_writer=writer, planner=Lazily(flatten_state_dict=False))


def from_transformers(folder: Path, target: Path) -> Path:
    """Write a checkpoint of step 0 from a folder of transformers, with moments of zero, and return its path."""
    from safetensors import safe_open

    shape, name = _known_shape(folder)
    with reading(folder):
        where = safetensors_in(folder)

    def read(kind: str, hf_name: str) -> Tensor | None:
        if kind != "model":
            return None
        # The names of a base model have no prefix.
        key = next((key for key in (hf_name, hf_name.partition(".")[2]) if key in where), None)
        if key is None:
            raise ConfigError(f"{folder} has no weight {hf_name}", "in gptscale checkpoint", "name a whole model")
        with reading(folder), safe_open(where[key], framework="pt") as opened:
            found: Tensor = opened.get_tensor(key)
        return found

    return _write(target, 0, shape, name, read, f"transformers {folder.name}")


def from_dcp(folder: Path, config: Path, target: Path) -> Path:
    """Write a checkpoint from a folder of DCP with the names of `to_dcp`, and return its path.

    config: the folder with transformers' config.json. DCP's metadata is a pickle: whoever wrote it can run code here.
    """
    import torch.distributed.checkpoint as dcp

    shape, name = _known_shape(config)
    with reading(folder):
        known: Mapping[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata

    def tensor(key: str) -> Tensor:
        if not hasattr(known.get(key), "size"):
            what = f"{folder} has no tensor {key}"
            raise ConfigError(what, "in gptscale checkpoint", f"it has {min(known, default='none')}")
        state = {key: torch.empty(known[key].size, dtype=known[key].properties.dtype)}
        with _alone(), reading(folder):
            dcp.load(state, checkpoint_id=folder)
        return state[key]

    def read(kind: str, hf_name: str) -> Tensor | None:
        return tensor(f"model.{hf_name}" if kind == "model" else f"optimizer.state.{hf_name}.{kind}")

    return _write(target, int(tensor("step")), shape, name, read, f"DCP {folder.name}")


@contextmanager
def _alone() -> Iterator[None]:
    """Keep torch from warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _known_shape(folder: Path) -> tuple[ModelConfig, str]:
    """Return the shape of a model of transformers, and its preset. Raises ConfigError if there is none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        family = next((name for name, row in FAMILIES.items() if config.model_type in row.hf_types.split()), "")
        if not family:
            raise ValueError(f"no family has models of type {config.model_type}")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shape: ModelConfig = in_transformers(family).config_of(model)
    except Exception as error:
        what = f"it is no model of transformers that this package has ({error})".splitlines()[0][:300]
        raise ConfigError(what, f"in {folder}", "name a folder with config.json") from None
    for name in (name for name, its in MODELS.items() if its == family):
        try:
            known = RunConfig(model=name, **{field: getattr(shape, field) for field in SHAPE}).gpt()
        except ConfigError:
            # Its other sizes do not go with these.
            continue
        if replace(known, lr=shape.lr, dropout=shape.dropout, block_size=shape.block_size) == shape:
            return replace(known, block_size=max(known.block_size, shape.block_size)), name
    raise ConfigError("no preset has its shape", f"in {folder}", "add a row to the presets of its family")


def _write(target: Path, step: int, shape: ModelConfig, name: str, read: Any, origin: str) -> Path:
    def shards() -> Iterator[Shard]:
        for kind in ("model", *MOMENTS):
            for weight, own, hf_name in shape.parameters():
                full = torch.zeros(weight.shape)
                if (value := read(kind, hf_name)) is not None:
                    value = in_transformers(shape.family).from_hf(value, weight, shape)
                    if value.shape[1:] != full.shape[1:] or len(value) > len(full):
                        what = f"{hf_name} has the shape {list(value.shape)}, expected {list(full.shape)}"
                        raise ConfigError(what, "in gptscale checkpoint", "name the model's own weights")
                    full[: len(value)] = value
                own_name = f"model/{own}" if kind == "model" else f"adamw.{kind}/{own}"
                yield shard_of(own_name, full)

    check_free(target.parent, saves=1, keep=10**9, checkpoint_bytes=12 * shape.n_params, log_bytes=0)
    draft = Draft(target / f"step-{step}", target / temporary_name(f"step-{step}"), {}, 12 * shape.n_params, {})
    work = {"model": name, "optimizer": "adamw", "imported_from": origin, **{key: getattr(shape, key) for key in SHAPE}}
    counters = {"optimizer_steps": float(step), "loss_scale": 1.0, "loss_scale_good_steps": 0.0}
    facts = {"step": step, "counters": counters, "recipe": "import", "world_size": 1, "workload": work}
    return write(draft, shards(), facts, keep=10**9, gather=lambda value: [value])


def _theirs(value: Tensor, weight: Weight, shape: ModelConfig, theirs: Any) -> Tensor:
    """Return a tensor in the layout of transformers, without the padding of a table."""
    moved: Tensor = theirs.to_hf(value, weight, shape)
    return (moved[: shape.vocab_size] if weight.cut == "ids" else moved).contiguous()
