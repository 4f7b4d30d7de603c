"""The kernel of the loss under Triton's interpreter: beside torch in fp64, and called by common/model/loss.py."""

import pytest
from operators import compiled_for_hopper, run_code

pytest.importorskip("triton")


@pytest.mark.slow
def test_loss_and_gradient_are_those_of_fp64_alone_and_in_the_head():
    """Alone beside torch's operations too, and in the head as on CUDA, where softmax gets 16-bit logits and makes no copy."""
    run_code(
        # Blocks end before, in and behind the padding. A row in seven is ignored. There are huge logits and a block of -inf.
        "import torch, torch.nn.functional as F; torch.manual_seed(0)\n"
        "from gptscale.common.model.loss import IGNORE, softmax_and_loss_in_fp32\n"
        "from gptscale.ops.cross_entropy_triton import cross_entropy_\n"
        "for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "    for block in (64, 128, 256):\n"
        "        x = (4 * torch.randn(15, 200)).to(dtype); x[3, :64] = -torch.inf; x[5] *= 100; x[:, 187:] = 1e4\n"
        "        targets = torch.randint(0, 187, (15,)); targets[3] = 100; targets[::7] = IGNORE\n"
        "        wide = x[:, :187].double().requires_grad_()\n"
        "        expected = F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction='sum'); expected.backward()\n"
        "        torch_grad, torch_loss = softmax_and_loss_in_fp32(x.clone().float(), targets, 187)\n"
        "        buffer = x.clone(); loss = cross_entropy_(buffer, targets, 187, IGNORE, block=block, warps=4)\n"
        "        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)\n"
        "        torch.testing.assert_close(loss, torch_loss, rtol=1e-6, atol=0)\n"
        "        eps = torch.finfo(dtype).eps\n"
        "        torch.testing.assert_close(buffer[:, :187].double(), wide.grad, rtol=4 * eps, atol=1e-7)\n"
        "        torch.testing.assert_close(buffer, torch_grad.to(dtype), rtol=2 * eps, atol=1e-7)\n"
        "        assert not buffer[:, 187:].any() and not buffer[::7].any() and buffer.dtype is dtype\n"
        "        again = x.clone(); assert torch.equal(cross_entropy_(again, targets, 187, IGNORE, block=block), loss)\n"
        "rows = torch.randn(4, 300)[:, :200]; whole = rows.clone()\n"
        "some = torch.tensor([1, 2, 3, 4])\n"
        "assert torch.equal(cross_entropy_(rows, some, 200, IGNORE), cross_entropy_(whole, some, 200, IGNORE))\n"
        "assert torch.equal(rows, whole)\n"
        "nan = torch.randn(2, 64); nan[1, 9] = torch.nan\n"
        "assert cross_entropy_(nan, some[:2], 60, IGNORE).isnan() and nan[0].isfinite().all() and nan[1, :60].isnan().all()\n"
        "assert cross_entropy_(nan[:0], some[:0], 60, IGNORE) == 0\n"
        # Products, kernel and sums of blocks.
        "from gptscale.common.model import loss as l\n"
        "l.in_own_type = lambda device_type: True\n"
        "l.LOGITS_BYTES['cpu'] = 4 * 128 * 40\n"
        "seen, original = [], l.softmax_and_loss\n"
        "def spy(logits, *rest):\n"
        "    grad, loss = original(logits, *rest); seen.append((tuple(grad.shape), grad.dtype, grad is logits))\n"
        "    return grad, loss\n"
        "l.softmax_and_loss = spy\n"
        "x, weight = torch.randn(100, 16).requires_grad_(), torch.randn(128, 16).requires_grad_()\n"
        "targets = torch.randint(0, 120, (100,)); targets[::7] = l.IGNORE\n"
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    loss = l.linear_cross_entropy(x, weight, targets, 120)\n"
        "(3 * loss).backward()\n"
        "assert seen == [((rows, 128), torch.bfloat16, True) for rows in (34, 34, 32)]\n"
        "xd, wd = (t.detach().double().requires_grad_() for t in (x, weight))\n"
        "expected = F.cross_entropy((xd @ wd.t())[:, :120], targets, ignore_index=l.IGNORE, reduction='sum')\n"
        "(3 * expected).backward()\n"
        "for a, b in ((loss, expected), (x.grad, xd.grad), (weight.grad, wd.grad)):\n"
        "    assert a.dtype is torch.float32 and (a.double() - b).abs().max() < 0.03 * b.abs().max()\n",
        TRITON_INTERPRET="1",
    )


@pytest.mark.parametrize("logits", ["*bf16", "*fp16", "*fp32"])
def test_it_compiles_for_a_gpu_that_is_not_here(logits):
    """For Hopper, at the vocabulary of `1.6b`, with loads of 16 bytes a thread."""
    from gptscale.ops import cross_entropy_triton as t

    types = {"logits_ptr": logits, "targets_ptr": "*i64", "losses_ptr": "*fp32", "stride": "i32"}
    constants = {"VOCAB_SIZE": 50257, "COLUMNS": 50304, "IGNORED": -100, "LOWEST": t.LOWEST, "BLOCK": t.BLOCK}
    # Addresses and the stride are multiples of 16, as torch allocates.
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    assembly = compiled_for_hopper(t._cross_entropy_kernel, types, constants, aligned, num_warps=t.WARPS)
    loads = [line for line in assembly["ptx"].splitlines() if "ld.global" in line]
    vectors = [line for line in loads if ".v4.b32" in line]
    # The other two are the target and its logit.
    assert len(loads) - len(vectors) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_the_head_computes_what_it_does_in_fp64(precision, monkeypatch):
    """Blocks of rows, the kernel, and fp32 sums of 16-bit products, then the kernel alone at the vocabulary of `1.6b`."""
    import torch
    import torch.nn.functional as F

    from gptscale.common.model import loss as loss_module
    from gptscale.common.model.precision import DTYPES
    from gptscale.ops.cross_entropy_triton import cross_entropy_

    torch.manual_seed(0)
    dtype = DTYPES[precision]
    monkeypatch.setitem(loss_module.LOGITS_BYTES, "cuda", dtype.itemsize * 1024 * 100)
    x, weight = (torch.randn(n, 64, device="cuda").requires_grad_() for n in (250, 1024))
    targets = torch.randint(0, 1000, (250,), device="cuda")
    targets[::7] = loss_module.IGNORE
    with torch.autocast("cuda", dtype, enabled=precision != "fp32"):
        loss = loss_module.linear_cross_entropy(x, weight, targets, 1000)
    loss.backward()
    xd, wd = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = F.cross_entropy((xd @ wd.t())[:, :1000], targets, ignore_index=loss_module.IGNORE, reduction="sum")
    expected.backward()
    # Logits of 16 bits are off by more than a product is, so torch's own operations on them say what is to be expected.
    xt, wt = (t.detach().clone().requires_grad_() for t in (x, weight))
    with torch.autocast("cuda", dtype, enabled=precision != "fp32"):
        whole = F.linear(xt, wt)[:, :1000].float()
    own = F.cross_entropy(whole, targets, ignore_index=loss_module.IGNORE, reduction="sum")
    own.backward()
    of_torch = (own, xt.grad, wt.grad)
    for a, b, c in zip((loss, x.grad, weight.grad), (expected, xd.grad, wd.grad), of_torch, strict=True):
        assert a.dtype is torch.float32
        off, of_torchs = ((each.double() - b).abs().max() / b.abs().max() for each in (a, c))
        assert off < max(1e-4, 1.25 * of_torchs)

    logits = torch.randn(33, 50304, device="cuda").to(dtype)
    targets = torch.randint(0, 50257, (33,), device="cuda")
    wide = logits.double()[:, :50257].requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="sum")
    expected.backward()
    total = cross_entropy_(logits, targets, 50257, loss_module.IGNORE)
    torch.testing.assert_close(total.double(), expected.detach(), rtol=1e-5, atol=0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits[:, :50257].double(), wide.grad, rtol=4 * eps, atol=1e-7)
    assert not logits[:, 50257:].any()
