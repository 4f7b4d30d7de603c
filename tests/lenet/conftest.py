import gzip
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from vision_runs import LONG
from vision_runs import run as trained
from worlds import overridden

from gptscale.launchers.cli import main
from gptscale.lenet.run.preflight import world_from_environment
from gptscale.lenet.run.worker import train
from gptscale.lenet.studies import grid as grid_module


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Give runs in this process as many threads as the processes have to which they are compared bit by bit."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def write_idx():
    """Return a function that writes an idx file of unsigned bytes."""

    def write(path, array, magic=None, packed=False):
        header = (0x0800 + array.ndim if magic is None else magic).to_bytes(4, "big")
        content = header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.astype(np.uint8).tobytes()
        path.write_bytes(gzip.compress(content) if packed else content)
        return path

    return write


@pytest.fixture(scope="session")
def idx_folder(tmp_path_factory, write_idx):
    """Write MNIST's four files with 96 and 41 images of noise, with the test images gzipped."""
    folder, random = tmp_path_factory.mktemp("raw"), np.random.default_rng(0)
    for start, n, packed in (("train", 96, False), ("t10k", 41, True)):
        end = ".gz" if packed else ""
        write_idx(folder / f"{start}-images-idx3-ubyte{end}", random.integers(0, 256, (n, 28, 28)), packed=packed)
        write_idx(folder / f"{start}-labels-idx1-ubyte", np.arange(n) % 10)
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory, idx_folder):
    """Train a run from its beginning to its end, with which those that stop or have another loop are compared."""
    return trained(tmp_path_factory.mktemp("out"), "whole", data=str(idx_folder), log_every=1, **LONG)


@pytest.fixture
def real_mnist(shared_data):
    folder = shared_data / "MNIST" / "raw"
    if not folder.is_dir():
        pytest.skip("needs MNIST/raw in shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def cifar_sample(shared_data):
    folder = shared_data / "cifar10-sample"
    if not folder.is_dir():
        pytest.skip("needs cifar10-sample in shared/data beside the checkout")
    return folder


@pytest.fixture
def undrawn():
    """Leave out the pixels of figures, which take long. Each study draws its own in one test, and the report in another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path, **options: path.write_bytes(b"\x89PNG"))
        yield


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return a function that runs a study for a few steps of the embedded digits, checks its files and returns its rows.

    Runs that need no second process run in this one, because starting Python costs more than the few steps.
    """
    pytest.importorskip("sklearn")
    run_in_processes = grid_module.run_cell

    def run(config, cell, place):
        if cell.nproc > 1 or config.strategy in ("ddp", "fabric"):
            run_in_processes(config, cell, place)
        else:
            config = replace(config, verdict=False)
            assert train(config, world_from_environment(config)).exit_status in (0, *cell.accepts)

    monkeypatch.setattr(grid_module, "run_cell", run)

    def study(name, *words, ends=("ok",)):
        files = {kind: tmp_path / f"s.{kind}" for kind in ("csv", "md", "png")}
        outputs = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
        common = "--repeats 1 --epochs 1 --max-steps 6 --device cpu --out".split()
        assert main([*overridden(("lenet", name, *common, str(tmp_path / "out"), *outputs, *words))]) == 0
        assert files["png"].read_bytes().startswith(b"\x89PNG")
        assert "report " in files["md"].read_text()
        rows = pd.read_csv(files["csv"])
        assert (rows.study == name).all()
        assert set(rows.status) == set(ends)
        assert (rows.n_test == 449).all()
        return rows.set_index("variant")

    return study
