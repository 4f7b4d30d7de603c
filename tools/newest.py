"""Print the packages that `make newest` installs: what setup.cfg names, for use and for the tests, without its bounds."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

# gptscale is the checkout itself. Colossal-AI needs a torch of 2024, and has an environment of its own.
LEFT_OUT = {"gptscale", "colossalai"}


def names(setup_cfg: Path) -> list[str]:
    """Return the name of each package of setup.cfg that one environment can hold."""
    parser = configparser.ConfigParser()
    parser.read(setup_cfg)
    lines = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    return sorted(set(re.findall(r"(?m)^[\w.-]+", "\n".join(lines))) - LEFT_OUT)


if __name__ == "__main__":
    print(*names(Path(__file__).parents[1] / "setup.cfg"))
