"""Operators are compiled aside and moved into place: nothing a killed compile leaves can stop a later one."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.errors import StorageError
from gptscale.launchers.commands import prepare
from gptscale.ops.build import cache as build_cache

pytest.importorskip("deepspeed")
PREPARE = [sys.executable, "-m", "gptscale.launchers.cli", "prepare", "--recipes", "zero_infinity"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, with all that zero_infinity needs but pin_memory, the quickest to compile."""
    there = deepspeed_ops.ops_path()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build_cache.private(deepspeed_ops.ops_path())
    for op in ("cpu_adam", "async_io"):
        if not (there / op).exists():
            pytest.skip(f"{op} is not compiled in {there}: run gptscale prepare")
        shutil.copytree(there / op, folder / op)
    return folder


ALL = {*deepspeed_ops.BUILDERS}
COMPILED = {(): {"own", *ALL}, ("--recipes", "all"): ALL, ("--recipes", "ddp,zero_offload"): {"cpu_adam"}}


@pytest.mark.parametrize("words", COMPILED, ids=" ".join)
def test_with_recipes_only_what_they_need_is_compiled(monkeypatch, capsys, words):
    """Our own operators and the mock of CUDA would make the first comparison wait, and no recipe needs them."""
    compiled = []
    monkeypatch.setattr(deepspeed_ops, "prepare", lambda op, say: compiled.append(op))
    monkeypatch.setattr(prepare, "_prepare_own", lambda terminal: compiled.append("own"))
    assert prepare.main(words) == 0
    assert {*compiled} == COMPILED[words]
    assert "cpu_adam is there, for zero_offload" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_compile_is_cleared_and_the_cache_is_private(cache, pretending_compiler, monkeypatch):
    """The compiler only pretends, because `make prepare` compiles pin_memory itself before all tests run."""
    if deepspeed_ops.what_is_missing("pin_memory"):
        pytest.skip("no compiler")
    monkeypatch.setenv("CXX", pretending_compiler)
    hold = Path(pretending_compiler).with_name("hold")
    hold.touch()
    killed = subprocess.Popen(PREPARE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    # This lock is torch's own, which nothing but its holder removes.
    while not list(cache.glob(".building-*/pin_memory/lock")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    # A compiler is in a group of its own, and may still run.
    hold.unlink()
    assert deepspeed_ops.missing(["pin_memory"])
    ended = subprocess.run(PREPARE, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "removing what a killed compile left" in ended.stdout
    assert "compiling DeepSpeed's pin_memory (about 35 s" in ended.stdout
    assert not deepspeed_ops.missing(["pin_memory", "async_io"])
    for folder in (cache, *cache.parents[:2]):
        assert folder.stat().st_mode & 0o777 == 0o700
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    again = subprocess.run(PREPARE, capture_output=True, text=True, timeout=400, check=True)
    assert "compiling" not in again.stdout
    # Processor seconds, since a busy machine takes longer.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 20


@pytest.mark.promise("X8")
def test_planted_code_is_neither_loaded_nor_called_compiled(tmp_path, monkeypatch):
    """The library is another user's, or anyone may write to it. Its constructor would make a file."""
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = pytest.importorskip("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops
    # An earlier test may have loaded the real one.
    monkeypatch.delitem(loaded, "cpu_adam", raising=False)
    library = deepspeed_ops.library("cpu_adam")
    build_cache.private(library.parent)
    code = f'#include <cstdio>\n__attribute__((constructor)) void run() {{ fclose(fopen("{tmp_path}/canary", "w")); }}'
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=code.encode(), check=True, timeout=400)
    plants = [lambda: library.chmod(0o666), lambda: os.chown(library.parent, 65534, 65534)]
    # Only root can give a file away.
    for plant in plants[: 1 if os.getuid() else 2]:
        plant()
        assert "in a cache of compiled code, whose files are executed, rm -r" in str(deepspeed_ops.lack(["cpu_adam"]))
        for use in (lambda: deepspeed_ops.load(["cpu_adam"]), lambda: deepspeed_ops.prepare("cpu_adam")):
            with pytest.raises(StorageError, match=r"other users|another user"):
                use()
    assert not (tmp_path / "canary").exists()
    os.chown(library.parent, os.getuid(), os.getgid())
    library.chmod(0o755)
    # The library is no module of Python.
    with contextlib.suppress(ImportError):
        deepspeed_ops.load(["cpu_adam"])
    assert (tmp_path / "canary").exists()
