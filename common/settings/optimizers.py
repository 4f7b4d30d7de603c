"""The table of optimizers: the module of each, and what others need to know before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

OptimizerName = Literal["adamw", "sgd", "muon"]


class OptimizerRow(NamedTuple):
    """One row. module: has `fused` and `of_torch`, which make the optimizer of torch's own recipes and of libraries.

    state_keys: the tensors that torch keeps for each parameter; in a checkpoint they are `NAME.KEY/PARAMETER`.
    state_bytes: of those per parameter, by the precisions that --optimizer-state may have.
    options: fields of RunConfig that some optimizers do not read, with commas between. why: they do not, for the error.
    matrix_keys: state_keys of the matrices in blocks, where they have others, in fp32.
    """

    module: str
    title: str
    state_keys: tuple[str, ...] = ()
    state_bytes: Mapping[str, float] = {"fp32": 0.0}
    options: str = ""
    why: str = ""
    matrix_keys: tuple[str, ...] = ()


ADAMW_STATE = ("exp_avg", "exp_avg_sq")
OPTIMIZERS: dict[OptimizerName, OptimizerRow] = {
    # In 8 bits each moment has an fp32 scale per block of 256 (common/optim/blockwise.py).
    "adamw": OptimizerRow("gptscale.common.optim.adamw", "AdamW", ADAMW_STATE,
        {"fp32": 8.0, "bf16": 4.0, "8bit": 2.0 + 2 * 4 / 256}, "beta1,beta2", "{optimizer} keeps no means of gradients"),
    "sgd": OptimizerRow("gptscale.common.optim.sgd", "SGD"),
    "muon": OptimizerRow("gptscale.common.optim.muon", "Muon", ADAMW_STATE,
        {"fp32": 8.0}, "beta1,beta2,muon_momentum", "{optimizer} orthogonalises no momentum", ("momentum",)),
}  # fmt: skip
