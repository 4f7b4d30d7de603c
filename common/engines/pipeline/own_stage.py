"""Stages of a model of one's own: each calls the whole forward, in which the modules of other stages are empty."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from gptscale.common.errors import ConfigError
from gptscale.common.model.chain import NoChainError, Sent, chain_of, keep_stage
from gptscale.common.model.own import OwnModel, twin_of
from gptscale.common.model.tensor_plan import TOLERANCE, deviation
from gptscale.common.settings.own_config import OwnConfig


class OwnStage(OwnModel):
    """Some blocks of a model, what stands before the first of all, and what is behind the last if this stage is the last."""

    def __init__(self, model: OwnModel, chain: Mapping[str, Any], blocks: range, is_last: bool) -> None:
        nn.Module.__init__(self)
        self.config, self.source, self.own, self.block = model.config, model.source, model.own, model.block
        keep_stage(self, chain, blocks, is_last)
        if chain["tied"] and blocks.start and is_last:
            # A weight of both ends has one name.
            *path, last = chain["tied"][0].split(".")
            owner: Any = self
            for name in path:
                owner = owner._modules.setdefault(name, nn.Module())
            owner._parameters[last] = self.get_parameter(chain["tied"][1])

    def forward(self, x: Tensor, targets: Tensor | None = None, ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Compute this stage's part of one micro-batch, as Stage does. ids: its tokens, which every stage has."""
        assert ids is not None
        self.received = x
        try:
            return super().forward(ids, ids if targets is None else targets)
        except Sent as sent:
            return sent.args[0].float()  # type: ignore[no-any-return]


@cache
def own_chain(config: OwnConfig) -> dict[str, Any]:
    """Return where stages cut a model, once two of them have computed the same. Raises ConfigError for one that is no chain."""
    twin = twin_of(config.look())
    twin.requires_grad_().zero_grad()
    (ids, targets), halves, count = twin.tokens(), [copy.deepcopy(twin) for _ in range(2)], len(twin.blocks)
    try:
        chain = chain_of(twin, lambda: twin(ids, targets).backward(), twin.block.__name__)
        stages = [OwnStage(halves[0], chain, range(1), False), OwnStage(halves[1], chain, range(1, count), True)]
        sent = stages[0](ids, None, ids)
        received = sent.detach().requires_grad_()
        stages[1](received, targets, ids).backward()
        sent.backward(received.grad)
        found: dict[str, Any] = {}
        for stage in stages:
            found |= {name: found.get(name, 0) + p.grad for name, p in stage.named_parameters()}
        whole: dict[str, Any] = {name: p.grad for name, p in twin.named_parameters()}
        off, where = deviation(found, whole)
        why = f"{where} deviates by {off:.1e} from one process" if off > TOLERANCE else ""
        why = why or "what its blocks pass on is not (batch, seq, ...)" * (sent.shape[:2] != ids.shape)
    except Exception as error:
        why = str(error) if isinstance(error, NoChainError) else f"a stage fails with {type(error).__name__}: {error}"
    if why:
        what = f"{config.source} cannot be cut into stages: {why}".replace("\n", " ")[:300]
        raise ConfigError(what, "in --model", "use a recipe that splits the batch, or tensor_parallel")
    return chain
