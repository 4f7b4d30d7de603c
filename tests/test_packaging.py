"""What is installed is gptscale and nothing else, and all of it."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from gptscale.ops.build import cache as build_cache
from gptscale.ops.build.sources import fingerprint

# A wheel is built, and the operators are compiled.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
ROOMS = ("common", "foresight", "launchers", "lenet", "ops", "recipes", "results")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, quick_compiler):
    """The names in a wheel built from a copy, so that the checkout stays clean."""
    pytest.importorskip("build")
    out, copy = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("copy") / "gptscale"
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "GPTSCALE_SKIP_KERNELS"}
    if shutil.which("c++"):
        environment["CXX"] = quick_compiler
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False, env=environment)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def names(wheel):
    return set(wheel.namelist())


@pytest.mark.timeout(400)
def test_operators_are_compiled_ahead_of_time_where_there_is_a_compiler(wheel, names, tmp_path, monkeypatch):
    if build_cache.tool_missing():
        pytest.skip("no compiler")
    (compiled,) = (name for name in names if name.endswith(".so"))
    assert Path(compiled).name.startswith(f"_kernels_{fingerprint(torch.__version__)}")
    wheel.extractall(tmp_path, [name for name in names if name.startswith("gptscale/")])
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "import gptscale.ops.build.kernels as e; from gptscale.ops.gelu import gelu\n"
        "assert e.__file__.startswith(sys.argv[1]), e.__file__\n"
        "print(e.implementation(), gelu(torch.ones(1), implementation='cpp').item())"
    )
    # With -S it runs without the editable install's finder.
    command = [sys.executable, "-S", "-c", code, str(tmp_path)]
    path = os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("C++, compiled when installed (_kernels_")
    assert float(ended.stdout.split()[-1]) == pytest.approx(0.8413447)
    assert not (tmp_path / "cache").exists()


# Whichever test comes first waits for the compiler.
@pytest.mark.timeout(400)
def test_the_wheel_holds_every_module_and_type_marker_and_nothing_generic(names):
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"gptscale"}
    modules = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == {f"gptscale/{p}" for p in modules if "runs" not in p.parts}
    assert {f"gptscale/{room}/py.typed" for room in ROOMS} <= names
    assert {f"gptscale/ops/csrc/{p.name}" for p in (ROOT / "ops" / "csrc").iterdir()} <= names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_no_link_of_a_package_index_leads_nowhere(wheel, names):
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert "Bring a model." in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link] == []


@pytest.mark.parametrize(("locked", "extra"), [("main", "dev"), ("colossalai", "colossalai")])
def test_all_that_is_needed_is_locked_with_its_hash(locked, extra):
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg")
    text = (ROOT / "constraints" / f"{locked}.txt").read_text().lower().replace("_", "-")
    names = re.findall(r"(?m)^([\w.-]+)==\S+ \\\n    --hash=sha256:", text)
    assert len(names) == len(re.findall(r"(?m)^[^ #\n]", text))
    assert "://" not in text

    def needed(lines):
        for name, extras in re.findall(r"(?m)^([\w-]+)(?:\[(.*)\])?", lines):
            yield from [name] if name != "gptscale" else ()
            for other in filter(None, extras.split(",")):
                yield from needed(setup_cfg["options.extras_require"][other])

    assert {*needed(setup_cfg["options"]["install_requires"])} <= {*names}
    assert {*needed(setup_cfg["options.extras_require"][extra])} <= {*names}
