"""On a real Slurm cluster nothing is lost when a job is preempted or out of time, or when a node goes."""

import functools
import time
from pathlib import Path

import pytest
from machines import held, paused, standing_still, wait_for, wait_until_held
from slurm_jobs import TINY, log_of, rows, steps, submit
from worlds import Started, assert_same_state, command

pytestmark = pytest.mark.slow
STEPS = 300
# A verdict would begin when all is saved. Ranks wait while a test lets another stand still, for minutes beside a busy suite.
LONG = [*TINY, "--steps", STEPS, "--save-every", 50, "--no-verdict", "--dist-timeout-s", 900, "--out", "out"]
# Several jobs run at a time, because most of a fault's time is Slurm's waiting.
LEFT, RIGHT = ("n1", "n2"), ("n3", "n4")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Start a run on two processes that nobody stops, beside the jobs, and return a function that waits for its folder."""
    out = tmp_path_factory.mktemp("unbroken")
    run = Started(command("run", "ddp", "--nproc", 2, *LONG[:-1], out, "--run-name", "r"))

    @functools.cache
    def folder():
        status, _, said = run.ended()
        assert status == 0, said
        return out

    return folder


@pytest.fixture(autouse=True)
def held_at_step_100(monkeypatch, tmp_path):
    """Each run stands just before its second checkpoint gets its name, until the test lets it go on."""
    names = ("late", "preempted", "r", "second", "first")
    for variable, value in held(tmp_path, *(f"/{name}/checkpoints/step-100" for name in names)).items():
        monkeypatch.setenv(variable, value)


def submitted(slurm, capsys, name, nodes, *words):
    """Submit the run on two nodes, and return the number of its job."""
    wait_for(lambda: slurm.is_idle(*nodes), "the nodes")
    others = ",".join(set(slurm.nodes) - set(nodes))
    return submit(capsys, "ddp", "--nodes", 2, f"--exclude={others}", *LONG, "--run-name", name, *words)


def with_a_checkpoint(slurm, nodes):
    """Return the machines of a run when it stands after its first checkpoint."""
    of_run = [slurm.machines[name] for name in nodes]
    wait_until_held(*of_run)
    return of_run


def start_again(slurm, job, *changes):
    """Spare a job most of the two minutes in the queue, in which its credentials of the earlier start are refused."""
    wait_for(lambda: slurm.job(job)["JobState"] == "PENDING", "the queue")
    slurm.ok("scontrol", "update", f"JobId={job}", "StartTime=now+4", *changes)


def assert_same_bits(name, unbroken):
    assert steps(name) == steps("r", unbroken)
    last = f"checkpoints/step-{STEPS}"
    assert_same_state(Path("out/runs", name, last), unbroken / "runs/r" / last)


@pytest.mark.promise(
    "M1 | Slurm preempts a job, or its time is nearly up | it saves, goes back into the queue and resumes to the bit, "
    "also with `--save-async`"
)
def test_a_warned_job_goes_on_by_itself_with_the_same_bits(slurm, capsys, unbroken):
    """One is warned because it is preempted, the other, which saves behind its steps, because its time is nearly up."""
    # Slurm looks at time limits every 30 s. A warning long before the end leaves a slow machine time.
    late = submitted(slurm, capsys, "late", RIGHT, "--time", 60, "--signal=B:TERM@600", "--save-async")
    with standing_still(*with_a_checkpoint(slurm, RIGHT)):
        slurm.ok("scontrol", "update", f"JobId={late}", "TimeLimit=10")
        preempted = submitted(slurm, capsys, "preempted", LEFT)
        with standing_still(*with_a_checkpoint(slurm, LEFT)):
            slurm.ok("scancel", "--batch", "--signal=TERM", preempted)
        start_again(slurm, preempted)
    start_again(slurm, late, "TimeLimit=60")
    for job, name in ((preempted, "preempted"), (late, "late")):
        ended = slurm.wait_for_end(job)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log_of(job)
        assert "status 75: back into the queue" in log_of(job)
        assert rows(name) == [("interrupted", 2, 1), ("ok", 2, 1)]
        assert_same_bits(name, unbroken())


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(slurm, capsys):
    job = submitted(slurm, capsys, "r", LEFT)
    with_a_checkpoint(slurm, LEFT)
    # Slurm lets the ranks go on before it sends them SIGTERM.
    slurm.ok("scancel", job)
    assert slurm.wait_for_end(job)["JobState"] == "CANCELLED", log_of(job)
    assert "back into the queue" not in log_of(job)
    assert rows("r") == [("interrupted", 2, 1)]


@pytest.mark.promise(
    "M2 | a node of a job of Slurm dies | the others end within 10 seconds; the job goes back into the queue and, with "
    "`--min-nodes`, on with fewer nodes"
)
@pytest.mark.promise(
    "M3 | the node with rank 0 and the job's script dies | as M2; that start leaves no row in the summary"
)
def test_a_node_that_dies_is_done_without(slurm, capsys, unbroken):
    """One job loses its second node, the other its first, which has rank 0 and the script that sbatch was given."""
    both = {"second": LEFT, "first": RIGHT}
    jobs = {name: submitted(slurm, capsys, name, nodes, "--min-nodes", 1) for name, nodes in both.items()}
    with paused(*with_a_checkpoint(slurm, LEFT)):
        with_a_checkpoint(slurm, RIGHT)
        slurm.machines["n3"].die()
        began = time.monotonic()
        wait_for(lambda: not slurm.machines["n4"].ranks(), "the end of the other rank")
        assert time.monotonic() - began < 60
    slurm.machines["n2"].die()
    began = time.monotonic()
    wait_for(lambda: Path("out/summary.csv").exists(), "the end of the other rank")
    assert time.monotonic() - began < 60
    for name in ("first", "second"):
        start_again(slurm, jobs[name])
    for name, job in jobs.items():
        ended = slurm.wait_for_end(job)
        assert ended["JobState"] == "COMPLETED", log_of(job)
        assert rows(name) == [("failed", 2, 1)] * (name == "second") + [("ok", 1, 2)]
        for ours, theirs in zip(steps(name), steps("r", unbroken()), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    for name in ("n2", "n3"):
        slurm.machines[name].start()
        slurm.start_slurmd(name)
    wait_for(slurm.is_idle, "the nodes")
