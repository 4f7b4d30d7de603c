"""The cache of compiled operators refuses what others could have planted, and errors of a build are one line."""

import os
import sys

import psutil
import pytest
from filelock import FileLock

from gptscale.ops.build import cache, kernels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache.private(tmp_path / "gptscale" / "ops")


PLANTED = {
    "an open folder": (lambda so: so.parent.chmod(0o777), "{0} may be written by other users", "chmod go-w {0}"),
    "an open root": (lambda so: so.parents[2].chmod(0o770), "{2} may be written by other users", "chmod go-w {2}"),
    "an open library": (lambda so: so.chmod(0o666), "kernels.so may be written by other users", "rm -r {0}"),
    "a linked library": (lambda so: so.symlink_to(so.rename("x")), "so is a symbolic link", "rm {0}/kernels.so"),
    "a linked folder": (lambda so: so.parent.symlink_to(so.parent.rename("y")), "{0} is a symbolic link", "rm {0}"),
    "an open parent": (lambda so: so.parents[3].chmod(0o777), "may replace what lies in {3}", "set XDG_CACHE"),
}


@pytest.fixture
def build(folder, tmp_path, monkeypatch):
    """A library in its folder in the cache."""
    monkeypatch.chdir(tmp_path)
    library = cache.private(folder / "build") / "kernels.so"
    library.touch()
    library.chmod(0o755)
    cache.check_private(library)
    return library


@pytest.mark.promise("X8")
@pytest.mark.parametrize("case", PLANTED)
def test_what_others_could_have_planted_is_refused_and_not_repaired(build, case):
    plant, what, fix = (each.format(*build.parents) if isinstance(each, str) else each for each in PLANTED[case])
    plant(build)
    modes = [level.lstat().st_mode for level in build.parents]
    with pytest.raises(cache.CacheFolderError) as caught:
        cache.check_private(build)
    assert what in str(caught.value)
    assert fix in str(caught.value)
    assert modes == [level.lstat().st_mode for level in build.parents]
    with pytest.raises(cache.CacheFolderError):
        cache.build_once(build, lambda work: work, wait_s=0.1)


def test_a_parent_with_the_sticky_bit_is_as_good_as_tmp(build):
    build.parents[3].chmod(0o1777)
    cache.check_private(build)


def test_what_belongs_to_another_user_is_refused(build, monkeypatch):
    if os.getuid():
        pytest.skip("needs root, who may give a file away")
    os.chown(build, 65534, 65534)
    with pytest.raises(cache.CacheFolderError, match=f"so belongs to another user, .*, rm -r {build.parent}, or set"):
        cache.check_private(build)
    os.chown(build.parents[3], 65534, 65534)
    with pytest.raises(cache.CacheFolderError, match="other users may replace what lies in"):
        cache.check_private(build)


def test_our_kernels_are_not_loaded_from_an_open_folder(build, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "built_ahead", lambda: None)
    monkeypatch.setattr(kernels, "cached", lambda: build)
    build.parent.chmod(0o777)
    assert not kernels.load.__wrapped__()
    assert f"operators run in Python, many times slower: {build.parent} may be written" in capsys.readouterr().err
    assert "may be written" in kernels.implementation()


def test_without_a_home_the_error_says_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    with pytest.raises(cache.CacheFolderError, match=r"no home folder, .*set XDG_CACHE_HOME to a folder of your own"):
        cache.root()


COMPILERS = {
    "says why": ("print('a.cpp: Error: \\udcff\\x1b no such type', flush=True); raise SystemExit(3)", "no such type"),
    "says nothing": ("raise SystemExit(3)", "exit status 3"),
    "hangs with a child": ("import subprocess; subprocess.run(['sleep', '600'])", "more than 2 s, and was ended"),
}


@pytest.mark.parametrize("case", COMPILERS)
def test_a_compiler_that_fails_or_hangs_is_one_line(tmp_path, case):
    code, reason = COMPILERS[case]
    code = "import sys; sys.stdout.reconfigure(errors='surrogateescape')\n" + code
    assert reason in cache.compile_apart([sys.executable, "-c", code], tmp_path, timeout_s=2)
    assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]


@pytest.mark.promise("X9")
def test_another_build_under_way_is_an_error_and_a_finished_one_is_kept(folder):
    target = folder / "built"

    def build(work):
        (work / "out").write_text("whole")
        return work / "out"

    held = f"written nothing for 0.1 s, with the lock {folder}/.built.lock, wait for it, or end process {os.getpid()}"
    with FileLock(folder / ".built.lock"), pytest.raises(cache.BuildError, match=held):
        cache.build_once(target, build, wait_s=0.1)
    (folder / ".building-built-killed").mkdir()
    assert cache.build_once(target, build, wait_s=0.1)
    assert target.read_text() == "whole"
    assert not cache.build_once(target, build, wait_s=0.1)
    assert not list(folder.glob(".building-*"))


@pytest.mark.promise("X9 | a stale or planted lock of a compile | named in time; a planted one is refused")
def test_a_planted_lock_is_refused(folder):
    (folder / ".built.lock").symlink_to(folder / "elsewhere")
    with pytest.raises(cache.CacheFolderError, match=f"{folder}/.built.lock is a symbolic link, .*, rm {folder}"):
        cache.build_once(folder / "built", lambda work: work)


def test_a_build_error_is_one_printable_line():
    assert str(cache.BuildError("a\nb", "\x1b[1mc", "d")) == "a\\nb, \\x1b[1mc, d"
