"""How the mock is compiled: once for each torch."""

import shutil

import pytest

from gptscale.common.errors import ConfigError
from gptscale.foresight.mock_cuda import build


@pytest.fixture
def torch_lib(tmp_path, monkeypatch):
    """The folder of a torch whose libraries are a few bytes, and a cache of compiled code that compiles nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "build_once", lambda folder, make: None)
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in build.CALLERS:
        (folder / name).write_bytes(b"x" * 100)
    return folder


def test_each_torch_and_each_source_has_a_library_of_its_own(torch_lib, tmp_path, monkeypatch):
    first = build.prepare(torch_lib)
    assert first.name == "libgptscale_mock_cuda.so"
    assert build.prepare(torch_lib) == first
    (torch_lib / "libtorch_cuda.so").write_bytes(b"x" * 101)
    second = build.prepare(torch_lib)
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    (sources / "mock.h").write_text((sources / "mock.h").read_text() + "\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    third = build.prepare(torch_lib)
    assert len({first, second, third}) == 3


@pytest.mark.promise("X8 | a cache of compiled code that others may write, ours or torch's | refused, not repaired")
@pytest.mark.parametrize("name", [f"mock/{build.LIBRARY}", "mock/libnvrtc.so.13", "compiled/triton/kernel.so"])
def test_what_others_may_write_is_not_preloaded(torch_lib, name):
    mock = build.prepare(torch_lib).parent
    file = mock.parent / name.replace("mock/", f"{mock.name}/")
    file.parent.mkdir(mode=0o700, parents=True)
    file.touch()
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=f"{file} may be written by other users, .*, rm -r {file.parent}"):
        build.prepare(torch_lib)


def test_without_a_compiler_or_nm_it_says_what_to_install(torch_lib, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "build_once", lambda folder, make: make(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="no C compiler, for the mock of CUDA, apt-get install gcc"):
        build.prepare(torch_lib)
    monkeypatch.setattr(build.shutil, "which", lambda name: None if name == "nm" else "/bin/true")
    monkeypatch.setattr(build, "compile_apart", lambda *words, **options: "")
    with pytest.raises(ConfigError, match="no nm, for the mock of CUDA, apt-get install binutils"):
        build.prepare(torch_lib)
