"""The splits that `gptscale fit` writes: what is a split's own in a program, around the `shard` of a recipe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import getsource

from gptscale.common.model.chain import Sent, keep_stage
from gptscale.foresight.fit.template import MICROS

# Code that most splits put into the places of the template.
STATE = 'state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))\n'
PAIRS = "zip(model.parameters(), true.parameters(), strict=True) if q.grad is not None]"
ADAMW = "lr=o.lr, betas=(0.9, 0.95), fused=True)"
SHARED = {
    "DATA_RANKS": "WORLD",
    "DATA_RANK": "RANK",
    "constants": "",
    "begin": "dist.init_process_group()",
    "definitions": "",
    "groups": (
        "trained = [p for p in model.parameters() if p.requires_grad]\n"
        'groups: list[Any] = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": o.weight_decay}]\n'
        'groups += [{"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]\n'
        f'optimizer = torch.optim.AdamW([group for group in groups if group["params"]], {ADAMW}'
    ),
    "after": "return model, optimizer",
    "train": "train()",
    "micros": MICROS,
    "sync": "",
    "backward": "(loss / count).backward()",
    "mean": "dist.all_reduce(total)\nreturn float(total) / WORLD",
    "step": (
        "norm = float(nn.utils.clip_grad_norm_(model.parameters(), o.clip).full_tensor())\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()"
    ),
    # torch writes it when all else of a checkpoint is written.
    "saved": 'int(file.parent.name) for file in Path(o.save).glob("*/.metadata")',
    "save": f'{STATE}dcp.save(state, checkpoint_id=f"{{o.save}}/{{step + 1}}")',
    "load": (
        f'{STATE}dcp.load(state, checkpoint_id=f"{{o.save}}/{{first}}")\n'
        'set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])'
    ),
    "end": "dist.destroy_process_group()",
    "pairs": f"pairs = [(p, q.grad) for p, q in {PAIRS}",
    "gradient": "p.grad.full_tensor()",
    "check_ranks": "2",
    "check_env": "",
}
WHOLE = {"gradient": "p.grad", "step": SHARED["step"].replace(".full_tensor()", "")}
SINGLE = {"mean": "return float(total)", "before": "model.to(DEVICE)", **WHOLE}
DDP = {
    "before": "model = shard(model.to(DEVICE), {config})",
    "sync": "model.require_backward_grad_sync = micro == count - 1",
    **WHOLE,
}
DTYPE = 'dtype = torch.bfloat16 if o.precision == "bf16" else torch.float32\n'
BLOCK_CLASS = "next(type(m) for m in model.modules() if type(m).__name__ in BLOCK)"
BLOCK_CLASSES = "{type(m) for m in model.modules() if type(m).__name__ in BLOCK}"
FSDP_SPLIT = f"""\
{DTYPE}mesh = init_device_mesh(DEVICE.type, {{mesh}})
config = FSDPConfig({{config}})
shard(model, {BLOCK_CLASS}, config, mesh, dtype)"""
ACCELERATE = {
    "before": "model.to(DEVICE)",
    "after": (
        f"{DTYPE}_, model, prepared = shard(model, optimizer, {BLOCK_CLASSES}, dtype)\nreturn model, prepared.optimizer"
    ),
}
ZERO = {
    "after": "return shard(model, optimizer, json), optimizer",
    "begin": (
        "deepspeed.ops.__compatible_ops__ = {}  # or it compiles, on a CPU, an operator that only inference uses\n"
        "deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)"
    ),
    "backward": "model.backward(loss)\nif micro < count - 1:\n    model.step()",
    "step": "model.step()\nnorm = float(model.get_global_grad_norm() or 0.0)",
    "saved": 'int(folder.name) for folder in Path(o.save).glob("[0-9]*") if folder.name.isdecimal()',
    "save": (
        'model.save_checkpoint(o.save, tag=f"{step + 1}.part", save_latest=False)\n'
        "if RANK == 0:\n"
        '    os.rename(f"{o.save}/{step + 1}.part", f"{o.save}/{step + 1}")'
    ),
    "load": "model.load_checkpoint(o.save, tag=str(first))",
    "pairs": SHARED["pairs"].replace("model.", "model.module."),
    "gradient": "deepspeed.utils.safe_get_full_grad(p)",
    "check_env": ', "DS_ACCELERATOR": "cpu"',
}

# A norm of each group of weights, of which each has one mesh.
NORM = (
    'grads = [[p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]\n'
    "norm = torch.linalg.vector_norm(torch.stack([nn.utils.get_total_norm(each).full_tensor() for each in grads if each]))\n"
)
CLIPPED = (
    "nn.utils.clip_grads_with_norm_(model.parameters(), o.clip, norm, foreach=False)\n"
    "optimizer.step()\n"
    "optimizer.zero_grad()"
)
# Weights of the two meshes, and those that are whole everywhere, are neither clipped nor updated in one call.
BY_MESH = {
    "groups": (
        "groups: dict[Any, list[nn.Parameter]] = {}\n"
        "for p in (p for p in model.parameters() if p.requires_grad):\n"
        '    groups.setdefault((p.dim() > 1, getattr(p, "device_mesh", None)), []).append(p)\n'
        'alike = [{"params": group, "weight_decay": o.weight_decay * decays} for (decays, _), group in groups.items()]\n'
        f"optimizer = torch.optim.AdamW(alike, {ADAMW}"
    ),
    "step": f"{NORM}{CLIPPED}",
}
FULL = '''

def full(tensor: Tensor) -> Tensor:
    """Return all of a tensor, of which this process may hold a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

'''
OF_TP = "DATA_RANKS, DATA_RANK = WORLD // TP, RANK // TP"
TENSOR = BY_MESH | {
    "DATA_RANKS": "DATA_RANKS",
    "DATA_RANK": "DATA_RANK",
    "before": (
        'mesh = init_device_mesh(DEVICE.type, (DATA_RANKS, TP), mesh_dim_names=("data", "tensor"))\n'
        'parallelize_module(model, mesh["tensor"], PLAN).to(DEVICE)'
    ),
}
# Without FSDP some weights are no DTensors.
ALONE = TENSOR | {
    "step": TENSOR["step"].replace(
        "nn.utils.get_total_norm(each).full_tensor()", "full(nn.utils.get_total_norm(each))"
    ),
    "before": "shard(model, PLAN, init_device_mesh(DEVICE.type, (WORLD,))).to(DEVICE)",
    "constants": "DATA_RANKS, DATA_RANK = 1, 0",
    "definitions": FULL,
    "gradient": "full(p.grad)",
}
DATA = f'{DTYPE}shard_data(model, {BLOCK_CLASS}, mesh["data"], dtype)'

STAGE = f'''\
{getsource(Sent).replace("  # noqa: N818 (it is no error)", "")}

{getsource(keep_stage)}

class Stage(nn.Module):
    """A stage of a model. It calls the whole forward, in which the other stages' modules are empty."""

    def __init__(self, module: nn.Module, index: int, o: argparse.Namespace) -> None:
        super().__init__()
        self.module, self.index, self.o, self.step = module, index, o, 0
        ends = [len(module.get_submodule(CHAIN["blocks"])) * i // STAGES for i in (index, index + 1)]
        keep_stage(module, CHAIN, range(*ends), index == STAGES - 1)

    def forward(self, received: Tensor, number: Tensor) -> Tensor:
        """Return what the next stage gets, or the loss, of the micro-batch of a number."""
        self.module.received = received
        try:
            return loss_of(self.module, self.o, self.step, int(number)).float()
        except Sent as sent:
            return sent.args[0]

'''
FLAT = STATE.replace("optimizer)", "optimizer, options=FLAT)")
PIPELINE = BY_MESH | {
    "DATA_RANKS": "DATA_RANKS",
    "DATA_RANK": "DATA_RANK",
    "definitions": f"FLAT = StateDictOptions(flatten_optimizer_state_dict=True)\n\n\n{STAGE}",
    "train": "train(not o.check)",
    "after": (
        "micro, count = o.micro_batch_size, o.global_batch_size // (o.micro_batch_size * DATA_RANKS)\n"
        'hidden = torch.empty(micro, *HIDDEN, dtype=dtype, device="meta", requires_grad=True)\n'
        'number, loss = torch.arange(1, device="meta"), torch.empty((), device="meta", requires_grad=True)\n'
        "_, model.schedule = shard(\n"
        "    {model.index: model},\n"
        "    STAGES,\n"
        '    mesh["pipeline"],\n'
        '    "1F1B",\n'
        "    count,\n"
        "    lambda loss, _: loss / count,\n"
        "    lambda index: (hidden if index else number, hidden if index < STAGES - 1 else loss),\n"
        ")\n"
        'model.group = mesh.get_group("pipeline")\n'
        "return model, optimizer"
    ),
    "micros": (
        "model.step, losses, numbers = step, [], torch.arange(count) * DATA_RANKS + DATA_RANK\n"
        "first = [numbers] if model.index == 0 else []\n"
        "model.schedule.step(*first, number=numbers, target=numbers, losses=losses, return_outputs=False)\n"
        "total += sum(loss.detach() for loss in losses)"
    ),
    "mean": "dist.all_reduce(total)\nreturn float(total) / (WORLD // STAGES)",
    "step": (
        NORM.replace("norm = torch.linalg.vector_norm(", "square = ").replace("]))", "]).square().sum()")
        + f"dist.all_reduce(square, group=model.group)\nnorm = square.sqrt()\n{CLIPPED}"
    ),
    "save": SHARED["save"].replace(STATE, FLAT),
    "load": SHARED["load"].replace(STATE, FLAT).replace('state["optimizer"])', 'state["optimizer"], options=FLAT)'),
    "pairs": (
        "own, of = model.named_parameters(), dict(true.named_parameters(remove_duplicate=False))\n"
        'pairs = [(p, q.grad) for name, p in own if (q := of[name.removeprefix("module.")]).grad is not None]'
    ),
    "check_ranks": "4",
}
# A weight of the first and the last stage has the gradients of both, and counts once.
ENDS = (
    "\nends = [[i, WORLD - WORLD // STAGES + i] for i in range(WORLD // STAGES)]\n"
    "model.ends = dist.new_subgroups_by_enumeration(ends)[0]"
)
OF_ENDS = (
    "\nif model.index in (0, STAGES - 1):\n"
    "    grad = model.module.get_parameter(TIED[model.index > 0]).grad\n"
    "    dist.all_reduce(grad.to_local(), group=model.ends)"
)
TWIN = "twin = model.module.get_parameter(TIED[1]) if model.index == STAGES - 1 else None\n"
MESH_2D = (
    'mesh = init_device_mesh(DEVICE.type, (STAGES, DATA_RANKS), mesh_dim_names=("pipeline", "data"))\n'
    'model = Stage(model, mesh.get_local_rank("pipeline"), o).to(DEVICE)\n'
)
MESH_3D = (
    'mesh = init_device_mesh(DEVICE.type, (STAGES, DATA_RANKS, TP), mesh_dim_names=("pipeline", "data", "tensor"))\n'
    'model = Stage(model, mesh.get_local_rank("pipeline"), o)\n'
    "own = [name for name, module in model.named_modules() if module._parameters]\n"
    'plan = {name: PLAN[key] for name in own for key in PLAN if fnmatch(name, f"module.{key}")}\n'
    'parallelize_module(model, mesh["tensor"], plan).to(DEVICE)\n'
)


@dataclass(frozen=True)
class Split:
    """A way to split a model over devices, and what is its own in a program.

    title: what the program does. recipe: the module whose `shard` stands in it. config: the values of its dataclass, by field.
    needs: what a model must have for it, "blocks" or "plan". own: text for the places of the template. autocast: whether products
    are cast in the loop, and not by the engine. zero: DeepSpeed's stage and where its state is, None for others. tensor: ranks
    that share each matrix. stages: of a pipeline. least: ranks of the smallest world that does all of it.
    """

    title: str
    own: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    autocast: bool = False
    zero: tuple[int, str] | None = None
    tensor: int = 1
    stages: int = 1
    least: int = 2

    @property
    def sharers(self) -> int:
        """Return the ranks that share each sample."""
        return self.tensor * self.stages


def splits(gpus: int, per_node: int) -> dict[str, Split]:
    """Return the splits that there are for a number of devices, by their names."""
    if gpus == 1:
        return {"single": Split("on one device", SINGLE, autocast=True, least=1)}
    buckets = {"bucket_cap_mb": 25.0, "static_graph": False}
    found = {"ddp": Split("on replicas that average gradients", DDP, "ddp", buckets, autocast=True)}
    plain, node = "(WORLD,)", '(WORLD // NODE, NODE), mesh_dim_names=("replicas", "shards")'
    for name, title, mesh, offload in (
        ("fsdp", "with its state cut over all devices", plain, False),
        ("fsdp offload", "with its state cut over all devices and kept on the host", plain, True),
        ("hsdp", f"with its state cut over the {per_node} devices of a node", node, False),
    ):
        if name != "hsdp" or gpus > per_node:
            config = {"reshard_after_forward": True, "prefetch": 1, "cpu_offload": offload}
            own = {"before": FSDP_SPLIT.replace("{mesh}", mesh), "constants": "FSDPConfig = argparse.Namespace"}
            if name == "hsdp":
                own["constants"] += f"\nNODE = min({per_node}, max(1, WORLD // 2))"
                own["check_ranks"] = "4"
            found[name] = Split(title, own, "fsdp", config, least=4 if name == "hsdp" else 2)
    for stage, what in (1, "optimizer"), (2, "optimizer and gradients"), (3, "optimizer, gradients and weights"):
        for where, of_host in ("none", ""), ("cpu", " and kept on the host"):
            if stage > 1 or where == "none":
                title = f"by DeepSpeed with {what} cut over all devices{of_host}"
                found[f"zero{stage}{' offload' * (where == 'cpu')}"] = Split(title, ZERO, "zero", zero=(stage, where))
    for tensor in (n for n in (2, 4, 8) if n <= per_node and gpus % n == 0):
        what = f"with each matrix cut over {tensor} devices"
        if tensor == gpus:
            found["tensor"] = Split(what, ALONE, "tensor_parallel", needs=("plan",), autocast=True, tensor=tensor)
        else:
            own = TENSOR | {"constants": f"TP = min({tensor}, max(2, WORLD // 2))\n{OF_TP}", "check_ranks": "4"}
            own["before"] += f"\n{DATA.replace('shard_data', 'shard')}"
            title = f"{what}, and its state over the other ranks"
            found[f"tensor {tensor} x fsdp"] = Split(
                title, own, "hybrid_3d", needs=("plan", "blocks"), tensor=tensor, least=4
            )
    for stages, tensor in itertools.product((2, 4, 8), (1, 2, 4, 8)):
        if stages * tensor >= gpus or gpus % (stages * tensor) or tensor > per_node:
            continue
        sizes, few, names = f"{stages}", "2", "STAGES"
        own, data = PIPELINE | {"before": MESH_2D + DATA}, ("WORLD // STAGES", "RANK")
        title = f"in {stages} stages, each with its state over the devices that hold it"
        if tensor > 1:
            sizes, few, names = f"{stages}, {tensor}", "2, 2", "STAGES, TP"
            own |= {"before": MESH_3D + DATA}
            data = ("WORLD // (STAGES * TP)", "RANK // TP")
            title = f"in {stages} stages, with each matrix cut over {tensor} devices, and its state over the others of its stage"
        sizes = sizes if sizes == few else f"({sizes}) if WORLD >= {gpus} else ({few})"
        own["constants"] = f"{names} = {sizes}\nDATA_RANKS = max(1, {data[0]})\nDATA_RANK = {data[1]} % DATA_RANKS"
        found[f"pipeline {stages}{f' x tensor {tensor}' * (tensor > 1)} x fsdp"] = Split(
            title, own, "pipeline", needs=("chain", "plan")[: 1 + (tensor > 1)], tensor=tensor, stages=stages, least=4
        )
    title = "by Accelerate with its state cut over all devices"
    found["accelerate"] = Split(title, ACCELERATE, "accelerate_fsdp", needs=("blocks",))
    return found
