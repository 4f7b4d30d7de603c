"""Where the bytes of a candidate are: on the device, on the host, on disk."""

from __future__ import annotations

from dataclasses import dataclass

from gptscale.common.engines.rank_shapes import place_of
from gptscale.foresight.memory.closed_form import predict
from gptscale.foresight.memory.world_bytes import layout_of
from gptscale.foresight.plan.enumeration import Candidate


@dataclass(frozen=True)
class Places:
    """Bytes of one rank at its peak: those on the device by owner."""

    device: dict[str, int]
    host: int = 0
    disk: int = 0

    @property
    def on_device(self) -> int:
        """Return the bytes on the device."""
        return sum(self.device.values())


def places_of(candidate: Candidate) -> Places:
    """Return the bytes of a candidate's first rank by the closed form, whose host and device are one memory on a CPU."""
    run, config = candidate.run, candidate.config
    owners = predict(run, config)
    if config.offload == "none" or run.world.device.type == "cpu":
        return Places(owners)
    _, fixed, layout = layout_of(run, config)
    if config.offload != "nvme":
        return Places(owners, int(fixed.host + layout.host))
    own = -(-run.gpt.n_params_in_memory // place_of(run).dp_size)
    compute = 4 if run.config.precision == "fp32" else 2
    return Places(owners, 4 * own + 20 * min(own, 10**9), (16 + compute) * own)


def communicators(candidate: Candidate) -> int:
    """Return how many groups of ranks talk through NCCL: the world, and one for each axis that is split beside another."""
    run = candidate.run
    axes = sum(size > 1 for size in (run.tp_size, run.pp_size, run.batch.dp_size))
    return 0 if run.world.world_size == 1 else max(1, axes + (axes > 1))
