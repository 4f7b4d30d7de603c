"""The data sets: scikit-learn's digits, MNIST's idx files, torchvision's MNIST and CIFAR-10, and folders of images."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gptscale.common.errors import ConfigError, DataError
from gptscale.common.settings.checks import did_you_mean
from gptscale.lenet.data import idx

NAMED = ("digits", "mnist", "cifar10")
IMAGE_ENDS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
# Formats that are read, whatever a file's name says: the decoder of PostScript, for one, starts another program.
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
CIFAR10_CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
# A picture is decoded whole before it is made small. A few bytes can claim to be many more than these, which take 0.5 GiB.
IMAGE_PIXELS_MAX = 2**26
# In scikit-learn's folder. A row has the 64 pixels of a digit and its label. Importing scikit-learn would import scipy's
# statistics too, and take as long as a fifth of a short run.
DIGITS_FILE = "datasets/data/digits.csv.gz"
# Every fourth of the embedded digits is held out for tests.
HELD_OUT_EVERY = 4


@dataclass(frozen=True)
class LabelledImages:
    """Images (n, channels, side, side), which are read as uint8 on the CPU, and their labels as int64 (n,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> LabelledImages:
        return LabelledImages(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class VisionData:
    """A data set in memory.

    name: a description for people of what the images really are. fingerprint: 16 hex digits of the SHA-256 of all images and
    labels.
    """

    name: str
    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]
    fingerprint: str

    @property
    def channels(self) -> int:
        return int(self.train.images.shape[1])

    @property
    def side(self) -> int:
        return int(self.train.images.shape[2])


# The readers below return a name for people, the two parts, and the classes.
Read = tuple[str, LabelledImages, LabelledImages, tuple[str, ...]]


def open_data(data: str, *, root: Path, image_size: int | None = None, download: bool = False) -> VisionData:
    """Open the data set that `data` names: one of NAMED, a folder of idx files, or a folder of images.

    A folder of images has train/CLASS/* and test/CLASS/*. image_size: side to resample to, in pixels. The default is 28 for
    digits, the images' own size for MNIST and CIFAR-10, and 32 for a folder of images. root: the folder in which torchvision
    keeps its data sets, and with `download` stores them. Raises DataError or ConfigError. Without `download` no file is created.
    """
    try:
        if data == "digits":
            name, train, test, classes = _digits(image_size or 28)
        elif data in ("mnist", "cifar10"):
            name, train, test, classes = _torchvision(data, root, download)
        else:
            name, train, test, classes = _folder(Path(data), image_size or 32)
    except OSError as error:
        fix = "check the files, and whose they are"
        raise DataError(f"{data} cannot be read ({error})", "in --data", fix) from None
    train, test = (_resized(part, image_size) for part in (train, test))
    for part, what in ((train, "train"), (test, "test")):
        if len(part) == 0:
            raise DataError(f"no {what} images", f"in {data}", "give a data set with both parts")
        if (highest := int(part.labels.max())) >= len(classes):
            fault = f"label {highest} in the {what} part, expected 0 to {len(classes) - 1}"
            raise DataError(fault, f"in {data}", "give labels of the same classes")
    return VisionData(name, train, test, classes, _fingerprint(train, test))


def _digits(side: int) -> Read:
    """Return scikit-learn's digits, upsampled bilinearly, with every fourth image held out.

    These are 1,797 digits written by 43 people, as 8x8 counts of 0 to 16 (Alpaydin & Kaynak 1998, UCI). The digits of one writer
    lie near each other, so this is a split of images, not of writers.
    """
    counts, labels = map(torch.from_numpy, read_digits())
    images = counts.float().mul_(255 / 16)[:, None]
    larger = F.interpolate(images, (side, side), mode="bilinear", align_corners=False).round().to(torch.uint8)
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    name = f"scikit-learn's handwritten digits (8x8, upsampled to {side}x{side})"
    train, test = (LabelledImages(larger[chosen], labels[chosen]) for chosen in (~held_out, held_out))
    return name, train, test, tuple("0123456789")


def read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (1797, 8, 8), as counts of 0 to 16, and their labels (1797,), as sklearn's load_digits does.

    Raises ConfigError if scikit-learn is not installed, and OSError if its file cannot be read.
    """
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        fix = "pip install 'gptscale[lenet]', or name other data"
        raise ConfigError("scikit-learn, which brings the digits, is not installed", "in --data digits", fix)
    file = Path(spec.submodule_search_locations[0]) / DIGITS_FILE
    table = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def _torchvision(data: str, root: Path, download: bool) -> Read:
    """Return torchvision's MNIST or CIFAR-10 under `root`.

    Files of MNIST that are already there are read by this package's own reader.
    """
    if data == "mnist" and idx.is_idx_folder(root / "MNIST" / "raw") and not download:
        return _idx_folder(root / "MNIST" / "raw")
    try:
        from torchvision import datasets
    except ImportError:
        fix = "pip install 'gptscale[lenet]', or name a folder"
        raise ConfigError("torchvision is not installed", f"in --data {data}", fix) from None
    if download:
        # torchvision draws its own progress bar after this line.
        print(f"downloading {data} to {root}", file=sys.stderr, flush=True)
    dataset_class: Callable[..., Any] = datasets.MNIST if data == "mnist" else datasets.CIFAR10
    try:
        train_and_test = [dataset_class(str(root), train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        fix = "check the connection" if download else f"add --download, or --data-dir to where it is (not {root})"
        raise DataError(f"{data} is not there ({reason})", "in --data", fix) from None
    except OSError as error:
        raise DataError(f"{data} was not downloaded ({error})", "in --download", "check the connection") from None
    parts = []
    for part in train_and_test:
        pixels = torch.as_tensor(part.data)
        images = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
        parts.append(LabelledImages(images, torch.as_tensor(part.targets).long()))
    name, classes = ("MNIST", tuple("0123456789")) if data == "mnist" else ("CIFAR-10", CIFAR10_CLASSES)
    return name, parts[0], parts[1], classes


def _folder(folder: Path, side: int) -> Read:
    if not folder.is_dir():
        fix = f"give {', '.join(NAMED)} or a folder; {did_you_mean(str(folder), NAMED)}"
        raise DataError(f"{folder} is no folder", "in --data", fix)
    if idx.is_idx_folder(folder):
        return _idx_folder(folder)
    classes = tuple(sorted(p.name for p in (folder / "train").glob("*") if p.is_dir()))
    if not classes:
        what = f"{folder} holds neither idx files nor train/CLASS/ folders"
        raise DataError(what, "in --data", "give train/CLASS/* and test/CLASS/*")
    others = sorted(p.name for p in (folder / "test").glob("*") if p.is_dir() and p.name not in classes)
    if others:
        raise DataError(f"test has classes that train has not: {others[:5]}", f"in {folder}", "use the same classes")
    train, test = (_images(folder / part, classes, side) for part in ("train", "test"))
    return f"images of {folder.name}", train, test, classes


def _idx_folder(folder: Path) -> Read:
    parts = []
    for images_name, labels_name in idx.FILES.values():
        read = idx.read_pair(idx.find(folder, images_name), idx.find(folder, labels_name))
        # A copy in memory, because every epoch reads the images in another order.
        images, labels = (torch.from_numpy(np.array(mapped)) for mapped in read)
        parts.append(LabelledImages(images[:, None], labels.long()))
    if parts[0].images.shape[2:] != parts[1].images.shape[2:]:
        sizes = " and ".join("x".join(map(str, p.images.shape[2:])) for p in parts)
        raise DataError(f"train and test images differ in size: {sizes}", f"in {folder}", "take files of one release")
    n_classes = max(10, *(int(p.labels.max()) + 1 if len(p) else 0 for p in parts))
    return "MNIST" if n_classes == 10 else "idx files", parts[0], parts[1], tuple(map(str, range(n_classes)))


def _images(folder: Path, classes: tuple[str, ...], side: int) -> LabelledImages:
    """Return all images of folder/CLASS/*, resampled to `side`, as RGB, or as grey if every one of them is grey."""
    files = [(path, i) for i, name in enumerate(classes) for path in sorted((folder / name).glob("*"))]
    files = [(path, i) for path, i in files if path.suffix.lower() in IMAGE_ENDS]
    pixels = np.empty((len(files), side, side, 3), np.uint8)
    for place, (path, _) in enumerate(files):
        pixels[place] = _image(path, side)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    if bool((images == images[:, :1]).all()):
        images = images[:, :1]
    return LabelledImages(images.contiguous(), torch.tensor([i for _, i in files], dtype=torch.long))


def _image(path: Path, side: int) -> NDArray[np.uint8]:
    """Return an image file as RGB (side, side, 3), or raise DataError if it is no image, or larger than any should be."""
    from PIL import Image

    where, fix = f"in {path.parent}", "remove the file"
    if not path.is_file():
        raise DataError(f"{path.name} is no file", where, fix)
    try:
        with warnings.catch_warnings():
            # PIL warns of a large picture, and of one with damaged metadata.
            warnings.simplefilter("ignore")
            with Image.open(path, formats=IMAGE_FORMATS) as image:
                width, height = image.size
                if width * height <= IMAGE_PIXELS_MAX:
                    rgb = image.convert("RGB")
                    return np.asarray(rgb if rgb.size == (side, side) else rgb.resize((side, side)))
    except Exception as error:
        # Decoders raise what they like about a file that they cannot read.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise DataError(f"{path.name} is no whole image ({reason})", where, fix) from None
    raise DataError(f"{path.name} has {width} x {height} pixels, at most {IMAGE_PIXELS_MAX:,} are read", where, fix)


def _resized(part: LabelledImages, side: int | None) -> LabelledImages:
    """Return the images resampled to `side` pixels, or unchanged if they have that size already or no size is asked for."""
    height, width = part.images.shape[2:]
    side = side or height
    if (height, width) == (side, side):
        return part
    resampled = [
        F.interpolate(piece.float(), (side, side), mode="bilinear", antialias=True).round().clamp_(0, 255)
        for piece in part.images.split(4096)
    ]
    return LabelledImages(torch.cat(resampled).to(torch.uint8), part.labels)


def _fingerprint(*parts: LabelledImages) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(tuple(part.images.shape)).encode())
        digest.update(part.images.contiguous().numpy().data)
        digest.update(part.labels.numpy().data)
    return digest.hexdigest()[:16]
