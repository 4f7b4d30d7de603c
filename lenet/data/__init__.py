"""Images: where they come from, file formats, augmentation, loaders. Importing this loads no torch."""

from __future__ import annotations

from typing import Literal

Augmentation = Literal["none", "affine", "mild", "flip", "jitter"]
