"""The folders of checkpoints: what is set aside, what is removed, and what a kill at any moment leaves."""

import os
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from holder import FACTS, Holder

from gptscale.common.checkpoint import folders, writer
from gptscale.common.checkpoint.background import BackgroundSave
from gptscale.common.checkpoint.folders import set_aside_beyond
from gptscale.common.checkpoint.manifest import sha256_of
from gptscale.common.checkpoint.reader import Reader, newest_valid, step_folders
from gptscale.common.checkpoint.writer import save
from gptscale.common.errors import NumericError, StorageError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def failing(number, words):
    """Return a function that the system refuses."""

    def fail(*arguments):
        raise OSError(number, words)

    return fail


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints at 2 and 4."""
    for step in (2, 4):
        save(Holder(), tmp_path, step, FACTS)
    return tmp_path


def test_what_lies_beyond_a_resume_is_set_aside_and_the_new_branch_is_kept(saved, capsys):
    for step in (6, 8, 10):
        save(Holder(), saved, step, FACTS, keep=9)
    set_aside_beyond(saved, 4)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("step-10.discarded, step-8.discarded, step-6.discarded")
    for step in (5, 6):
        save(Holder(), saved, step, FACTS, keep=2)
    assert [path.name for path in step_folders(saved)] == ["step-6", "step-5"]
    # This is a branch of the branch: step-6 was discarded once before.
    set_aside_beyond(saved, 5)
    assert [path.name for path in step_folders(saved)] == ["step-5"]
    assert len([name for name in names(saved) if name.startswith("step-6.discarded")]) == 2
    set_aside_beyond(saved, 5)
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_kill_while_setting_aside_leaves_the_beginning_of_the_old_branch(saved, monkeypatch, call):
    for step in (6, 8, 10):
        save(Holder(), saved, step, FACTS, keep=9)
    calls, rename = [], os.rename

    def killed(*paths):
        calls.append(paths)
        if len(calls) == call:
            raise KeyboardInterrupt
        rename(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            set_aside_beyond(saved, 4)
    assert [path.name for path in step_folders(saved)][::-1] == [f"step-{n}" for n in (2, 4, 6, 8, 10)[: 6 - call]]
    set_aside_beyond(saved, 4)
    assert newest_valid(saved).step == 4


def test_what_cannot_be_set_aside_is_one_line(saved, monkeypatch):
    monkeypatch.setattr(os, "rename", failing(30, "Read-only file system"))
    with pytest.raises(StorageError, match=r"step-4 cannot be set aside \(Read-only file system\)"):
        set_aside_beyond(saved, 2)


@pytest.mark.promise("P6")
def test_leftovers_of_killed_saves_are_named_and_removed(saved, capsys):
    (saved / ".tmp-step-6-0123").mkdir()
    (saved / ".tmp-step-6-0123" / "rank-00000-0000.safetensors").write_bytes(b"half")
    assert newest_valid(saved).step == 4
    save(Holder(), saved, 6, FACTS)
    assert names(saved) == ["step-4", "step-6"]
    (line,) = capsys.readouterr().out.splitlines()
    assert ".tmp-step-6-0123" in line


def test_rotation_renames_before_it_deletes(saved, monkeypatch):
    # Only one file is deleted, as when the process is killed midway.
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: os.unlink(next(path.iterdir())))
    save(Holder(), saved, 6, FACTS)
    monkeypatch.undo()
    assert [path.name for path in step_folders(saved)] == ["step-6", "step-4"]
    assert [name for name in names(saved) if name.startswith(".tmp-step-2-")]
    save(Holder(), saved, 8, FACTS)
    assert names(saved) == ["step-6", "step-8"]


@pytest.mark.promise(
    "S9 | a `LATEST` that points elsewhere | there is no such file; a link in place of a folder is refused"
)
def test_a_folder_of_checkpoints_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="checkpoints is a symbolic link"):
        save(Holder(), tmp_path / "checkpoints", 2, FACTS)
    assert names(tmp_path / "elsewhere") == []


def hashes(folder):
    return {path.name: sha256_of(path) for path in folder.iterdir()}


def child(body):
    """Run `body` in a forked process, and return how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(call):
    """Let every function by which a save changes the disk kill the process before its `call`-th call of all."""
    calls = iter(range(1, call))

    def guarded(function):
        def do(*args, **options):
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return do

    for name in ("mkdir", "open", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, guarded(getattr(os, name)))


def check_after_kill(folder, before):
    """The checkpoint before is untouched, the newest verifies, and the next save leaves no rest."""
    assert hashes(folder / "step-4") == before
    reader = newest_valid(folder, say=pytest.fail)
    assert reader.step in (4, 6)
    target = Holder(fill=0.0)
    reader.load_into(target)
    assert all(torch.equal(t, target.tensors[name]) for name, t in Holder().tensors.items())
    save(Holder(), folder, 8, FACTS, keep=9)
    assert not [name for name in names(folder) if name.startswith(".tmp")]


def save_behind(engine, folder, step, facts):
    """Save as `--save-async` does, with nothing to train meanwhile."""
    background = BackgroundSave()
    background.begin(engine, folder, step, facts, keep=2)
    background.finish()


@pytest.mark.promise(
    "P6 | during a save, at every call that changes the disk | the checkpoint before or the new one is whole; what is "
    "left over is named and removed at the next save"
)
@pytest.mark.promise(
    "P8 | just after the rename | the new checkpoint counts: names alone say which is the newest, there is no file `LATEST`"
)
@pytest.mark.slow
@pytest.mark.parametrize("way", [save, save_behind])
def test_a_kill_at_any_call_of_a_save_leaves_the_one_before_or_the_new_one(saved, tmp_path_factory, way):
    """Rotation is part of the save: it removes step-2."""
    endings = []
    for call in range(1, 100):
        folder = tmp_path_factory.mktemp("killed")
        for path in saved.iterdir():
            shutil.copytree(path, folder / path.name)
        before = hashes(folder / "step-4")

        def body(call=call, folder=folder):
            killed_at(call)
            way(Holder(), folder, 6, FACTS)

        ended = child(body)
        endings.append((ended, step_folders(folder)[0].name))
        check_after_kill(folder, before)
        if ended == 0:
            break
    assert set(endings) == {(-9, "step-4"), (-9, "step-6"), (0, "step-6")}
    assert len(endings) > 10


@pytest.mark.parametrize("way", [save, save_behind])
@pytest.mark.parametrize("size", [0, 100])
def test_a_kill_within_a_write_leaves_the_checkpoint_before(saved, size, way):
    """The system ends a process that writes beyond its limit, after it wrote up to the limit."""
    before = hashes(saved / "step-4")

    def body():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        way(Holder(), saved, 6, FACTS)

    assert child(body) == -signal.SIGXFSZ
    assert step_folders(saved)[0].name == "step-4"
    check_after_kill(saved, before)


def test_what_cannot_be_deleted_costs_space_and_not_the_run(saved, monkeypatch, capsys):
    monkeypatch.setattr(writer, "retire", failing(1, "Operation not permitted"))
    save(Holder(), saved, 6, FACTS)
    assert "step-2 is not deleted (Operation not permitted)" in capsys.readouterr().out
    assert Reader(saved / "step-6").verify().step == 6


@pytest.mark.parametrize(
    ("there", "saves", "keep", "new"),
    [(0, 0, 2, 0), (0, 1, 2, 1), (0, 9, 2, 3), (2, 9, 2, 1), (3, 9, 2, 0), (1, 1, 2, 1)],
)
def test_what_a_run_adds(there, saves, keep, new, tmp_path, monkeypatch):
    for step in range(there):
        folder = tmp_path / "checkpoints" / f"step-{step + 1}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    needed = new * 1000 + 10

    def check(free):
        monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        folders.check_free(tmp_path, saves=saves, keep=keep, checkpoint_bytes=1000, log_bytes=10)

    check(needed)
    with pytest.raises(StorageError, match=rf"the run needs {needed:,} bytes on the disk .*{needed - 1:,} are free"):
        check(needed - 1)


def test_a_folder_that_is_not_there_yet_has_the_disk_of_the_nearest_one(tmp_path):
    with pytest.raises(StorageError, match=f"in {tmp_path}, free space"):
        folders.check_free(tmp_path / "a" / "b", saves=0, keep=2, checkpoint_bytes=0, log_bytes=2**62)


def test_it_saves_what_the_state_was_when_it_began(tmp_path):
    expected = save(Holder(), tmp_path / "waits", 4, FACTS)
    engine, background = Holder(), BackgroundSave()
    background.begin(engine, tmp_path / "behind", 4, FACTS, keep=2)
    for tensor in engine.tensors.values():
        tensor.fill_(float("nan"))
    engine.steps = 9.0
    background.finish()
    (path,) = step_folders(tmp_path / "behind")
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {p.name: p.read_bytes() for p in expected.iterdir()}


def test_the_files_are_those_of_the_library(tmp_path):
    import safetensors.torch

    path = save(Holder(), tmp_path, 4, FACTS)
    tensors = {f"{name}@{','.join('0' * t.ndim)}": t for name, t in Holder().tensors.items()}
    assert (path / "rank-00000-0000.safetensors").read_bytes() == safetensors.torch.save(tensors)


def test_a_failure_is_told_at_its_end_and_leaves_nothing(tmp_path, monkeypatch):
    background = BackgroundSave()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(28, "No space left on device"))
        background.begin(Holder(), tmp_path, 4, FACTS, keep=2)
        with pytest.raises(StorageError, match="No space left"):
            background.finish()
    broken = Holder()
    broken.tensors["model/b.bias"][3] = torch.inf
    background.begin(broken, tmp_path, 6, FACTS, keep=2)
    with pytest.raises(NumericError, match="holds NaN or Inf"):
        background.finish()
    assert list(tmp_path.iterdir()) == []
    background.begin(Holder(), tmp_path, 8, FACTS, keep=2)
    background.finish()
    assert [path.name for path in step_folders(tmp_path)] == ["step-8"]
