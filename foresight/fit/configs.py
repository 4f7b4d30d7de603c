"""A model of transformers by its config, or a preset of ours, as text of a program: no other file is needed to build it."""

from __future__ import annotations

from functools import partial
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.settings.families import in_transformers, preset
from gptscale.common.settings.user_code import read_hf_config
from gptscale.foresight.fit.python_text import as_python

# The fields of a config that make a model small, by its many spellings: what each becomes.
LAYERS = "num_hidden_layers n_layer num_layers num_decoder_layers encoder_layers decoder_layers n_layers depth".split()
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
MLP = "intermediate_size n_inner d_ff ffn_dim hidden_dim encoder_ffn_dim decoder_ffn_dim moe_intermediate_size".split()
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
OF_A_HEAD = ("head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim")
KINDS = ("layer_types", "layers_block_type", "block_types")
PARTS = ("text_config", "vision_config", "audio_config")
HEAD_WIDTH, FEW_HEADS, FEW_EXPERTS, SMALL_VOCABULARY, SMALL_LENGTH = 8, 4, 16, 128, 32
TEXT = '''\
from transformers import {config}, {model}

CONFIG = {fields}


def build() -> torch.nn.Module:
    """Build the model of a config of transformers."""
    return {model}({config}(**CONFIG))


def batch(size: int) -> dict[str, torch.Tensor]:
    """Return random samples. Put your data here."""
    inputs = {inputs}
    return {{"{name}": inputs, "labels": {labels}}}'''
# Random inputs by the name that a model of transformers has for them, and labels by the end of the model's own name.
INPUTS = {
    "input_ids": "torch.randint(0, {vocab_size}, (size, {length}))",
    "pixel_values": "torch.randn(size, {num_channels}, {image_size}, {image_size})",
    "input_features": "torch.randn(size, {num_mel_bins}, {frames})",
}
SENTENCE, CLASS = "torch.randint(0, {vocab_size}, (size, {length}))", "torch.randint(0, {num_labels}, (size,))"
LABELS = dict.fromkeys(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"), SENTENCE)
LABELS |= dict.fromkeys(("ForSequenceClassification", "ForImageClassification"), CLASS)
LABELS |= {"ForTokenClassification": "torch.randint(0, {num_labels}, (size, {length}))"}


def of_transformers(where: str, seq_len: int | None) -> tuple[str, str]:
    """Return the text of a model and batch by a config.json or its folder, and that of a small one."""

    def refuse(why: str) -> ConfigError:
        what = f"{where} is no config of transformers, or of a model that fit can take: {why}"
        return ConfigError(what, "in gptscale fit", "name a config.json or its folder")

    found = read_hf_config(where, refuse)
    return _texts(found, seq_len, refuse)


def of_preset(name: str, seq_len: int | None) -> tuple[str, str]:
    """Return the same for a preset of `gptscale run --model`."""
    shape = preset(name)
    config = in_transformers(shape.family).hf_config(shape, shape.vocab_size)
    fields = config.to_dict() | {"architectures": None}
    refuse = partial(ConfigError, where="in gptscale fit", fix="name another model")
    return _texts(fields, seq_len or shape.block_size, refuse)


def _texts(found: dict[str, Any], seq_len: int | None, refuse: Any) -> tuple[str, str]:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind = transformers.CONFIG_MAPPING[found["model_type"]]
    works = "CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM MASKED_LM IMAGE_CLASSIFICATION".split()
    known = [getattr(auto, f"MODEL_FOR_{work}_MAPPING_NAMES").get(found["model_type"]) for work in works]
    name = next(filter(None, [*(found.get("architectures") or [])[:1], *known]), "")
    model = getattr(transformers, name or "-", None)
    if model is None:
        raise refuse(f"transformers {transformers.__version__} has no class {name!r} for it"[:200])
    try:
        labels = LABELS[next((end for end in LABELS if name.endswith(end)), name)]
        config = kind(**{name: value for name, value in found.items() if name not in ("model_type", "architectures")})
        fields = _unusual(config, kind())
        small = _small(config.to_dict(), fields)
        whole = _text(kind.__name__, model, fields, config, labels, seq_len)
        return whole, _text(kind.__name__, model, small, kind(**small), labels, SMALL_LENGTH)
    except (AttributeError, KeyError):
        raise refuse(f"the inputs of {name} are unknown; build it in a file of yours, and name FILE.py:build") from None
    except Exception as error:
        said = " ".join(f"whole, or narrowed for its proof, it fails with {type(error).__name__}: {error}".split())
        raise refuse(said[:300]) from None


def _unusual(config: Any, usual: Any) -> dict[str, Any]:
    """Return the fields of a config that are not its class's defaults. Of classes the number counts, and not their names."""
    left = "model_type transformers_version architectures dtype torch_dtype _name_or_path id2label label2id".split()
    both = [each.to_dict() | {"num_labels": each.num_labels} for each in (config, usual)]
    return {name: value for name, value in both[0].items() if name not in left and both[1].get(name) != value}


def _small(whole: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model of two layers with a short vocabulary, whose heads have few elements."""
    heads = next((whole[name] for name in HEADS if isinstance(whole.get(name), int)), 8)
    widths = [name for name in WIDTHS if isinstance(whole.get(name), int)]
    width, small = HEAD_WIDTH, dict(fields)
    # Rotary positions may have a list with a part for each element of a head: heads keep their elements, and are few.
    if widths and any(isinstance(each, list) for each in (whole.get("rope_parameters") or {}).values()):
        width, heads = whole.get("head_dim") or whole[widths[0]] // heads, min(heads, FEW_HEADS)
        small |= {name: min(whole[name], heads) for name in (*HEADS, "num_key_value_heads") if whole.get(name)}
    small |= {name: 2 for name in LAYERS if whole.get(name)}
    small |= dict.fromkeys(widths, heads * width)
    small |= {name: 2 * heads * width for name in MLP if widths and whole.get(name)}
    small |= {name: min(whole[name], FEW_EXPERTS) for name in EXPERTS if whole.get(name)}
    small |= {name: min(whole[name], width) for name in OF_A_HEAD if whole.get(name)}
    # Heads of a state space share an expanded layer.
    small |= {"head_dim": whole["expand"] * HEAD_WIDTH} if whole.get("expand") and whole.get("head_dim") else {}
    if whole.get("vocab_size"):
        of_tokens = (name for name in whole if name.endswith("_token_id") and isinstance(whole[name], int))
        small |= {name: min(whole[name], SMALL_VOCABULARY - 1) for name in of_tokens}
        small["vocab_size"] = SMALL_VOCABULARY
    if isinstance(depths := whole.get("depths"), list):
        # Rounding grows with each batch norm.
        small["depths"] = [min(depths[0], 2), *(1 for _ in depths[1:])]
    for name in (name for name in KINDS if whole.get(name)):
        small[name] = [*dict.fromkeys(whole[name]), *whole[name]][:2]
    small |= {"attn_layer_period": 2, "attn_layer_offset": 1} if whole.get("attn_layer_period") else {}
    small |= {"attention_types": [[["global", "local"], 1]]} if whole.get("attention_types") else {}
    return small | {name: _small(whole[name], whole[name]) for name in PARTS if isinstance(whole.get(name), dict)}


def _text(config: str, model: Any, fields: dict[str, Any], full: Any, labels: str, seq_len: int | None) -> str:
    """Return the text of a model and its random batch. Raises AttributeError or KeyError if its inputs are unknown."""
    parts = [full, *(getattr(full, name, None) for name in PARTS)]
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    lengths = (getattr(part, name, None) for part in parts[:2] for name in names)
    words: dict[str, Any] = {
        "image_size": 224,
        "num_channels": 3,
        "length": min(seq_len or 1024, next(filter(None, lengths), 1024)),
        "frames": 2 * getattr(full, "max_source_positions", 0),
    }
    for name in ("vocab_size", "num_labels", "num_channels", "num_mel_bins", "image_size"):
        value = next(filter(None, (getattr(part, name, None) for part in parts)), None)
        words |= {name: value[0] if isinstance(value, list | tuple) else value} if value else {}
    own, labels = INPUTS[model.main_input_name].format(**words), labels.format(**words)
    return TEXT.format(
        config=config,
        model=model.__name__,
        fields=as_python(dict(sorted(fields.items())), indent=0),
        name=model.main_input_name,
        inputs=own,
        labels="inputs" if labels == own else labels,
    )
