import numpy as np
import pytest

from gptscale.common.errors import DataError
from gptscale.lenet.data.idx import find, read, read_pair


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_is_read_as_written(tmp_path, write_idx, packed):
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 4)).astype(np.uint8)
    images = read(write_idx(tmp_path / "images", pixels, packed=packed), "images")
    assert np.array_equal(images, pixels)
    assert not images.flags.writeable
    assert isinstance(images, np.memmap) != packed
    labels = read(write_idx(tmp_path / "labels", np.arange(7), packed=packed), "labels")
    assert labels.tolist() == list(range(7))


def test_real_mnist(real_mnist):
    images, labels = read_pair(find(real_mnist, "t10k-images-idx3-ubyte"), find(real_mnist, "t10k-labels-idx1-ubyte"))
    assert images.shape == (10000, 28, 28)
    assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert labels[0] == 7


FAULTS = {
    "labels for images": (lambda p, w: w(p, np.arange(9)), "magic 0x00000801, expected 0x00000803"),
    "four bytes of another kind": (lambda p, w: p.write_bytes(b"\x89PNG"), "magic 0x89504e47, expected 0x00000803"),
    "four bytes": (lambda p, w: p.write_bytes(b"\0\0\x08\x03"), "4 bytes, expected a header of 16"),
    "floats": (lambda p, w: w(p, np.zeros((2, 2, 2)), magic=0x0D03), "magic 0x00000d03, expected 0x00000803"),
    "two bytes": (lambda p, w: p.write_bytes(b"\0\0"), "2 bytes, expected a header of 16"),
    "empty": (lambda p, w: p.write_bytes(b""), "0 bytes, expected a header of 16"),
    "cut": (
        lambda p, w: p.write_bytes(w(p, np.zeros((3, 28, 28))).read_bytes()[:-5]),
        "2363 bytes, expected 2368 for 3 x 28 x 28 images",
    ),
    "too long": (
        lambda p, w: p.write_bytes(w(p, np.zeros((3, 2, 2))).read_bytes() + b"xyz"),
        "31 bytes, expected 28 for 3 x 2 x 2 images",
    ),
    "gzip cut": (
        lambda p, w: p.write_bytes(w(p, np.random.default_rng(0).integers(0, 256, (3, 28, 28)), packed=True).read_bytes()[:-900]),
        r"the gzip stream ends after 1\d\d\d bytes, expected 2368",
    ),
    "gzip damaged": (
        lambda p, w: p.write_bytes(w(p, np.zeros((3, 28, 28)), packed=True).read_bytes()[:-8] + b"\1" * 8),
        "the gzip stream is damaged",
    ),
}  # fmt: skip


@pytest.mark.promise("S18 | a damaged MNIST file | refused with both numbers")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_refused_with_both_numbers(tmp_path, write_idx, fault):
    harm, message = FAULTS[fault]
    path = tmp_path / "images"
    harm(path, write_idx)
    with pytest.raises(DataError, match=message) as caught:
        read(path, "images")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.promise("S18")
def test_counts_that_differ(tmp_path, write_idx):
    images, labels = write_idx(tmp_path / "i", np.zeros((3, 2, 2))), write_idx(tmp_path / "l", np.zeros(4))
    with pytest.raises(DataError, match="3 images but 4 labels"):
        read_pair(images, labels)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="images does not exist"):
        read(tmp_path / "images", "images")
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte is missing"):
        find(tmp_path, "t10k-labels-idx1-ubyte")
