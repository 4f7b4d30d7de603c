"""Attention of ranks that have parts of each sequence: keys and values go round a ring, or heads are exchanged for tokens.

The ring is that of Liu et al. 2023 (arXiv 2310.01889) in the order of Brandon et al. 2023 (2311.09431): each rank has a chunk
from the front of the sequence and one from its back, so that all have the same work under the causal mask. The exchange is
that of Jacobs et al. 2023 (DeepSpeed Ulysses, 2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run import Run

aten = torch.ops.aten
Group = dist.ProcessGroup


def check_cp(run: Run, style: str) -> None:
    """Raise ConfigError unless cp_size divides the sequence, for ulysses the heads too, and a ring has its kernels."""
    cp_size, tp_size, gpt, config = run.cp_size, run.tp_size, run.gpt, run.config
    if cp_size == 1:
        return
    if config.is_own:
        raise ConfigError("only presets have attention that ranks can share", "in --cp-size", "use 1")
    sizes = {"seq_len": (run.seq_len, math.lcm(tp_size, 2 if style == "ring" else 1))}
    if style == "ulysses":
        sizes |= {"n_head": (gpt.n_head, tp_size), "n_kv_head": (gpt.n_kv_head, tp_size)}
    for what, (size, times) in sizes.items():
        if size % (times * cp_size):
            fits = [n for n in range(1, 2 * cp_size) if all(size % (times * n) == 0 for size, times in sizes.values())]
            by = f"{times} x " * (times > 1)
            fix = f"use one of {fits}" + ", or --cp-style ring" * (what != "seq_len")
            raise ConfigError(f"{what} {size} is not divisible by {by}cp_size {cp_size}", "in --cp-size", fix)
    on_cuda, kernel = run.world.device.type == "cuda", config.attention
    for refused, what, option, fix in (
        (config.dropout, "a ring has no dropout", "dropout", "use --dropout 0"),
        (config.compile, "torch.compile cannot compile the messages of a ring", "compile", "leave it out"),
        (kernel not in ("auto", "flash"), f"a ring is made of flash attention, not {kernel}", "attention", "use auto"),
        (on_cuda and config.precision == "fp32", "a ring computes in 16 bits on a GPU", "precision", "use bf16"),
        (on_cuda and gpt.head_dim % 8, "a ring needs heads of a multiple of 8 numbers", "n-head", "use another"),
    ):
        if refused and style == "ring":
            raise ConfigError(what, f"in --{option}", f"{fix}, or --cp-style ulysses")


def attend_in_ring(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group, scale: float | None = None, **options: Any
) -> Tensor:
    """Return causal attention to the whole sequence, of which each rank of `group` has a front and a back chunk.

    q, k, v: (batch, heads, tokens of this rank, head_dim). options: of F.scaled_dot_product_attention, here without effect.
    """
    out: Tensor = _Ring.apply(q, k, v, group, scale or 1 / math.sqrt(q.shape[-1]))  # type: ignore[no-untyped-call]
    return out


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, *, group: Group, **options: Any) -> Tensor:
    """Return attention to the whole sequence, of which each rank of `group` has a piece: each attends with some of the heads.

    q, k, v: as for `attend_in_ring`. options: of F.scaled_dot_product_attention.
    """
    q, k, v = (_swapped(x, group, 1, 2) for x in (q, k, v))
    return _swapped(F.scaled_dot_product_attention(q, k, v, **options), group, 2, 1)


def _swapped(x: Tensor, group: Group, cut: int, joined: int) -> Tensor:
    """Cut a tensor along dim `cut` over the ranks, and join their parts along dim `joined`, in one exchange."""
    parts = torch.stack(x.chunk(group.size(), cut))
    received: Tensor = all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(received.unbind(), joined)


class _Ring(torch.autograd.Function):
    """Attention to keys and values that come round, whose gradients travel on with them until they are home.

    Parts are merged by their log-sum-exp. Sums are in fp32, also the gradients that travel.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float) -> Tensor:
        ctx.group, ctx.scale, kv = group, scale, torch.stack((k, v))
        for step, queries, keys in _meetings(group, q.shape[2]):
            coming = _sent_on(kv, group) if step < group.size() - 1 else None
            part_k, part_v = kv[:, :, :, keys]
            part, part_lse = _flash(q[:, :, queries], part_k, part_v, step == 0, scale)
            if step == 0:
                out, lse = part.to(torch.float32, copy=True), part_lse.clone(memory_format=torch.contiguous_format)
            else:
                rows, sums = out[:, :, queries], lse[:, :, queries]
                total = torch.logaddexp(sums, part_lse)
                rows.mul_((sums - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
                sums.copy_(total)
            kv = coming() if coming else kv
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        group, kv, leaving = ctx.group, torch.stack((k, v)), None
        for step, queries, keys in _meetings(group, q.shape[2]):
            coming = _sent_on(kv, group) if step < group.size() - 1 else None
            of_out, own_q, own, sums = (x[:, :, queries] for x in (grad, q, out, lse))
            part_k, part_v = kv[:, :, :, keys]
            of_q, *of_kv = _flash_backward(of_out, own_q, part_k, part_v, own, sums.contiguous(), step == 0, ctx.scale)
            if step == 0:
                grad_q, at_home = of_q.float(), torch.stack(of_kv).float()
            else:
                grad_q[:, :, queries] += of_q
                travelling = leaving() if leaving else torch.zeros_like(at_home)
                travelling[:, :, :, keys] += torch.stack(of_kv)
                leaving = _sent_on(travelling, group)
            kv = coming() if coming else kv
        if leaving:
            at_home += leaving()
        return grad_q.to(q.dtype), *at_home.to(q.dtype), None, None


def _meetings(group: Group, n: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each step of the ring, and which of this rank's n queries see which of the n keys that are there.

    Before the first message all see all, under the causal mask. Later keys may be of a rank before this one: all queries see
    their front half. Or they are of a rank behind it: the back half of the queries sees all of them.
    """
    every, front, back = slice(None), slice(0, n // 2), slice(n // 2, None)
    yield 0, every, every
    for step in range(1, group.size()):
        yield (step, every, front) if step <= group.rank() else (step, back, every)


def _sent_on(tensor: Tensor, group: Group) -> Callable[[], Tensor]:
    """Begin to send a tensor to the next rank of a ring. The function returned waits for the tensor of the rank before."""
    coming, rank, size = torch.empty_like(tensor), group.rank(), group.size()
    sends = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size)
    receives = dist.P2POp(dist.irecv, coming, group=group, group_peer=(rank - 1) % size)
    under_way = dist.batch_isend_irecv([sends, receives])

    def received() -> Tensor:
        for work in under_way:
            work.wait()
        return coming

    return received


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention and the log-sum-exp of each query's scores, (batch, heads, queries) in fp32."""
    kernel = aten._scaled_dot_product_flash_attention
    kernel = kernel if q.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = kernel(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, of which k and v are a part of all that `out` and `lse` are sums over."""
    if not q.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    # Sequences of one length need no list of lengths, and without dropout no random number is drawn.
    lengths = (None, None, q.shape[2], k.shape[2])
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    kernel = aten._scaled_dot_product_flash_attention_backward
    return kernel(grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale)  # type: ignore[no-any-return]
