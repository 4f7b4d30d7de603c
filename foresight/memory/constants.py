"""What a GPU holds beside torch's allocator, which no simulation can know: constants, each with its source.

They are shown apart, and added to what the allocator reserves when it is asked whether a run fits.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 2**20


class Constant(NamedTuple):
    """Bytes on one device. source: who measured them, on what."""

    name: str
    nbytes: int
    source: str


CONTEXT = Constant(
    "CUDA context and loaded kernels",
    500 * MIB,
    "0.3 to 0.6 GB per process, more as kernels are loaded; 1 to 2 GB in the Ultra-Scale Playbook (Hugging Face, 2025)",
)
NCCL = Constant(
    "NCCL, first communicator",
    688 * MIB,
    "544 MB with 2 ranks, 688 MB with more on 4 A100 (github.com/NVIDIA/nccl/issues/964); up to 1.6 GB with many channels (#864)",
)
NCCL_MORE = Constant(
    "NCCL, each further group of ranks",
    300 * MIB,
    "one more set of buffers per process group, linear in its channels (github.com/NVIDIA/nccl/issues/1685)",
)


def outside_of_torch(communicators: int) -> list[Constant]:
    """Return what lies on the device beside what torch reserves.

    communicators: the groups of ranks that talk through NCCL, 0 in a world of one.
    """
    constants = [CONTEXT]
    if communicators:
        constants.append(NCCL)
    if communicators > 1:
        constants.append(NCCL_MORE._replace(nbytes=(communicators - 1) * NCCL_MORE.nbytes))
    return constants
