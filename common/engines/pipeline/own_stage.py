"""Stages of a model of one's own: each calls the whole forward, in which the modules of other stages are empty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptscale.common.engines.pipeline.plan import V_SHAPED
from gptscale.common.errors import ConfigError
from gptscale.common.model.chain import NoChainError, Sent, chain_of, keep_stage
from gptscale.common.model.own import OwnModel, twin_of
from gptscale.common.model.tensor_plan import TOLERANCE, deviation
from gptscale.common.settings.own_config import OwnConfig

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


class ChainStage(nn.Module):
    """This process's stage of any model on a mesh, 1-D: it gives what the next stage gets, or the loss.

    loss_of(model, inputs, targets): the mean loss. sample: inputs and targets of a micro-batch. Raises NoChainError.
    """

    def __init__(
        self,
        model: nn.Module,
        block_class: type[nn.Module],
        loss_of: LossOf,
        sample: tuple[Tensor, Tensor],
        mesh: DeviceMesh,
    ) -> None:
        super().__init__()
        chain = chain_of(model, lambda: loss_of(model, *sample).backward(), block_class.__name__)
        if chain["tied"]:
            raise NoChainError(f"{chain['tied'][0]} is at both ends, whose gradients nobody sums")
        model.zero_grad()
        self.model, self.loss_of, self.mesh = model, loss_of, mesh
        self.index, self.last = mesh.get_local_rank(), mesh.size() - 1
        blocks = len(model.get_submodule(chain["blocks"]))  # type: ignore[arg-type]
        ends = [blocks * i // mesh.size() for i in (self.index, self.index + 1)]
        keep_stage(model, chain, range(*ends), self.index == self.last)
        self.sample = sample[0].to("meta")
        self.hidden = torch.empty(len(sample[0]), *chain["hidden"], device="meta", requires_grad=True)

    def shapes(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and output of a stage, on the meta device."""
        loss = torch.empty((), device="meta", requires_grad=True)
        return self.hidden if index else self.sample, loss if index == self.last else self.hidden

    def forward(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute this stage's part of one micro-batch, whose inputs and targets every stage has."""
        self.model.received = x
        try:
            return self.loss_of(self.model, inputs, targets)
        except Sent as sent:
            return sent.args[0]  # type: ignore[no-any-return]

    def gradients(self, schedule: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Leave the gradients of a batch in the stage, and return its mean loss, on each stage."""
        losses, first = list[Tensor](), [] if self.index else [inputs]
        schedule.step(*first, inputs=inputs, targets=targets, target=targets, losses=losses, return_outputs=False)
        loss = sum(losses, torch.zeros((), device=inputs.device)).detach()
        dist.all_reduce(loss, group=self.mesh.get_group())
        return loss


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


def check_chain(config: OwnConfig, schedule: str) -> None:
    """Raise ConfigError for a model that is no chain, or that ties a weight where both ends are on one process."""
    if own_chain(config)["tied"] and schedule in V_SHAPED:
        what = f"{schedule} has both ends of the model on one process, and {config.source} ties a weight of them"
        raise ConfigError(what, "in --schedule", "use 1F1B or Interleaved1F1B")


@cache
def own_chain(config: OwnConfig) -> dict[str, Any]:
    """Return where stages cut a model, once two of them have computed the same. Raises ConfigError for one that is no chain."""
    twin = twin_of(config.look(), {})
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
