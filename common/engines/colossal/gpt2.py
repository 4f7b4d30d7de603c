"""transformers' GPT2LMHeadModel for Colossal-AI: lazy, with causal attention and with this package's loss in its forward.

The functions import Colossal-AI and transformers 4.51. Call `start` of common/engines/colossal/start.py before them.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.model.hf_gpt2 import hf_config
from gptscale.common.model.loss import IGNORE
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import ModelConfig

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

ATTENTION = "gptscale_causal"
# Modules whose input is the same on all tensor ranks.
DROPOUTS = ("drop", "attn.resid_dropout", "mlp.dropout")


def lazy_gpt2(run: Run) -> GPT2LMHeadModel:
    """Return the run's GPT as a GPT2LMHeadModel that has no weight in memory until Colossal-AI asks for it.

    Its table is padded like that of this package's GPT.
    """
    from colossalai.lazy import LazyInitContext
    from transformers import GPT2LMHeadModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, no_init_weights  # type: ignore[attr-defined]

    config = hf_config(run.gpt, run.gpt.padded_vocab_size)
    config.use_cache = False
    if config.activation_function == "gelu_new":
        # The same function as one operation. transformers writes it in eight, which keep three more tensors for backward.
        config.activation_function = "gelu_pytorch_tanh"
    with no_init_weights(), LazyInitContext(default_device=run.world.device):
        model = GPT2LMHeadModel(config)
    model.tie_weights()
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = causal_attention
    config._attn_implementation = ATTENTION
    if run.config.activation_checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class GPT2WithLoss(nn.Module):
    """A GPT2LMHeadModel that is cut in neither width nor depth, with the loss in its forward.

    lazy: whether its weights wait until Colossal-AI asks for them.
    """

    def __init__(self, run: Run, *, lazy: bool) -> None:
        from colossalai.lazy import LazyInitContext

        super().__init__()
        self.vocab_size = run.gpt.vocab_size
        self.hf = lazy_gpt2(run) if lazy else LazyInitContext.materialize(lazy_gpt2(run))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross entropy in fp32, ()."""
        logits = self.hf(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
        return cross_entropy(logits, targets.flatten(), self.vocab_size, None)


def causal_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float, **_: Any
) -> tuple[Tensor, None]:
    """Compute torch's fused causal attention, (batch, heads, seq, head_dim) to (batch, seq, heads, head_dim).

    The mask is ignored: Colossal-AI's forward makes one for padding only. With a mask, transformers' "sdpa" is not causal, and
    its "eager" keeps every score in memory. Each tensor rank has other heads, so its dropout uses the random stream that
    Colossal-AI made for this rank.
    """
    randomizer = getattr(module.attn_dropout, "randomizer", None)
    with randomizer.fork_rng() if randomizer is not None and dropout else nullcontext():
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
    return y.transpose(1, 2), None


def policy(gpt: ModelConfig) -> Any:
    """Return Colossal-AI's own policy with two changes.

    The forward returns the summed loss, and dropout behind a reduction is the same on all tensor ranks. Upstream lets each rank
    drop other elements of an activation that all of them share. Then the residual streams of the ranks drift apart, and with
    them the gradients of norms and biases, which nobody sums.
    """
    from colossalai.shardformer.policies.gpt2 import GPT2LMHeadModelPolicy
    from transformers import GPT2LMHeadModel

    class GPT2LossPolicy(GPT2LMHeadModelPolicy):  # type: ignore[misc]
        def module_policy(self) -> dict[Any, Any]:
            descriptions: dict[Any, Any] = super().module_policy()
            for description in descriptions.values():
                replaced = description.sub_module_replacement or []
                description.sub_module_replacement = [r for r in replaced if r.suffix not in DROPOUTS]
            methods = descriptions[GPT2LMHeadModel].method_replacement
            options = {k: v for k, v in methods["forward"].keywords.items() if k != "vocab_size"}
            methods["forward"] = partial(summed_loss, vocab_size=gpt.vocab_size, **options)
            return descriptions

    return GPT2LossPolicy()


def summed_loss(
    self: Any,
    input_ids: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    vocab_size: int,
    shard_config: Any,
    hidden_states: Tensor | None = None,
    stage_manager: Any = None,
    stage_index: Any = None,
) -> Any:
    """Compute the summed cross entropy of a GPT2LMHeadModel, as its forward.

    input_ids, targets: (batch, seq); a target of -100 does not count. The loss is fp32, (). A stage that is not the last returns
    the input of the next one instead. Upstream's own forward shifts the targets by one, takes the mean, and lets the padding
    of the vocabulary win.
    """
    x = input_ids if hidden_states is None else hidden_states
    assert x is not None
    from colossalai.shardformer.modeling.gpt2 import GPT2PipelineForwards

    outputs = GPT2PipelineForwards.gpt2_model_forward(
        self.transformer,
        input_ids,
        # Upstream reads its shape.
        attention_mask=torch.ones(x.shape[:2], dtype=torch.long, device=x.device),
        hidden_states=hidden_states,
        use_cache=False,
        return_dict=True,
        stage_manager=stage_manager,
        stage_index=stage_index,
        shard_config=shard_config,
        force_sp_gather=False,
    )
    if stage_manager is not None and not stage_manager.is_last_stage():
        return {"hidden_states": outputs["hidden_states"]}
    assert targets is not None
    group = shard_config.tensor_parallel_process_group if shard_config.enable_tensor_parallelism else None
    logits = self.lm_head(outputs.last_hidden_state).flatten(0, 1).float()
    return cross_entropy(logits, targets.flatten(), vocab_size, group)


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the summed loss of fp32 logits (rows, this rank's part of the table), of which only ids below `vocab_size` count."""
    if group is None:
        return F.cross_entropy(logits[:, :vocab_size], targets, ignore_index=IGNORE, reduction="sum")
    from colossalai.shardformer.layer import cross_entropy_1d

    columns = logits.shape[1]
    padding = torch.arange(columns, device=logits.device) + dist.get_rank(group) * columns >= vocab_size
    full_vocab_size = columns * dist.get_world_size(group)
    logits = logits.masked_fill(padding, -torch.inf)
    return cross_entropy_1d(logits, targets, IGNORE, group, full_vocab_size, torch.float32, "sum")  # type: ignore[no-any-return]
