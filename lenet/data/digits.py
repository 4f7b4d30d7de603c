"""scikit-learn's handwritten digits, read from the file that it brings.

Importing scikit-learn would import scipy's statistics too, and take as long as a fifth of a short run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptscale.common.errors import ConfigError

# In scikit-learn's folder. A row has the 64 pixels of a digit and its label.
DIGITS_FILE = "datasets/data/digits.csv.gz"


def read_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (1797, 8, 8), as counts of 0 to 16, and their labels (1797,), as sklearn's load_digits does.

    Raises ConfigError if scikit-learn is not installed, and OSError if its file cannot be read.
    """
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        what, fix = (
            "scikit-learn, which brings the digits, is not installed",
            "pip install 'gptscale[lenet]', or name other data",
        )
        raise ConfigError(what, "in --data digits", fix)
    file = Path(spec.submodule_search_locations[0]) / DIGITS_FILE
    table = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
