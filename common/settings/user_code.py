"""Import a function of the user's, and read the config of a model of transformers."""

from __future__ import annotations

import inspect
import keyword
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.settings.user_file import Refuse, read_json

CONFIG_MOST = 2**20


def read_hf_config(where: str, refuse: Refuse) -> dict[str, Any]:
    """Return the fields of a config.json or of its folder's, of a kind that transformers has."""
    import transformers

    file = Path(where, "config.json") if Path(where).is_dir() else Path(where)
    found = read_json(file, CONFIG_MOST, refuse)
    if not isinstance(found, dict) or not isinstance(kind := found.get("model_type"), str):
        raise refuse("it has no model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise refuse(f"transformers {transformers.__version__} has no model_type {kind!r}"[:200])
    # transformers writes an infinity, which JSON has not, in words of its own.
    return {**found, **transformers.PretrainedConfig._dict_from_json_file(file)}


def user_function(spec: str, option: str) -> tuple[Callable[..., Any], str, str]:
    """Return what FILE.py:NAME or package.module:NAME names, its module's name and its own. Raises ConfigError."""
    where, _, name = spec.partition(":")
    if not name:
        raise ConfigError(f"{spec!r} names no function", f"in {option}", "write FILE.py:NAME or package.module:NAME")
    path, folder = Path(where), ""
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"there is no file {where}", f"in {option}", "name a file that is there")
        folder, where = str(path.parent.absolute()), path.stem
        if not where.isidentifier() or keyword.iskeyword(where):
            raise ConfigError(f"no module can be named {where}", f"in {option}", "rename it, to letters and _")
    sys.path.insert(0, folder)
    try:
        module = import_module(where)
    except (Exception, SystemExit) as error:
        fix = "mend it" if "relative import" not in str(error) else "name package.module:NAME"
        what = f"{where} cannot be imported ({type(error).__name__}: {error})".replace("\n", " ")[:300]
        raise ConfigError(what, f"in {option}", fix) from None
    if folder and not path.samefile(module.__file__ or "/"):
        raise ConfigError(f"{where} is another module's name ({module.__file__})", f"in {option}", "rename it")
    if not callable(function := getattr(module, name, None)):
        names = [n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == where]
        fix = f"name one of: {' '.join(sorted(names)[:20]) or '(it has none)'}"
        raise ConfigError(f"{where} has no function {name}", f"in {option}", fix)
    return function, where, name
