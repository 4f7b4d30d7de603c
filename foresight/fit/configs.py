"""A model of transformers by its config, or a preset of ours, as text of a program: no other file is needed to build it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.settings.families import in_transformers, preset
from gptscale.common.settings.user_file import read_json
from gptscale.foresight.fit.python_text import as_python

CONFIG_MOST = 2**20
# The fields of a config that make a model small, by its many spellings: what each becomes.
FEW_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layers",
)
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
INNER = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
HEAD_WIDTH, SMALL_VOCABULARY, SMALL_LENGTH = 8, 128, 32
TEXT = '''\
from transformers import {config}, {model}

CONFIG = {fields}


def build() -> torch.nn.Module:
    """Build the model of a config of transformers."""
    return {model}({config}(**CONFIG))


def batch(size: int) -> dict[str, torch.Tensor]:
    """Return random samples. Put your data here."""
    {samples}'''
IDS = 'ids = torch.randint(0, {vocabulary}, (size, {length}))\n    return {{"input_ids": ids, "labels": ids}}'
IMAGES = (
    "pixels = torch.randn(size, {channels}, {image}, {image})\n"
    '    return {{"pixel_values": pixels, "labels": torch.randint(0, {labels}, (size,))}}'
)


def of_transformers(where: str, seq_len: int | None) -> tuple[str, str, str]:
    """Return the text of a model and batch by a config.json or its folder, of a small one, and what the small one is."""
    path = Path(where)
    path = path / "config.json" if path.is_dir() else path

    def refuse(why: str) -> ConfigError:
        return ConfigError(
            f"{path} is no config of transformers: {why}", "in gptscale fit", "name a config.json or its folder"
        )

    found = read_json(path, CONFIG_MOST, refuse)
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise refuse("it has no model_type")
    return _texts(found, (found.get("architectures") or [None])[0], seq_len, refuse)


def of_preset(name: str, seq_len: int | None) -> tuple[str, str, str]:
    """Return the same for a preset of `gptscale run --model`."""
    shape = preset(name)
    config = in_transformers(shape.family).hf_config(shape, shape.vocab_size)
    kinds = {name: kind for name, kind in config.to_dict().items() if name != "architectures"}
    return _texts(
        kinds, None, seq_len or shape.block_size, lambda why: ConfigError(why, "in gptscale fit", "name another model")
    )


def _texts(found: dict[str, Any], architecture: str | None, seq_len: int | None, refuse: Any) -> tuple[str, str, str]:
    import transformers

    if found["model_type"] not in transformers.CONFIG_MAPPING:
        raise refuse(f"transformers {transformers.__version__} has no model_type {found['model_type']!r}"[:200])
    kind = transformers.CONFIG_MAPPING[found["model_type"]]
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = architecture or mapping.get(found["model_type"], "")
    if not hasattr(transformers, model or "-"):
        raise refuse(f"transformers {transformers.__version__} has no class {model!r} for it"[:200])
    try:
        config = kind(**{name: value for name, value in found.items() if name not in ("model_type", "architectures")})
    except Exception as error:
        raise refuse(f"{type(error).__name__}: {error}"[:200]) from None
    left = {"model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"}
    usual = kind().to_dict()
    fields = {name: value for name, value in config.to_dict().items() if name not in left and usual.get(name) != value}
    small = _small(config, fields)
    return (
        _text(kind.__name__, model, fields, config, seq_len),
        _text(kind.__name__, model, small, kind(**small), SMALL_LENGTH),
        f"two layers of width {next((small[name] for name in WIDTHS if name in small), '?')}",
    )


def _small(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model of two layers, whose heads have a few elements and whose vocabulary is short."""
    whole = config.to_dict()
    heads = next((whole[name] for name in HEADS if whole.get(name)), 1)
    small = dict(fields)
    small |= {name: 2 for name in FEW_LAYERS if whole.get(name)}
    small |= {name: heads * HEAD_WIDTH for name in WIDTHS if whole.get(name)}
    small |= {name: 2 * heads * HEAD_WIDTH for name in INNER if whole.get(name)}
    small |= {name: HEAD_WIDTH for name in ("head_dim", "d_kv") if whole.get(name)}
    if whole.get("vocab_size"):
        small |= {"vocab_size": SMALL_VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if whole.get("layer_types"):
        small["layer_types"] = whole["layer_types"][:2]
    return small


def _text(config: str, model: str, fields: dict[str, Any], full: Any, seq_len: int | None) -> str:
    if hasattr(full, "image_size") and not hasattr(full, "vocab_size"):
        sizes = {"channels": full.num_channels, "image": full.image_size, "labels": full.num_labels}
        samples = IMAGES.format(**sizes)
    else:
        most = getattr(full, "max_position_embeddings", None) or getattr(full, "n_positions", None) or 1024
        samples = IDS.format(vocabulary=full.vocab_size, length=min(seq_len or 1024, most))
    return TEXT.format(
        config=config, model=model, fields=as_python(dict(sorted(fields.items())), indent=0), samples=samples
    )
