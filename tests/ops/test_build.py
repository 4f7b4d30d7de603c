"""The build of the C++ operators: its errors, and an import of the operators that builds and loads nothing."""

import subprocess
import sys

import pytest
from filelock import FileLock

from gptscale.ops.build import cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache.private(tmp_path / "gptscale" / "ops")


def test_a_cache_of_another_user_is_refused(folder, monkeypatch):
    owner = folder.stat().st_uid
    monkeypatch.setattr(cache.os, "getuid", lambda: owner + 1)
    words = "belongs to another user, in the operator cache, set XDG_CACHE_HOME to your own"
    with pytest.raises(cache.CacheFolderError, match=words):
        cache.private(folder)


def test_a_build_under_way_elsewhere_is_an_error_and_a_finished_one_is_kept(folder):
    target = folder / "built"

    def build(work):
        (work / "out").write_text("whole")
        return work / "out"

    with FileLock(folder / ".prepare.lock"), pytest.raises(cache.BuildError, match="another `gptscale prepare`"):
        cache.build_once(target, build, wait_s=0.1)
    (folder / ".building-killed").mkdir()
    assert cache.build_once(target, build, wait_s=0.1)
    assert target.read_text() == "whole"
    assert not cache.build_once(target, build, wait_s=0.1)
    assert not list(folder.glob(".building-*"))


def test_a_build_error_is_one_printable_line():
    assert str(cache.BuildError("a\nb", "\x1b[1mc", "d")) == "a\\nb, \\x1b[1mc, d"


def test_importing_the_operators_imports_no_compiler():
    code = (
        "import sys, gptscale.ops\n"
        "assert 'torch' not in sys.modules\n"
        "import gptscale.ops.gelu, gptscale.ops.conv, gptscale.ops.max_pool, gptscale.ops.mlp, gptscale.ops.minigrad.models\n"
        "print({'triton', 'torch._dynamo', 'torch.utils.cpp_extension', 'gptscale.common'} & set(sys.modules))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "set()\n"
