"""When checkpoints are saved, what a full disk or a kill costs, and from where a run goes on."""

import pytest
from holder import poison
from worlds import assert_same_state, gptscale, ok, ranks, steps

from gptscale.common.checkpoint.reader import Reader, newest_valid, step_folders
from gptscale.common.errors import StorageError
from gptscale.common.measure.spikes import SpikeWatch
from gptscale.launchers.run import checkpoints

SHORT = "--data synthetic --n-layer 2 --seq-len 32 --global-batch-size 4 --no-tensorboard --save-every 2".split()
FIGURES = ["loss", "grad_norm"]


@pytest.mark.promise(
    "S2 | full during a save | the save is missed with a warning that has the bytes; the third miss ends the run with 5"
)
@pytest.mark.parametrize("behind", [(), ("--save-async",)])
def test_a_full_disk_costs_a_checkpoint_and_then_the_run(plan, behind, monkeypatch, capsys):
    saves, full = [], StorageError("disk full", "in ckpt", "free space")

    def save(engine, folder, step, facts, keep):
        saves.append(step)
        raise full

    class Background:
        under_way = False

        def begin(self, engine, folder, step, facts, keep):
            assert not self.under_way
            saves.append(step)
            self.under_way = True

        def is_done(self):
            # The first is still under way when the second is due.
            return len(saves) > 1

        def finish(self):
            self.under_way = False
            raise full

    monkeypatch.setattr(checkpoints, "ReplicaCheck", lambda engine: lambda step: None)
    monkeypatch.setattr(checkpoints, "BackgroundSave", Background)
    monkeypatch.setattr(checkpoints, "save", save)
    arguments = plan("--save-every", "2", *behind), None, None, lambda: None, SpikeWatch()
    # The last save is waited for, and a run that misses it ends.
    with pytest.raises(StorageError):
        checkpoints.Saver(*arguments)(9, last=True)
    saves.clear()
    saver = checkpoints.Saver(*arguments)
    for step in range(1, 6):
        saver(step, last=False)
    assert saves == [2, 4]
    assert "missed 2 of 3" in capsys.readouterr().err
    with pytest.raises(StorageError):
        for step in (6, 7):
            saver(step, last=False)


def test_saves_and_compares_replicas_when_due_and_only_then(plan, monkeypatch):
    saved, checked = [], []
    monkeypatch.setattr(checkpoints, "ReplicaCheck", lambda engine: checked.append)
    monkeypatch.setattr(checkpoints, "save", lambda engine, folder, step, facts, keep: saved.append(step))
    every = ["--save-every", "3"]
    for words, expected, compared in (
        (every, [3, 6, 7], [3, 6, 7]),
        (["--save-last"], [7], [7]),
        ([], [], []),
        (["--check-replicas", "2"], [], [2, 4, 6]),
        ([*every, "--check-replicas", "2"], [3, 6, 7], [2, 3, 4, 6, 7]),
        ([*every, "--check-replicas", "0"], [3, 6, 7], []),
    ):
        saved.clear()
        checked.clear()
        saver = checkpoints.Saver(plan(*words), None, None, lambda: None, SpikeWatch())
        for step in range(1, 8):
            saver(step, last=step == 7)
        assert (saved, checked) == (expected, compared)


def test_a_stop_waits_for_the_save_behind_the_steps_and_costs_no_bit(tmp_path):
    """The run that it is compared with waits for its saves."""
    words = ["fsdp", *SHORT[:-1], 4, "--steps", 12, "--run-name", "r", "--out"]
    ranks("world_faulty.py", 2, "stopped_in_save", *words, tmp_path / "stopped", "--save-async", status=75)
    checkpoints, unbroken = (tmp_path / name / "runs/r/checkpoints" for name in ("stopped", "unbroken"))
    last, before = step_folders(checkpoints)
    assert before.name == "step-4"
    assert newest_valid(checkpoints, say=pytest.fail).path == last
    assert Reader(before).step == 4
    ok("run", *words, tmp_path / "stopped", "--save-async", "--nproc", 2, "--resume")
    ok("run", *words, tmp_path / "unbroken", "--nproc", 2)
    assert [path.name for path in step_folders(checkpoints)] == ["step-12", "step-8"]
    for path in unbroken.rglob("*.safetensors"):
        assert path.read_bytes() == (checkpoints / path.relative_to(unbroken)).read_bytes()
    assert steps(checkpoints.parent)[FIGURES].equals(steps(unbroken.parent)[FIGURES])


@pytest.mark.promise("P7 | of one rank within a save | the step is not committed")
@pytest.mark.parametrize("behind", [(), ("behind",)])
@pytest.mark.parametrize(("moment", "newest"), [("writing", 2), ("committing", 2), ("committed", 4)])
def test_a_rank_killed_in_a_save_leaves_a_whole_checkpoint(moment, newest, behind, tmp_path):
    ranks("world_killed_in_save.py", 2, tmp_path, moment, *behind, status=7)
    assert newest_valid(tmp_path, say=pytest.fail).step == newest
    assert (len(list(tmp_path.glob(".tmp-step-4-*"))) == 1) == (newest == 2)


def test_a_resume_from_an_older_step_sets_aside_what_lies_beyond(tmp_path):
    """The new branch is kept by rotation, and the next resume goes on in it."""
    words = ["run", "single", *SHORT, "--out", tmp_path, "--run-name", "r"]
    folder = tmp_path / "runs" / "r" / "checkpoints"
    ok(*words, "--steps", 10, "--keep-checkpoints", 9)
    said = ok(*words, "--steps", 6, "--resume", folder / "step-4").stdout
    assert (
        f"set aside what lies beyond step 4 in {folder}: step-10.discarded, step-8.discarded, step-6.discarded" in said
    )
    assert [path.name for path in step_folders(folder)] == ["step-6", "step-4"]
    said = ok(*words, "--steps", 8, "--resume").stdout
    assert f"resumed from {folder / 'step-6'}" in said
    assert "set aside" not in said
    assert list(steps(tmp_path / "runs" / "r").index) == list(range(1, 9))
    # A run that resumes from the folder of another leaves that as it is.
    before = sorted(folder.iterdir())
    ok(*words[:-1], "other", "--steps", 6, "--resume", folder / "step-6.discarded", "--steps", 8)
    assert sorted(folder.iterdir()) == before


@pytest.mark.promise("P2 | in its backward, while the others wait in their all-reduce | as P1")
@pytest.mark.promise("P3 | between backward and optimizer | as P1, and no half of an update is left")
def test_a_rank_killed_at_any_part_of_a_step_costs_no_bit(tmp_path):
    """Kill it at another part in each start. After its backward no half of an update may be left."""
    own = "--steps 7 --device cpu --save-every 4 --dist-timeout-s 60 --out"
    words = ["ddp", *SHORT, *own.split(), tmp_path]
    ranks("world_faulty.py", 2, "none", *words, "--run-name", "unbroken")
    broken, unbroken = (tmp_path / "runs" / name for name in ("broken", "unbroken"))
    words += ["--run-name", "broken", "--resume", "auto"]
    for part in ("forward", "backward", "optimizer", "saving"):
        ranks("world_faulty.py", 2, f"killed_at,{part}", *words, status=7)
        assert [path.name for path in step_folders(broken / "checkpoints")] == ["step-4"]
    ranks("world_faulty.py", 2, "none", *words)
    assert steps(broken)[FIGURES].equals(steps(unbroken)[FIGURES])
    assert_same_state(broken / "checkpoints/step-7", unbroken / "checkpoints/step-7")


@pytest.mark.promise("S10 | all checkpoints damaged | 4, never a silent new start; the files are kept")
def test_auto_begins_when_nothing_is_saved_yet_and_resumes_else(tmp_path):
    words = ["run", "single", *SHORT, "--out", tmp_path, "--run-name", "r", "--resume", "auto"]
    folder = tmp_path / "runs" / "r" / "checkpoints"
    # The run was killed in its first save.
    (folder / ".tmp-step-2-0123").mkdir(parents=True)
    (folder.parent / "run.json").write_text("{}")
    said = ok(*words, "--steps", 4)
    assert f"nothing to resume in {folder}, the run begins at step 0" in said.stdout
    assert ".tmp-step-2-0123" in said.stdout
    assert f"resumed from {folder / 'step-4'}" in ok(*words, "--steps", 5).stdout
    assert list(steps(folder.parent).index) == [1, 2, 3, 4, 5]
    # Damaged checkpoints are no reason to begin: not now, and not when they were set aside.
    for path in step_folders(folder):
        poison(path, "model/wte.weight")
    for status, message in ((4, "no checkpoint that verifies"), (2, "holds no checkpoint")):
        ended = gptscale(*words, "--steps", 6)
        assert ended.returncode == status
        assert message in ended.stderr
        assert ended.stdout.count("tensor 'model/wte.weight' holds NaN or Inf") == (2 if status == 4 else 0)
        assert len(list(folder.glob("*.corrupt"))) == 2
