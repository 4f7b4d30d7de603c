"""Stages of any model whose blocks are a chain: each calls the whole forward, where other stages' modules are empty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptscale.common.engines.pipeline.stages import V_SHAPED
from gptscale.common.errors import ConfigError
from gptscale.common.model.chain import NoChainError, Sent, chain_of, keep_stage
from gptscale.common.model.twin import TOLERANCE, deviation, tokens_of, twin_of
from gptscale.common.settings.own_config import OwnConfig

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


class ChainStage(nn.Module):
    """A stage of any model, which calls the whole forward: it gives what the next stage gets, or the loss.

    Its weights have the names of the model behind `own.`. A tied one has the name that it has before the blocks.
    chain: of `chain_of`. blocks: those of this stage. loss_of(model, inputs, targets): the loss.
    """

    def __init__(
        self, model: nn.Module, chain: Mapping[str, Any], blocks: range, is_last: bool, loss_of: LossOf
    ) -> None:
        super().__init__()
        self.own, self.loss_of = model, loss_of
        # The class of its blocks.
        self.block = type(next(model.get_submodule(chain["blocks"]).children()))
        keep_stage(model, chain, blocks, is_last)
        if chain["tied"] and blocks.start and is_last:
            *path, last = chain["tied"][0].split(".")
            owner: Any = model
            for name in path:
                owner = owner._modules.setdefault(name, nn.Module())
            owner._parameters[last] = model.get_parameter(chain["tied"][1])

    def forward(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute this stage's part of one micro-batch, whose inputs and targets every stage has."""
        self.own.received = x
        try:
            return self.loss_of(self.own, inputs, targets)
        except Sent as sent:
            return sent.args[0].float()  # type: ignore[no-any-return]


def shapes_between(first: Tensor, hidden: Tensor, n_stages: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function from a stage's index to its input and output on the meta device: the last one's is a loss."""
    loss = torch.empty((), device="meta", requires_grad=True)
    return lambda index: (first if index == 0 else hidden, loss if index == n_stages - 1 else hidden)


def stage_of_loop(
    model: nn.Module, block_class: type[nn.Module], loss_of: LossOf, sample: tuple[Tensor, Tensor], mesh: DeviceMesh
) -> tuple[ChainStage, Callable[[int], tuple[Tensor, Tensor]]]:
    """Return this process's stage of a model in a loop of one's own, and its shapes. Raises NoChainError.

    sample: inputs and targets of a micro-batch. mesh: 1-D, the pipeline.
    """
    chain = chain_of(model, lambda: loss_of(model, *sample).backward(), block_class.__name__)
    if chain["tied"]:
        raise NoChainError(f"{chain['tied'][0]} is at both ends, whose gradients nobody sums")
    model.zero_grad()
    count, index, stages = len(model.get_submodule(chain["blocks"])), mesh.get_local_rank(), mesh.size()  # type: ignore[arg-type]
    blocks = range(count * index // stages, count * (index + 1) // stages)
    hidden = torch.empty(len(sample[0]), *chain["hidden"], device="meta", requires_grad=True)
    stage = ChainStage(model, chain, blocks, index == stages - 1, loss_of)
    return stage, shapes_between(sample[0].to("meta"), hidden, stages)


def gradients(schedule: Any, mesh: DeviceMesh, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradients of a batch in the stages of a loop of one's own, and return its mean loss, on each stage."""
    losses, first = list[Tensor](), [] if mesh.get_local_rank() else [inputs]
    schedule.step(*first, inputs=inputs, targets=targets, target=targets, losses=losses, return_outputs=False)
    loss = sum(losses, torch.zeros((), device=inputs.device)).detach()
    dist.all_reduce(loss, group=mesh.get_group())
    return loss


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
    (ids, targets), one, two = tokens_of(twin), copy.deepcopy(twin.own), copy.deepcopy(twin.own)
    try:
        chain = chain_of(twin.own, lambda: twin(ids, targets).backward(), twin.block.__name__)
        first = ChainStage(one, chain, range(1), False, twin.loss_of)
        second = ChainStage(two, chain, range(1, len(twin.blocks)), True, twin.loss_of)
        sent = first(ids, ids, targets)
        received = sent.detach().requires_grad_()
        second(received, ids, targets).backward()
        sent.backward(received.grad)
        found: dict[str, Any] = {}
        for stage in (first, second):
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
