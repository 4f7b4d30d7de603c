"""Where the ranks of a run are on its axes: torch's own mesh, and that of Colossal-AI, are asked too."""

import dataclasses

import numpy as np
import pytest

from gptscale.common.process.world import world_of
from gptscale.common.settings.mesh import Mesh
from gptscale.common.settings.plan_file import PLANNED
from gptscale.common.settings.run import changed_work, todays_workload
from gptscale.common.settings.run_config import FIXED, KEPT, NOT_WORK, SPLIT, RunConfig
from gptscale.launchers.run.options import default_recipe_config
from gptscale.launchers.run.preflight import mesh_of, preflight
from gptscale.recipes import get


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 3, "tp": 4}, {"dp": 2, "pp": 2, "tp": 1}, {"tp": 4}])
def test_places_are_those_of_rows_in_order(sizes):
    """As init_device_mesh and Colossal-AI's ProcessGroupMesh lay ranks out."""
    mesh, shape = Mesh(sizes), tuple(sizes.values())
    for rank in range(np.prod(shape)):
        assert [mesh.place(axis, rank) for axis in sizes] == list(np.unravel_index(rank, shape))
    for i, axis in enumerate(sizes):
        assert mesh.ranks(axis) == [
            *np.moveaxis(np.arange(np.prod(shape)).reshape(shape), i, 0).reshape(shape[i], -1)[:, 0]
        ]
    assert (mesh.size("ep"), mesh.place("ep", 1)) == (1, 0)


MESHES = {
    "single": (1, {}, {"pp": 1, "dp": 1, "cp": 1, "tp": 1}),
    "ddp": (4, {}, {"pp": 1, "dp": 4, "cp": 1, "tp": 1}),
    "tensor_parallel": (4, {}, {"pp": 1, "dp": 1, "cp": 1, "tp": 4}),
    "pipeline": (4, {"pp_size": 4}, {"pp": 4, "dp": 1, "cp": 1, "tp": 1}),
    "hybrid_3d": (8, {"tp_size": 2, "pp_size": 2}, {"pp": 2, "dp": 2, "cp": 1, "tp": 2}),
    "context_parallel": (8, {"cp_size": 2}, {"pp": 1, "dp": 4, "cp": 2, "tp": 1}),
    "colossal_tensor": (8, {"tp_size": 2}, {"dp": 4, "pp": 1, "tp": 2}),
    "colossal_pipeline": (8, {"tp_size": 2}, {"dp": 1, "pp": 4, "tp": 2}),
}


@pytest.mark.parametrize("recipe", MESHES)
def test_the_mesh_of_a_recipe(recipe):
    world_size, options, sizes = MESHES[recipe]
    mesh = mesh_of(recipe, RunConfig(**options), world_size)
    assert list(mesh.sizes.items()) == list(sizes.items())
    assert tuple(mesh.sizes) == get(recipe).mesh


OPTIONS = {field.name for field in dataclasses.fields(RunConfig)}
OTHER = {"model": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 32, "vocab_size": 300, "seq_len": 16, "dropout": 0.1}
OTHER |= {"activation": "gelu_erf", "data": "synthetic", "seed": 5, "steps": 7, "global_batch_size": 4}
OTHER |= {"precision": "bf16", "on_spike": "skip", "min_lr_ratio": 0.2, "weight_decay": 0.0, "clip_grad_norm": 0.0}
OTHER |= {"beta1": 0.8, "beta2": 0.9, "decay_from": 3, "muon_momentum": 0.9}
OTHER |= {"optimizer": "sgd", "optimizer_state": "bf16", "lr": 0.5, "lr_schedule": "constant", "warmup_steps": 1}


def work(tmp_path, **options):
    config = RunConfig(**{"out": tmp_path, "device": "cpu"} | options)
    return preflight("single", config, default_recipe_config("single"), world_of("cpu", 0, 1)).work


def test_the_lists_name_options():
    assert {*SPLIT, *KEPT, *NOT_WORK, *FIXED, *PLANNED} <= OPTIONS
    assert set(OTHER) == OPTIONS - NOT_WORK


@pytest.mark.parametrize("option", OTHER)
def test_each_other_option_is_work(option, tmp_path):
    assert work(tmp_path, **{option: OTHER[option]}) != work(tmp_path)


def test_a_recorded_workload_is_its_own_todays_workload(tmp_path):
    recorded = work(tmp_path, on_spike="skip")
    assert todays_workload(recorded, {}) == recorded


def test_a_checkpoint_of_an_older_version_tells_what_changes(tmp_path):
    now = work(tmp_path, beta1=0.8)
    older = {name: now[name] for name in now if name not in ("beta1", "beta2", "optimizer_state", "on_spike")}
    older |= {"betas": [0.9, 0.95], "optimizer_state_precision": "bf16"}
    assert sorted(changed_work(older, now)) == ["beta1 was 0.9, is 0.8", "optimizer_state was bf16, is fp32"]
