"""Where the ranks of a run are on its axes: torch's own mesh, and that of Colossal-AI, are asked too."""

import numpy as np
import pytest

from gptscale.common.settings.mesh import Mesh
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.preflight import mesh_of
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
    assert mesh.size("cp") == 1


def test_an_axis_splits_into_others_in_its_place():
    split = Mesh({"pp": 2, "dp": 6, "tp": 4}).split("dp", replicate=3, shard=2)
    assert list(split.sizes.items()) == [("pp", 2), ("replicate", 3), ("shard", 2), ("tp", 4)]


MESHES = {
    "single": (1, {}, {"pp": 1, "dp": 1, "tp": 1}),
    "ddp": (4, {}, {"pp": 1, "dp": 4, "tp": 1}),
    "tensor_parallel": (4, {}, {"pp": 1, "dp": 1, "tp": 4}),
    "pipeline": (4, {"pp_size": 4}, {"pp": 4, "dp": 1, "tp": 1}),
    "hybrid_3d": (8, {"tp_size": 2, "pp_size": 2}, {"pp": 2, "dp": 2, "tp": 2}),
    "colossal_tensor": (8, {"tp_size": 2}, {"dp": 4, "pp": 1, "tp": 2}),
    "colossal_pipeline": (8, {"tp_size": 2}, {"dp": 1, "pp": 4, "tp": 2}),
}


@pytest.mark.parametrize("recipe", MESHES)
def test_the_mesh_of_a_recipe(recipe):
    world_size, options, sizes = MESHES[recipe]
    mesh = mesh_of(recipe, RunConfig(**options), world_size)
    assert list(mesh.sizes.items()) == list(sizes.items())
    assert tuple(mesh.sizes) == get(recipe).mesh
