"""What a soak compares and prints, and a short one of real runs."""

import os
import shutil
import subprocess
import sys
from random import Random

import pytest
import torch
from worlds import gptscale, rows

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import save
from gptscale.common.errors import GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.state import Shard
from gptscale.launchers.run.preflight import why_not_here
from gptscale.launchers.run.start import nproc_of
from gptscale.recipes import RECIPES
from tools.soak import damage
from tools.soak.broken_run import FINISHED, unbroken_run
from tools.soak.contract import broken_promises, bytes_of
from tools.soak.faults import FAULTS
from tools.soak.lost_bits import bits, cells
from tools.soak.rounds import FAULTS_PER_RUN, drawn
from tools.soak.work import SoakWork

FACTS = {"recipe": "single", "world_size": 1, "dp_size": 1, "tokens": 8, "workload": {}}


class OneTensor:
    """An engine whose state is one tensor."""

    def __init__(self, values):
        self.tensor = torch.tensor(values)

    def state(self):
        return iter([Shard("model/w", self.tensor, tuple(self.tensor.shape), (0,))])

    def counters(self):
        return {"optimizer_steps": 1.0}


@pytest.fixture
def run(tmp_path):
    """A run's folder with checkpoints of steps 4 and 8 and three CSVs."""
    run = tmp_path / "runs" / "run"
    for step in (4, 8):
        save(OneTensor([1.0, 2.0]), run / "checkpoints", step, FACTS)
    (run / "steps.csv").write_text("step,loss\n1,2.5\n2,2.4\n")
    (run / "eval.csv").write_text("step,loss\n")
    (tmp_path / "summary.csv").write_text("run_id,status\nrun,ok\n")
    return run


def test_each_differing_bit_of_a_tensor_is_lost(tmp_path):
    def saved(name, values):
        return Reader(save(OneTensor(values), tmp_path / name, 4, FACTS))

    a = saved("a", [1.0, 2.0])
    assert bits(a, saved("b", [1.0, 2.0])) == 0
    assert bits(a, saved("c", [1.0, -2.0])) == 1
    assert bits(a, saved("d", [1.0, 2.0, 3.0])) == 96


def test_each_differing_cell_is_lost_but_not_times(tmp_path):
    def written(name, *rows):
        (tmp_path / name).write_text("\n".join(("step,loss,step_time_s", *rows, "")))
        return tmp_path / name

    whole = written("a", "1,2.5,0.1", "2,2.4,0.1")
    columns = ("step", "loss")
    assert cells(written("b", "1,2.5,0.9", "2,2.4,0.9"), whole, columns) == 0
    assert cells(written("c", "1,2.5,0.1", "2,2.41,0.1"), whole, columns) == 64
    assert cells(written("d", "1,2.5,0.1"), whole, columns) == 128
    assert cells(tmp_path / "missing", whole, columns) == 256


def test_a_run_that_keeps_its_checkpoints_breaks_no_promise(run):
    before = bytes_of(run)
    assert broken_promises(run, before) == []
    save(OneTensor([3.0, 4.0]), run / "checkpoints", 12, FACTS)
    assert broken_promises(run, before) == []


@pytest.mark.parametrize(
    ("rows", "expected"), [("3,2.5\n", []), ("3,2.5\n3,", ["the last line of steps.discarded.csv is torn"])]
)
def test_what_was_discarded_is_looked_at_too(run, rows, expected):
    (run / "steps.discarded.csv").write_text(rows)
    assert broken_promises(run, {}) == expected
    (run / "checkpoints" / "step-8").rename(run / "checkpoints" / "step-8.discarded")
    assert "step-8.discarded was a good checkpoint" in broken_promises(run, {})


def test_a_reference_run_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(SoakWork, "program", lambda *args, **options: Program("gptscale.launchers.cli", ("run", "no")))
    with pytest.raises(GptscaleError, match=r"ddp fails without any fault \(status 2, not 0"):
        unbroken_run(SoakWork("ddp", 1, 1), tmp_path / "unbroken")


@pytest.mark.parametrize("harm", [damage.flip_in_newest, damage.cut_in_newest, damage.remove_in_newest])
def test_damage_to_a_checkpoint_is_seen(run, harm):
    before = bytes_of(run)
    harm(run / "checkpoints", Random(3))
    assert "step-8 has changed" in broken_promises(run, before)
    with pytest.raises(Exception, match="step-8"):
        Reader(run / "checkpoints" / "step-8").verify()


def test_every_kind_of_fault_comes_before_a_repeat_and_the_seed_fixes_them():
    faults, work = list(FAULTS.values()), SoakWork("ddp", 2, 7)
    names = [fault.name for index in range(len(faults)) for fault in drawn(faults, work, index)]
    assert sorted(names) == sorted([*FAULTS] * FAULTS_PER_RUN)
    assert drawn(faults, work, 5) == drawn(faults, work, 5)
    assert [drawn(faults, work, i) for i in range(3)] != [drawn(faults, SoakWork("ddp", 2, 8), i) for i in range(3)]


@pytest.mark.promise("P5 | of all ranks at once | 7, and the run resumes")
@pytest.mark.promise("P10 | SIGTERM to one rank | all stop after the same step, 75")
@pytest.mark.promise("P1 P2 P3 P8 P9 P11 P13 P14 S2 S5 S6 S7 S10")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_short_soak_loses_nothing(tmp_path):
    """Let each kind of fault strike runs of two ranks, but the kind that waits for a timeout."""
    faults = ",".join(name for name, fault in FAULTS.items() if not fault.short_timeout)
    out = tmp_path / "soak"
    ended = gptscale(*"--recipes ddp --runs 3 --minutes 12 --faults".split(), faults, "--out", out, module="tools.soak")
    strikes = rows(out / "soak.csv")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len([row for row in strikes if row["fault"] != FINISHED]) >= 10
    assert {row["lost_bits"] for row in strikes} == {"0"}


@pytest.mark.slow
def test_where_no_disk_can_be_mounted_a_limit_on_file_sizes_fills_it(tmp_path):
    """Root without the right to mount is what any other user is."""
    drop = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"] if os.geteuid() == 0 else []
    if drop and not shutil.which(drop[0]):
        pytest.skip("needs setpriv, to give up the right to mount")
    words = [*"--recipes ddp --runs 1 --minutes 5 --faults".split(), "full disk", "--out", str(tmp_path / "soak")]
    soak = [*drop, sys.executable, "-m", "tools.soak", *words]
    ended = subprocess.run(soak, capture_output=True, text=True, check=False, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a limit on the size of files stands for a full one" in ended.stderr
    assert "status 5" in ended.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_that_runs_here_can_be_soaked(recipe, tmp_path):
    if reason := why_not_here(recipe, cuda=False):
        pytest.skip(reason)
    SoakWork(recipe, nproc_of(recipe, RunConfig(device="cpu"), 2), seed=1).check(tmp_path)
