"""What others take of a machine is told from counters, and cores that a run does not use cost it nothing."""

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from benchmarks import quiet
from gptscale.common.errors import ConfigError
from gptscale.common.measure import contention
from gptscale.common.measure.contention import MachineClock, MachineTime, processor_times, taken_fraction, throttled_s

QUIET = MachineTime("a", 10.0, {0: 9.0, 1: 9.0}, {0: 0.0, 1: 0.0}, own_s=9.0, throttled_s=0.0, threads=1)


@pytest.mark.parametrize(
    ("ranks", "taken"),
    [
        ([QUIET, QUIET], 0.0),
        # The other rank's time is another program's when there is no other rank; but one thread leaves a core to it.
        ([QUIET], 0.0),
        ([replace(QUIET, threads=2)], 0.45),
        # Steal counts whole, of the processors that the run wants.
        ([replace(QUIET, stolen_s={0: 4.0, 1: 4.0}), QUIET], 0.4),
        ([replace(QUIET, throttled_s=5.0), QUIET], 0.25),
        # On the machine where it is most.
        ([QUIET, QUIET, replace(QUIET, host="b", threads=2)], 0.45),
        ([replace(QUIET, gpu=0.3), QUIET], 0.3),
        # Too short to tell, and no counters.
        ([replace(QUIET, wall_s=0.9)], None),
        ([replace(QUIET, busy_s={}, stolen_s={})], None),
    ],
)
def test_taken_fraction(ranks, taken):
    assert taken_fraction(ranks) == (None if taken is None else pytest.approx(taken))


def test_counters_are_read_as_linux_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda pid: {1})
    (tmp_path / "stat").write_text("cpu  9 9 9\ncpu0 1 1 1 1 1 1 1 1 0 0\ncpu1 100 20 3 999 999 4 5 700 0 0\nintr 1\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert processor_times() == {1: (pytest.approx(1.32), 7.0)}
    (tmp_path / "stat").unlink()
    assert processor_times() == {}
    assert throttled_s(tmp_path) == 0.0


def test_a_program_beside_is_seen_and_a_child_of_our_own_is_not():
    spin = "import time\nwhile time.process_time() < 0.6: pass"
    clock = MachineClock(threads=1)
    ended = subprocess.run([sys.executable, "-c", spin], check=True)
    time.sleep(0.05)
    lap = clock.lap()
    assert ended.returncode == 0
    assert lap.own_s > 0.3
    assert sum(lap.busy_s.values()) >= lap.own_s - 0.1


def test_a_bench_refuses_a_busy_machine(monkeypatch):
    """Before it begins, and when it has measured. The neighbour is one in figures."""
    monkeypatch.setattr(quiet, "WATCH_S", 1e-3)
    taken = iter([0.3, 0.01, 0.2, 0.0, 0.0])
    monkeypatch.setattr(contention, "taken_fraction", lambda laps: next(taken))
    measured = []

    def measure(what, **options):
        with quiet.quiet_machine(quiet.QuietOptions(**options), "bench x"):
            measured.append(what)

    with pytest.raises(ConfigError, match=r"took 30%.*in bench x.*--allow-busy"):
        measure("never")
    with pytest.raises(ConfigError, match="while bench x measured"):
        measure(1)
    measure(2)
    measure(3, allow_busy=True)
    assert measured == [1, 2, 3]
