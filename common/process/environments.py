"""The environments beside the running one: an engine that cannot live with the others has one of its own, named after it.

`.venv` has `.venv-colossalai` beside it: the same folder, the same name with a dash and the engine's. No variable says so.
"""

from __future__ import annotations

import getpass
import os
import sys
from importlib.metadata import distributions, requires
from pathlib import Path

from gptscale.common.errors import ConfigError


def folder(environment: str) -> Path:
    """Return the folder of an environment: the running one, or its sibling, which may not exist."""
    here = Path(sys.prefix)
    return here if is_inside(environment) else here.with_name(f"{here.name}-{environment}")


def is_inside(environment: str) -> bool:
    """Return whether this process runs in an environment. Every process runs in ""."""
    return not environment or Path(sys.prefix).name.endswith(f"-{environment}")


def python(environment: str) -> str:
    """Return the interpreter of an environment. That of "" is the running one."""
    return sys.executable if is_inside(environment) else str(folder(environment) / "bin" / "python")


def installed(distribution: str, environment: str = "") -> str | None:
    """Return the version of a distribution in an environment, or None if either is missing."""
    if not Path(python(environment)).exists():
        return None
    beside = [str(path) for path in folder(environment).glob("lib/python3.*/site-packages")]
    path = sys.path if is_inside(environment) else beside
    return next((found.version for found in distributions(name=distribution, path=path)), None)


def tried(distribution: str) -> str:
    """Return the versions that a distribution was tried in, as setup.cfg has them: ">=1.10,<1.16", or "" for any.

    setup.cfg is their one source, by way of the metadata of the installed package. An engine's extra has the engine's name.
    """
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requires("gptscale") or ()):
        extra = str(requirement.marker or "")
        if requirement.name == distribution and extra in ("", f'extra == "{distribution}"'):
            return ",".join(sorted(map(str, requirement.specifier), reverse=True))
    return ""


def is_among(version: str, tried: str, *, or_newer: bool = False) -> bool:
    """Return whether a version is in a range, or with or_newer above it. One built here (0.19.8+abc) counts as 0.19.8."""
    from packaging.specifiers import SpecifierSet

    bounds = [bound for bound in tried.split(",") if not (or_newer and bound.startswith("<"))]
    return SpecifierSet(",".join(bounds)).contains(version, prereleases=True)


def require(distribution: str, environment: str) -> None:
    """ConfigError, with the command that mends it, unless `distribution` is in `environment` in a version that fits."""
    version = installed(distribution, environment)
    if version is None or not is_among(version, tried(distribution)):
        wanted = tried(distribution).removeprefix("==")
        lack = f"has {distribution} {version}, not {wanted}" if version else "is missing"
        where = f"at {folder(environment)}"
        raise ConfigError(f"the environment of {distribution} {lack}", where, remedy(environment))


def remedy(environment: str) -> str:
    """Return the command that makes an environment. Only a checkout has a Makefile for it."""
    if (Path(__file__).parents[2] / "Makefile").is_file():
        return f"make {environment}"
    return f"python3 -m venv {folder(environment)} && {folder(environment)}/bin/pip install 'gptscale[{environment}]'"


def name_user() -> None:
    """Give a user without a name one in USER, since torch asks for it when it is imported. A container has such users."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"
