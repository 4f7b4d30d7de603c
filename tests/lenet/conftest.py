from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in this process compute with as many threads as the processes that they are held to, bit by bit."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def write_idx() -> Callable[..., Path]:
    """Writes an idx file of unsigned bytes."""

    def write(path: Path, array: np.ndarray, magic: int | None = None, packed: bool = False) -> Path:
        header = (0x0800 + array.ndim if magic is None else magic).to_bytes(4, "big")
        content = header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.astype(np.uint8).tobytes()
        path.write_bytes(gzip.compress(content) if packed else content)
        return path

    return write


@pytest.fixture
def idx_folder(tmp_path: Path, write_idx: Callable[..., Path]) -> Path:
    """MNIST's four files with 96 and 41 images of noise, the test images gzipped."""
    folder, random = tmp_path / "raw", np.random.default_rng(0)
    folder.mkdir()
    for start, n, packed in (("train", 96, False), ("t10k", 41, True)):
        end = ".gz" if packed else ""
        write_idx(folder / f"{start}-images-idx3-ubyte{end}", random.integers(0, 256, (n, 28, 28)), packed=packed)
        write_idx(folder / f"{start}-labels-idx1-ubyte", np.arange(n) % 10)
    return folder


@pytest.fixture
def real_mnist(shared_data: Path) -> Path:
    folder = shared_data / "MNIST" / "raw"
    if not folder.is_dir():
        pytest.skip("needs MNIST/raw in shared/data beside the checkout")
    return folder


@pytest.fixture
def cifar_sample(shared_data: Path) -> Path:
    folder = shared_data / "cifar10-sample"
    if not folder.is_dir():
        pytest.skip("needs cifar10-sample in shared/data beside the checkout")
    return folder
