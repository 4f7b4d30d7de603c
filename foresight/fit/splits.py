"""The splits that `gptscale fit` writes: what is a split's own in a program, around the `shard` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gptscale.foresight.fit.python_text import Words, as_python

# What most splits have in the places of the template.
STATE = 'state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))\n'
SHARED = {
    "DATA_RANKS": "WORLD",
    "DATA_RANK": "RANK",
    "constants": "",
    "begin": "dist.init_process_group()",
    "definitions": "",
    "groups": (
        "trained = [p for p in model.parameters() if p.requires_grad]\n"
        'groups: list[Any] = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": o.weight_decay}]\n'
        'groups += [{"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]'
    ),
    "after": "return model, optimizer",
    "sync": "",
    "backward": "(loss / count).backward()",
    "mean": "dist.all_reduce(total)\nreturn float(total) / WORLD",
    "step": (
        "norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip).full_tensor())\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()"
    ),
    "save": f'{STATE}dcp.save(state, checkpoint_id=f"{{o.save}}/{{step + 1}}.part")',
    "load": (
        f'{STATE}dcp.load(state, checkpoint_id=f"{{o.save}}/{{first}}")\n'
        'set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])'
    ),
    "barrier": "dist.barrier()",
    "end": "dist.destroy_process_group()",
    "weights": "model.parameters()",
    "gradient": "p.grad.full_tensor()",
    "check_ranks": "2",
    "check_env": "",
}
WHOLE = {"gradient": "p.grad", "step": SHARED["step"].replace(".full_tensor()", "")}
SINGLE = {"mean": "return float(total)", "barrier": "", "before": "model.to(DEVICE)", **WHOLE}
DDP = {
    "before": "model = shard(model.to(DEVICE), DDPConfig({config}))",
    "sync": "model.require_backward_grad_sync = micro == count - 1",
    **WHOLE,
}
DTYPE = 'dtype = torch.bfloat16 if o.precision == "bf16" else torch.float32\n'
BLOCK_CLASS = "next(type(m) for m in model.modules() if type(m).__name__ == BLOCK)"
BLOCK_CLASSES = "{type(m) for m in model.modules() if type(m).__name__ == BLOCK}"
FSDP_SPLIT = f"""\
{DTYPE}block_class = {BLOCK_CLASS}
mesh = init_device_mesh(DEVICE.type, {{mesh}})
config = FSDPConfig({{config}})
shard(model, block_class, config, mesh, dtype)"""
ACCELERATE = {
    "before": "model.to(DEVICE)",
    "after": (
        f"{DTYPE}block_classes = {BLOCK_CLASSES}\n"
        "config = AccelerateFSDPConfig({config})\n"
        '_, model, prepared = shard(model, optimizer, config, block_classes, dtype, cpu=DEVICE.type == "cpu")\n'
        "return model, prepared.optimizer"
    ),
}
ZERO = {
    "after": "return shard(model, optimizer, json), optimizer",
    "begin": (
        "# Or it compiles, on a CPU, an operator that only inference uses.\n"
        "deepspeed.ops.__compatible_ops__ = {}\n"
        "deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)"
    ),
    "backward": "model.backward(loss)\nif micro < count - 1:\n    model.step()",
    "step": "model.step()\nnorm = float(model.get_global_grad_norm() or 0.0)",
    "save": 'model.save_checkpoint(o.save, tag=f"{step + 1}.part", save_latest=False)',
    "load": "model.load_checkpoint(o.save, tag=str(first))",
    "weights": "model.module.parameters()",
    "gradient": "safe_get_full_grad(p)",
    "check_env": ', "DS_ACCELERATOR": "cpu"',
}

# The ways in which a module is cut over tensor ranks, by the words of transformers.
STYLES = {
    "colwise": "ColwiseParallel()",
    "rowwise": "RowwiseParallel()",
    "embedding_rowwise": "RowwiseParallel(input_layouts=Replicate())",
    "colwise_gather_output": "ColwiseParallel(output_layouts=Replicate())",
    # A norm of each head, on (batch, sequence, heads, size): it sees the heads of its rank.
    "replicated_with_grad_allreduce": "SequenceParallel(sequence_dim=2, use_local_output=True)",
}
# Weights of the two meshes, and those that are whole everywhere, are neither clipped nor updated in one call.
TENSOR = {
    "DATA_RANKS": "(WORLD // TP)",
    "DATA_RANK": "RANK // TP",
    "before": (
        'mesh = init_device_mesh(DEVICE.type, (WORLD // TP, TP), mesh_dim_names=("data", "tensor"))\n'
        'shard(model, {name: STYLES[style] for name, style in PLAN.items()}, mesh["tensor"]).to(DEVICE)'
    ),
    "step": (
        "norms = [full(torch.linalg.vector_norm(p.grad)) for p in model.parameters() if p.grad is not None]\n"
        "norm = torch.linalg.vector_norm(torch.stack(norms))\n"
        "torch.nn.utils.clip_grads_with_norm_(model.parameters(), o.clip, norm, foreach=False)\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()"
    ),
    "groups": (
        "groups: list[Any] = []\n"
        "trained = [p for p in model.parameters() if p.requires_grad]\n"
        'for own in {getattr(p, "device_mesh", None) for p in trained}:\n'
        '    of_mesh = [p for p in trained if getattr(p, "device_mesh", None) == own]\n'
        '    groups += [{"params": [p for p in of_mesh if p.dim() > 1], "weight_decay": o.weight_decay}]\n'
        '    groups += [{"params": [p for p in of_mesh if p.dim() < 2], "weight_decay": 0.0}]'
    ),
    "gradient": "full(p.grad)",
    "definitions": (
        f"STYLES = {as_python({name: Words(code) for name, code in STYLES.items()}, 0)}\n\n\n"
        "def full(tensor: torch.Tensor) -> torch.Tensor:\n"
        '    """Return all of a tensor, of which this process may hold a part."""\n'
        "    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor\n\n"
    ),
}
DATA = f'{DTYPE}shard_data(model, {BLOCK_CLASS}, mesh["data"], dtype)'


@dataclass(frozen=True)
class Split:
    """A way to split a model over devices, and what is its own in a program.

    title: what the program does. recipe: the module whose `shard` stands in it. config: the values of its dataclass, by field.
    needs: what a model must have for it, "blocks" or "plan". own: text for the places of the template. autocast: whether products
    are cast in the loop, and not by the engine. zero: DeepSpeed's stage and where its state is, None for others. tensor: ranks
    that share each matrix. least: ranks of the smallest world that does all of it.
    """

    title: str
    own: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    autocast: bool = False
    zero: tuple[int, str] | None = None
    tensor: int = 1
    least: int = 2


def splits(gpus: int, per_node: int) -> dict[str, Split]:
    """Return the splits that there are for a number of devices, by their names."""
    if gpus == 1:
        return {"single": Split("on one device", SINGLE, autocast=True, least=1)}
    found = {
        "ddp": Split(
            "on replicas that average gradients",
            DDP,
            "ddp",
            {"bucket_cap_mb": 25.0, "static_graph": False},
            autocast=True,
        )
    }
    plain, node = "(WORLD,)", '(WORLD // NODE, NODE), mesh_dim_names=("replicas", "shards")'
    for name, title, mesh, offload in (
        ("fsdp", "with its state cut over all devices", plain, False),
        ("fsdp offload", "with its state cut over all devices and kept on the host", plain, True),
        ("hsdp", f"with its state cut over the {per_node} devices of a node", node, False),
    ):
        if name != "hsdp" or gpus > per_node:
            config = {"reshard_after_forward": True, "prefetch": 1, "cpu_offload": offload}
            own = {"before": FSDP_SPLIT.replace("{mesh}", mesh)}
            if name == "hsdp":
                own |= {"constants": f"NODE = min({per_node}, max(1, WORLD // 2))", "check_ranks": "4"}
            found[name] = Split(title, own, "fsdp", config, least=4 if name == "hsdp" else 2)
    for stage, what in (1, "optimizer"), (2, "optimizer and gradients"), (3, "optimizer, gradients and weights"):
        for where, of_host in ("none", ""), ("cpu", " and kept on the host"):
            if stage > 1 or where == "none":
                title = f"by DeepSpeed with {what} cut over all devices{of_host}"
                found[f"zero{stage}{' offload' * (where == 'cpu')}"] = Split(title, ZERO, "zero", zero=(stage, where))
    for tensor in (n for n in (2, 4, 8) if n <= per_node and gpus % n == 0):
        what = f"with each matrix cut over {tensor} devices"
        if tensor == gpus:
            own = TENSOR | {"constants": "TP = WORLD"}
            found["tensor"] = Split(what, own, "tensor_parallel", needs=("plan",), autocast=True, tensor=tensor)
        else:
            own = TENSOR | {"constants": f"TP = min({tensor}, max(2, WORLD // 2))", "check_ranks": "4"}
            own["before"] += f"\n{DATA}"
            title = f"{what}, and its state over the other ranks"
            found[f"tensor {tensor} x fsdp"] = Split(
                title, own, "tensor_parallel", needs=("plan", "blocks"), tensor=tensor, least=4
            )
    title = "by Accelerate with its state cut over all devices"
    found["accelerate"] = Split(title, ACCELERATE, "accelerate_fsdp", {"reshard_after_forward": True}, ("blocks",))
    return found
