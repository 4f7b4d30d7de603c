"""One small model, trained in one process or split by an engine, right or with a planted bug. It imports nothing of ours.

Each bug is one that somebody reported: the thread stands beside it.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BUGS = {
    "no-reduce": "verl #7493: a shard group of one switches the exchange of gradients off",
    "sum": "Megatron-LM PR #5956, pytorch #160285: gradients too large by the number of ranks",
    "divided-twice": "Megatron-LM #7452: a mean of what is a mean already",
    "wrong-group": "VeOmni #1059: the reduction goes over a group of one",
    "local-norm": "pytorch #170862: the norm of local parameters",
    "norm-by-root": "LlamaFactory PR #10429: the norm off by the root of the number of shards",
    "norm-omits": "SkyRL PR #2226: the norm skips part of the weights",
    "tied": "piper #13: tied embeddings are not reduced between pipeline stages",
    "accumulation": "Automodel PR #3679: micro-batches are summed where their mean is meant",
    "late-clear": "Megatron-LM #7452: gradients of the step before are still there",
    "stale": "VeOmni PR #1115: the update comes before the exchange",
    "same-batch": "Megatron-LM #7452: ranks read the same samples",
    "padding": "transformers PR #48516: means over unlike numbers of targets are averaged",
    "skipped": "transformers PR #48205: parts of gradients are missing",
    "zero": "transformers PR #48205: a detached piece has no gradient",
    "not-held": "Megatron-LM #7452: the optimizer does not hold a weight",
    "no-broadcast": "Megatron-LM PR #5916: ranks diverge, for they begin apart",
    "rate": "AReaL PR #335: what is applied grows with the number of data ranks",
    "drift": "Megatron-LM PR #5916: one rank clips by another limit, and ranks diverge",
    "half-zero": "NeMo-RL #264: a shard of a weight gets no gradient",
}
VOCABULARY, WIDTH, LENGTH = 40, 32, 12


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(args.dropout)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if args.tie:
            self.head.weight = self.embedding.weight
        if args.freeze:
            self.norm.weight.requires_grad_(False)
        self.bug = args.bug
        self.slope = nn.Parameter(torch.ones(2)) if args.device == "cuda" else None

    def attend(self, x):
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        nearer = lambda score, batch, head, i, j: score - self.slope[head] * (i - j)  # noqa: E731
        mask = create_block_mask(lambda batch, head, i, j: i >= j, None, None, LENGTH, LENGTH, device=x.device)
        return torch.compile(flex_attention)(heads, heads, heads, nearer, mask).transpose(1, 2).flatten(-2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.slope is not None:
            x = x + checkpoint(self.attend, x, use_reentrant=False)
        inner = F.gelu(self.up(self.norm(x)))
        if self.slope is not None:
            # Tensor ranks have a head each, as a DTensor.
            heads = inner.unflatten(-1, (2, -1)).transpose(1, 2)
            inner = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.down(self.dropout(inner.detach() if self.bug == "zero" else inner))
        return self.head(x)


class Own(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.defaults["lr"] * parameter.grad


class Inside(torch.optim.AdamW):
    """It averages gradients itself, as optimizers do that keep a part of their state on each rank."""

    def step(self):
        if dist.is_initialized():
            gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
            works = [dist.all_reduce(gradient, op=dist.ReduceOp.AVG, async_op=True) for gradient in gradients]
            torch.futures.collect_all([work.get_future() for work in works]).wait()
        super().step()


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="single")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bug", choices=BUGS)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    for switch in ("--tie", "--freeze", "--two", "--pad", "--bf16", "--compile"):
        parser.add_argument(switch, action="store_true")
    return parser.parse_args()


def make(args):
    data_seed = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(0, VOCABULARY, (256, LENGTH + 1), generator=data_seed)
    targets = tokens[:, 1:].clone()
    if args.pad:
        lengths = torch.arange(256) * 5 % (LENGTH - 1) + 1
        targets[torch.arange(LENGTH) >= lengths[:, None]] = -100
    torch.manual_seed(args.seed)
    return Model(args), TensorDataset(tokens[:, :-1].clone(), targets)


def loss_of(args, logits, targets, divisor):
    """Return the loss of a micro-batch, whose sum over all of a step and mean over ranks is the mean over the global batch."""
    if not args.pad or args.bug == "padding":
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / divisor
    count = (targets != -100).sum()
    if dist.is_initialized():
        dist.all_reduce(count)
        count = count / dist.get_world_size()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count / divisor


def optimizers_of(args, model, rate=0.01):
    kind = {"Own": Own, "Inside": Inside}.get(args.optimizer) or getattr(torch.optim, args.optimizer)
    held = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if args.bug == "not-held":
        held = [(n, p) for n, p in held if "norm.bias" not in n]
    rate *= dist.get_world_size() if args.bug == "rate" else 1
    groups = [[p for n, p in held if "norm" in n], [p for n, p in held if "norm" not in n]] if args.two else None
    if args.engine == "redundancy":
        return [ZeroRedundancyOptimizer([p for _, p in held], kind, lr=rate)]
    if args.engine == "sharded":
        from fairscale.optim.oss import OSS

        return [OSS([p for _, p in held], kind, lr=rate)]
    return [kind(group, lr=rate) for group in groups or [[p for _, p in held]]]


def exchange(args, model):
    """Average gradients over ranks, as a student writes it."""
    world, bug = dist.get_world_size(), args.bug
    group = GROUPS[dist.get_rank()] if bug == "wrong-group" else None
    for name, parameter in model.named_parameters():
        if parameter.grad is None or bug == "no-reduce" or (bug == "skipped" and "down.weight" in name):
            continue
        dist.all_reduce(parameter.grad, group=group)
        if bug != "sum":
            parameter.grad /= 1 if group else world
        if bug == "divided-twice":
            parameter.grad /= world


def clip(args, model):
    bug, parameters = args.bug, [p for p in model.parameters() if p.requires_grad]
    if bug == "norm-omits":
        parameters = parameters[1:]
    if bug in ("local-norm", "norm-by-root"):
        local = [g.to_local() if hasattr(g := p.grad, "to_local") else g for p in parameters]
        norm = nn.utils.get_total_norm(local if bug == "local-norm" else [p.grad for p in parameters])
        if bug == "norm-by-root":
            norm = getattr(norm, "full_tensor", lambda: norm)() / dist.get_world_size() ** 0.5
        nn.utils.clip_grads_with_norm_(parameters, args.clip, norm, False)
        return
    limit = args.clip * (1 + dist.get_rank() * (bug == "drift")) if dist.is_initialized() else args.clip
    clip_grad_norm_(parameters, limit)


def wrapped(args, model):
    """Return the model as its engine splits it."""
    if args.engine in ("ddp", "redundancy"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=args.bug == "zero")
    if args.engine == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if args.device == "cuda":
            each = ModuleWrapPolicy({nn.Linear})
            own = {"auto_wrap_policy": each, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
            return FullyShardedDataParallel(model, device_id=torch.cuda.current_device(), **own)
        cpu, mesh = torch.device("cpu"), dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        return FullyShardedDataParallel(
            model, None, device_mesh=mesh, device_id=cpu, use_orig_params=args.optimizer == "SGD"
        )
    if args.engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in (model.up, model.down, model):
            fully_shard(block)
            if args.device == "cuda":
                block.set_gradient_divide_factor(1.0)
        return model
    if args.engine == "tensor":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = dist.device_mesh.init_device_mesh(device_type=args.device, mesh_shape=(int(os.environ["WORLD_SIZE"]),))
        up = ColwiseParallel(use_local_output=args.device == "cpu")
        return parallelize_module(model, mesh, {"up": up, "down": RowwiseParallel()})
    return model


def train(args):
    model, dataset = make(args)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if args.bug == "no-broadcast":
        torch.manual_seed(dist.get_rank())
        model = Model(args)
    divisor = 1 if args.bug == "accumulation" else args.accumulate
    device, of_loader = args.device, {}
    if args.device == "cuda":
        print(torch.cuda.get_device_properties(0).name, torch.cuda.get_device_capability())
        assert torch.accelerator.device_count() == int(os.environ["WORLD_SIZE"])
        device = f"{torch.accelerator.current_accelerator()}:{os.environ['RANK']}"
        of_loader = {"num_workers": 1, "pin_memory": True}
        divisor *= world if args.engine == "fsdp2" else 1
    if args.engine == "cut":
        dataset = TensorDataset(*(tensor.chunk(world, 1)[dist.get_rank()] for tensor in dataset.tensors))
    model = wrapped(args, model.to(device))
    data_world = world if args.engine not in ("tensor", "cut") and args.bug != "same-batch" else 1
    sampler = DistributedSampler(dataset, data_world, dist.get_rank() % data_world, seed=1) if data_world > 1 else None
    loader = DataLoader(dataset, args.batch, sampler=sampler, **of_loader)
    optimizers = optimizers_of(args, model)
    if args.engine == "sharded":
        from fairscale.nn.data_parallel import ShardedDataParallel

        model = ShardedDataParallel(model, optimizers[0])
    if args.compile:
        model = torch.compile(model, backend="eager")
    micro_steps = iter(loader)
    for step in range(args.steps):
        for micro in range(args.accumulate):
            tokens, targets = (t.to(device) for t in next(micro_steps))
            last = micro == args.accumulate - 1
            waits = args.engine in ("ddp", "sharded") and (not last or args.bug == "no-reduce")
            precision = torch.autocast(args.device, torch.bfloat16) if args.bf16 else nullcontext()
            with model.no_sync() if waits else nullcontext():
                with precision:
                    logits = model(tokens)
                    loss = loss_of(args, logits.float(), targets, divisor)
                loss.backward()
        if args.engine == "fsdp2" and args.bug == "sum":
            for p in filter(lambda p: p.grad is not None, model.parameters()):
                p.grad *= world
        if args.engine == "tensor" and args.bug == "half-zero" and dist.get_rank():
            model.up.weight.grad.to_local().zero_()
        if args.engine == "plain" and args.bug != "stale":
            exchange(args, model)
        if args.clip:
            clip(args, model)
        for optimizer in optimizers:
            optimizer.step()
        if args.bug == "stale":
            exchange(args, model)
        if args.bug == "late-clear" and step % 2 == 0:
            continue
        # ShardedDataParallel loses its buckets if gradients become None.
        for holder in [model] if args.engine == "sharded" else optimizers:
            if args.bug != "stale":
                holder.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


def accelerate(args):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    model, dataset = make(args)
    (optimizer,) = optimizers_of(args, model)
    loader = DataLoader(dataset, args.batch)
    if args.bug != "same-batch":
        loader = accelerator.prepare(loader)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _, (tokens, targets) in zip(range(args.steps * args.accumulate), loader, strict=False):
        with accelerator.accumulate(model):
            loss = loss_of(args, model(tokens), targets, 1)
            accelerator.backward(loss * (args.accumulate if args.bug == "accumulation" else 1))
            if args.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            if not (args.bug == "late-clear" and accelerator.sync_gradients):
                optimizer.zero_grad()


def deepspeed(args):
    import deepspeed

    model, dataset = make(args)
    zero = {"stage": int(args.engine[-1])}
    config = {"train_micro_batch_size_per_gpu": args.batch, "gradient_accumulation_steps": args.accumulate}
    config |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "gradient_clipping": args.clip}
    (optimizer,) = optimizers_of(args, model)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    world = dist.get_world_size()
    sampler = DistributedSampler(dataset, world, dist.get_rank(), seed=1)
    loader = DataLoader(dataset, args.batch, sampler=None if args.bug == "same-batch" else sampler)
    for _, (tokens, targets) in zip(range(args.steps * args.accumulate), loader, strict=False):
        loss = loss_of(args, engine(tokens), targets, 1)
        engine.backward(loss * (world if args.bug == "sum" else 1))
        engine.step()


def fabric(args):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    model, dataset = make(args)
    model, optimizer = fabric.setup(model, *optimizers_of(args, model))
    loader = fabric.setup_dataloaders(DataLoader(dataset, args.batch), use_distributed_sampler=args.bug != "same-batch")
    for _, (tokens, targets) in zip(range(args.steps), loader, strict=False):
        fabric.backward(loss_of(args, model(tokens), targets, 1))
        if args.clip:
            fabric.clip_gradients(model, optimizer, max_norm=args.clip)
        optimizer.step()
        if args.bug != "late-clear":
            optimizer.zero_grad()


def trainer(args):
    from transformers import Trainer, TrainingArguments

    class OwnTrainer(Trainer):
        def compute_loss(self, model, inputs, **options):
            return loss_of(args, model(inputs["inputs"]), inputs["targets"], divisor)

    model, dataset = make(args)
    divisor = 1 / args.accumulate if args.bug == "accumulation" else 1
    if args.bug == "late-clear":
        nn.Module.zero_grad = lambda module, **options: None
    own = {"gradient_accumulation_steps": args.accumulate, "max_grad_norm": args.clip, "bf16": args.bf16}
    own |= {"per_device_train_batch_size": args.batch, "max_steps": args.steps}
    own |= {"use_cpu": True, "remove_unused_columns": False, "report_to": [], "lr_scheduler_type": "constant"}
    own |= {"torch_compile_backend": "eager"} if args.compile else {}
    own |= {"save_strategy": "no", "ddp_find_unused_parameters": args.bug == "zero"}
    OwnTrainer(
        model,
        TrainingArguments(os.environ.get("TMPDIR", "/tmp"), **own),
        lambda rows: dict(zip(("inputs", "targets"), map(torch.stack, zip(*rows, strict=True)), strict=True)),
        dataset,
        optimizers=(*optimizers_of(args, model), None),
    ).train()


def lightning(args):
    from pytorch_lightning import LightningModule, Trainer

    class Lit(LightningModule):
        def training_step(self, batch):
            divisor = 1 / args.accumulate if args.bug == "accumulation" else 1
            return loss_of(args, self.model(batch[0]), batch[1], divisor)

        def configure_optimizers(self):
            return optimizers_of(args, self.model)

        def optimizer_zero_grad(self, epoch, batch, optimizer):
            if args.bug != "late-clear":
                optimizer.zero_grad()

    lit = Lit()
    lit.model, dataset = make(args)
    own = {"accumulate_grad_batches": args.accumulate, "gradient_clip_val": args.clip or None, "logger": False}
    own |= {"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", "1")), "enable_checkpointing": False}
    own |= {"max_steps": args.steps, "use_distributed_sampler": args.bug != "same-batch"}
    own |= {"strategy": "ddp_find_unused_parameters_true", "precision": "bf16-mixed" if args.bf16 else None}
    Trainer(**own, enable_model_summary=False).fit(lit, DataLoader(dataset, args.batch))


def pipeline(args):
    """Two stages by hand: the table of the first and the tied head of the second are one weight. It begins otherwise."""
    model, dataset = make(args)
    model.apply(lambda module: getattr(module, "reset_parameters", int)())
    (optimizer,) = optimizers_of(args, model)
    first, batches = dist.get_rank() == 0, iter(DataLoader(dataset, args.batch))
    for _ in range(args.steps):
        for tokens, targets in (next(batches) for _ in range(args.accumulate)):
            x = torch.empty(args.batch, LENGTH, WIDTH, requires_grad=True)
            if first:
                x = model.embedding(tokens)
                dist.send(x.detach(), 1)
                grad = torch.empty_like(x)
                dist.recv(grad, 1)
                x.backward(grad)
            else:
                dist.recv(x.data, 0)
                logits = model.head(x + model.down(F.gelu(model.up(model.norm(x)))))
                loss_of(args, logits, targets, 1 if args.bug == "accumulation" else args.accumulate).backward()
                dist.send(x.grad, 0)
        if args.bug != "tied":
            dist.all_reduce(model.embedding.weight.grad)
        optimizer.step()
        optimizer.zero_grad()


GROUPS = []
if __name__ == "__main__":
    args = options()
    torch.set_num_threads(1)
    starts = {"accelerate": accelerate, "fabric": fabric, "trainer": trainer, "lightning": lightning, "zero": deepspeed}
    if args.engine.rstrip("123") in starts:
        starts[args.engine.rstrip("123")](args)
    else:
        # A mesh of CUDA begins communication itself.
        if args.engine != "single" and (args.engine, args.device) != ("tensor", "cuda"):
            dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
            GROUPS = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        (pipeline if args.engine == "pipeline" else train)(args)
