import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gptscale.common.errors import ConfigError, DataError
from gptscale.lenet.data import sources
from gptscale.lenet.data.sources import open_data, read_digits


def test_digits_say_what_they_are_and_hold_a_quarter_out(tmp_path):
    pytest.importorskip("sklearn")
    data = open_data("digits", root=tmp_path)
    assert "8x8, upsampled to 28x28" in data.name
    assert (len(data.train), len(data.test)) == (1348, 449)
    assert data.train.images.shape == (1348, 1, 28, 28)
    assert data.train.images.dtype == torch.uint8
    assert int(data.train.images.max()) == 255
    assert sorted(set(data.test.labels.tolist())) == list(range(10))
    assert open_data("digits", root=tmp_path, image_size=32).side == 32
    assert not list(tmp_path.iterdir())


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = read_digits()
    assert np.array_equal(images, datasets.load_digits().images)
    assert np.array_equal(labels, datasets.load_digits().target)


def test_idx_folder(idx_folder):
    data = open_data(str(idx_folder), root=Path("nowhere"))
    assert (len(data.train), len(data.test), data.side, data.channels) == (96, 41, 28, 1)
    assert data.train.labels.tolist() == [i % 10 for i in range(96)]
    assert open_data(str(idx_folder), root=Path("nowhere"), image_size=32).train.images.shape == (96, 1, 32, 32)


def test_torchvisions_folder_is_read_in_place(idx_folder, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(idx_folder, root / "MNIST" / "raw")
    assert open_data("mnist", root=root).fingerprint == open_data(str(idx_folder), root=root).fingerprint


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_what_is_not_there_is_not_downloaded_unasked(data, tmp_path):
    with pytest.raises(DataError, match="add --download"):
        open_data(data, root=tmp_path / "root")
    assert not (tmp_path / "root").exists()


def folder_of_images(root, grey=False):
    random = np.random.default_rng(0)
    for part, n in (("train", 5), ("test", 3)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for i in range(n):
                pixels = random.integers(0, 256, (40, 40) if grey else (40, 40, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


@pytest.mark.parametrize("grey", [False, True])
def test_image_folders(tmp_path, grey):
    data = open_data(str(folder_of_images(tmp_path / "pets", grey)), root=tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.train.images.shape == (10, 1 if grey else 3, 32, 32)
    assert data.test.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_bad_folders(tmp_path):
    pets = folder_of_images(tmp_path / "pets")
    (pets / "train" / "dog" / "9.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"9\.jpg is no whole image"):
        open_data(str(pets), root=tmp_path)
    (pets / "train" / "dog" / "9.jpg").unlink()
    whole = (pets / "test" / "cat" / "0.png").read_bytes()
    (pets / "test" / "cat" / "0.png").write_bytes(whole[:100])
    with pytest.raises(DataError, match=r"0\.png is no whole image"):
        open_data(str(pets), root=tmp_path)
    shutil.rmtree(pets / "test")
    with pytest.raises(DataError, match="no test images"):
        open_data(str(pets), root=tmp_path)
    (pets / "test" / "horse").mkdir(parents=True)
    with pytest.raises(DataError, match=r"test has classes that train has not: \['horse'\]"):
        open_data(str(pets), root=tmp_path)
    with pytest.raises(DataError, match="neither idx files nor train/CLASS/ folders"):
        open_data(str(tmp_path), root=tmp_path)
    with pytest.raises(DataError, match=r"mnits is no folder.*did you mean 'mnist'"):
        open_data("mnits", root=tmp_path)


def test_without_scikit_learn_the_pip_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gptscale\[lenet\]'"):
        open_data("digits", root=tmp_path)
