"""The small twin of a model of one's own, on which one process proves that a way to cut it is right."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from gptscale.common.model.build import give_memory
from gptscale.common.model.own import OwnModel

# By how much the numbers of all ranks together may differ from those of the whole, as in parity.
TOLERANCE = 1e-5


def twin_of(looked: OwnModel, plan: Mapping[str, str]) -> OwnModel:
    """Return a copy with random values and without dropout. It has the first blocks alone, one of each kind, if it runs so.

    plan: how modules are cut, by which kinds differ, too. Rows of tables get no gradients, so that it needs less memory.
    """
    weights = [(name, (p.shape, plan.get(name.rpartition(".")[0]))) for name, p in looked.named_parameters()]
    kinds = [{n.removeprefix(start): kind for n, kind in weights if start in n} for start in looked.prefixes]
    first = max(2, 1 + max(kinds.index(each) for each in kinds))
    for kept in (first, len(kinds)):
        twin = copy.deepcopy(looked)
        del twin.get_submodule(looked.prefixes[0][:-3])[kept:]  # type: ignore[operator]
        twin.__dict__["blocks"], twin.prefixes = twin.blocks[:kept], looked.prefixes[:kept]
        give_memory(twin, twin.config, torch.device("cpu"))
        twin.eval()
        generator = torch.Generator().manual_seed(0)
        for p in twin.parameters():
            # A vector is near one, as a norm has it.
            p.data.normal_(float(p.dim() == 1), 0.05, generator=generator)
        for table in (m for m in twin.modules() if isinstance(m, nn.Embedding)):
            table.weight.requires_grad_(False)
        with suppress(Exception):
            twin(*tokens_of(twin))
            break
    return twin


def tokens_of(twin: OwnModel) -> tuple[Tensor, Tensor]:
    """Return a few ids and targets, for each of which every table has a row."""
    ids = torch.arange(16) % min(m.num_embeddings for m in twin.modules() if isinstance(m, nn.Embedding))
    return ids.view(2, 8), ids.flip(0).view(2, 8)


def deviation(found: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return by how much tensors deviate from those of one process at most, and which of them."""
    # Below a hundredth of the largest there may be only rounding.
    floor = max(float(value.abs().max()) for value in whole.values()) / 100
    return max((float((found[n] - each).abs().max() / (each.abs().max() + floor)), n) for n, each in whole.items())
