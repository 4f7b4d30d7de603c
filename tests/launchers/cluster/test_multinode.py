"""torchrun on two machines: they meet by name, refuse what does not fit, and one goes on when the other is gone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machines import held, machines, standing_still, wait_for, wait_until_held
from worlds import Started, command, rows

MULTINODE = Path(__file__).parents[3] / "launchers" / "multinode.sh"
TINY = ["--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 16, "--vocab-size", 257, "--no-tensorboard"]
PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Options of torchrun by its own variable: it waits 30 s for more machines (the second may be 6 s late), and misses one after 15 s.
QUICK = "last_call_timeout=20,keep_alive_interval=1"
# Where a program listens that is no torchrun.
OTHERS_PORT = 29498
# Seconds until what cannot work is refused: half a minute, and half a minute more on a busy machine.
REFUSED_S = 60

pytestmark = pytest.mark.slow


def begin(machine, log, *words, **variables):
    """Start multinode.sh on a machine, add its output to the file `log`, and return its process."""
    with open(log, "ab") as file:
        return machine.begin("bash", MULTINODE, *words, log=file, PATH=PATH, PET_RDZV_CONF=QUICK, **variables)


@pytest.fixture(scope="module", autouse=True)
def wrong_endpoints(tmp_path_factory):
    """Start multinode.sh at wrong endpoints, so that the other tests run while it waits."""
    folder, silent = tmp_path_factory.mktemp("wrong"), "10.77.0.9"
    answers = {
        f"n1:{OTHERS_PORT}": f"another program than torchrun has n1:{OTHERS_PORT}, in --endpoint",
        "n1:29499": "n1:29499 did not answer for 25 s, in --endpoint",
        silent: f"{silent}:29400 did not answer for 25 s, in --endpoint",
    }
    with machines(folder, "n1", "n2") as made:
        n1, n2 = made.values()
        # A packet sent there finds no machine. Without this the system itself would say after 3 s that there is none.
        n2.ok("ip", "neighbour", "add", silent, "lladdr", "02:00:00:00:00:09", "dev", "eth0")
        n1.begin(sys.executable, "-m", "http.server", OTHERS_PORT, log=subprocess.DEVNULL)
        asked = []
        for endpoint, answer in answers.items():
            log = folder / f"{endpoint}.log"
            asked.append((begin(n2, log, "--nodes", 2, "--endpoint", endpoint, "ddp"), log, answer))
        unknown = n2.run("bash", MULTINODE, "--nodes", 2, "--endpoint", "n7", "ddp", PATH=PATH, timeout=REFUSED_S)
        # By now all have started, however busy this machine is.
        yield unknown, time.time(), asked


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with machines(tmp_path, "switch", "n1", "n2") as made:
        yield {name: made[name] for name in ("n1", "n2")}


def test_what_does_not_fit_is_refused_by_name(pair, tmp_path):
    """A machine with an option, data and a version of its own."""
    run = ["ddp", *TINY, "--steps", 2, "--tokenizer", "bytes", "--device", "cpu", "--out", "out"]
    version = tmp_path / "other" / "gptscale-9.9.9.dist-info"
    version.mkdir(parents=True)
    (version / "METADATA").write_text("Metadata-Version: 2.1\nName: gptscale\nVersion: 9.9.9\n")
    own = {"n1": {}, "n2": {"PYTHONPATH": f"{tmp_path}/other:{os.environ.get('PYTHONPATH', '')}"}}
    processes = []
    for name, rate in (("n1", 0.1), ("n2", 0.2)):
        Path(f"{name}.txt").write_text(f"What {name} has to say. " * 99)
        words = ["--nodes", 2, "--endpoint", "n1:29401", "--nproc", 1, *run, "--lr", rate, "--data", f"{name}.txt"]
        processes.append(begin(pair[name], f"{name}.log", *words, **own[name]))
    # How long the two torchruns import torch depends on who else uses the machine. That of the ranks counts.
    wait_for(lambda: all(machine.ranks() for machine in pair.values()), "a rank on each machine")
    deadline = time.monotonic() + REFUSED_S
    assert all(process.wait(max(0.0, deadline - time.monotonic())) != 0 for process in processes)
    said = Path("n2.log").read_text()
    assert "--lr is 0.1 on rank 0 but 0.2 on rank 1" in said or "--lr is 0.2 on rank 0 but 0.1 on rank 1" in said
    assert "the data's fingerprint is " in said
    assert "the version of gptscale is " in said
    assert "9.9.9 on rank " in said
    assert not Path("out").exists()


LONG = ["ddp", *TINY, "--data", "synthetic", "--device", "cpu", "--steps", 400, "--save-every", 50, "--log-every", 20,
        "--global-batch-size", 8, "--micro-batch-size", 4, "--no-verdict", "--run-name", "r", "--resume", "auto"]  # fmt: skip


def steps(out):
    return [float(row["loss"]) for row in rows(Path(out, "runs/r/steps.csv"))]


@pytest.mark.promise(
    "M4 | a machine of several under torchrun dies, and comes back | the others go on (`--nodes 1:2 --max-restarts N "
    "--resume auto`), and take it in again"
)
@pytest.mark.promise(
    "M5 | the machine with rank 0 and the endpoint dies | the others end within a minute and name rank 0; the same line "
    "with another endpoint resumes"
)
def test_a_run_goes_on_with_the_machines_that_are_left(pair, tmp_path):
    """One is lost and comes back, a rank is killed, and then the first machine is lost, with rank 0 and the endpoint."""
    n1, n2 = pair.values()
    # Rank 0 stands before each of these checkpoints until it is told to go on.
    stands = held(tmp_path, *(f"/checkpoints/step-{step}" for step in (100, 150, 200, 250)))

    def elastic(machine, nodes="1:2", endpoint="n1:29400"):
        words = ["--nodes", nodes, "--endpoint", endpoint, "--nproc", 1, "--max-restarts", 3]
        return begin(machine, f"{machine.name}.log", *words, *LONG, "--out", "out", **stands)

    elastic(n1)
    elastic(n2)
    rank_0 = wait_until_held(n1)
    n2.die()
    rank_0.resume()
    # While torchrun waits for the lost machine.
    unbroken = Started(command("run", "ddp", "--nproc", 2, *LONG[1:], "--out", "unbroken"))
    wait_for(lambda: "resumed from" in Path("n1.log").read_text(), "the first machine alone")
    wait_until_held(n1)
    with standing_still(n1):
        n2.start()
        second = elastic(n2)

    rank_0 = wait_until_held(n1)
    n2.ranks()[0].kill()
    rank_0.resume()
    wait_for(lambda: Path("n1.log").read_text().count("resumed from") == 3, "the restart")
    wait_until_held(n1)
    n1.die()
    assert second.wait(120) != 0
    assert "rank 1: rank 0 died or fell silent" in Path("n2.log").read_text()[-30000:]

    last = elastic(n2, "1", "n2:29400")
    assert last.wait(240) == 0, Path("n2.log").read_text()[-3000:]
    ends = [(row["status"], row["world_size"], row["grad_accum_steps"]) for row in rows(Path("out/summary.csv"))]
    assert ends == [("failed", "2", "1"), ("interrupted", "1", "2"), ("failed", "2", "1"), ("ok", "1", "2")]
    status, _, said = unbroken.ended()
    assert status == 0, said
    assert steps("out") == pytest.approx(steps("unbroken"), rel=1e-5)


@pytest.mark.promise("C15")
def test_a_wrong_endpoint_is_refused_by_name(wrong_endpoints):
    """A name that nobody knows, a port where nobody is, one that another program has, an address that never answers."""
    unknown, began, asked = wrong_endpoints
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "nobody knows the machine n7, in --endpoint" in unknown.stderr
    for process, log, answer in asked:
        assert process.wait(60) == 2
        (line,) = log.read_text().splitlines()
        assert answer in line
        # When it was refused, which may be long ago.
        assert log.stat().st_mtime - began < REFUSED_S
