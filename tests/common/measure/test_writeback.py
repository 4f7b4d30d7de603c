"""What the kernel works to write this process's bytes to disk is not taken by others."""

import os

import psutil
import pytest

from gptscale.common.measure import contention
from gptscale.common.measure.contention import MachineClock, taken_fraction
from gptscale.common.measure.writeback import Writeback, writeback

TICKS = os.sysconf("SC_CLK_TCK")


def stat(name, parent, user, system):
    return f"7 ({name}) S {parent} 0 0 0 -1 0 0 0 0 0 {user} {system} 0 0 20 0 1\n"


def test_counters_are_read_as_linux_writes_them(tmp_path):
    kernel = stat("kworker/u8:0-writeback", 2, 3 * TICKS, 4 * TICKS), stat("jbd2/vda", 2, 0, TICKS)
    for number, line in enumerate((*kernel, stat("a) 2 (b", 1, 99, 99), "cut off"), start=7):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(line)
    (tmp_path / "vmstat").write_text("pgpgin 5\npgpgout 3\npswpin 0\n")
    found = writeback(tmp_path)
    assert (found.kernel_s, found.all_bytes) == (8.0, 3072)
    assert found.own_bytes >= psutil.Process().io_counters().write_bytes - 2**20
    assert writeback(tmp_path / "gone")._replace(own_bytes=0) == Writeback(0.0, 0, 0)


@pytest.mark.parametrize(
    ("own", "everything", "seconds"), [(50, 100, 2.0), (100, 100, 4.0), (200, 100, 4.0), (0, 100, 0.0), (9, 0, 0.0)]
)
def test_the_kernels_time_is_shared_by_what_was_written(own, everything, seconds):
    assert Writeback(14.0, 5 + own, 7 + everything).since(Writeback(10.0, 5, 7)) == seconds


def test_a_run_that_saves_is_not_disturbed_by_its_own_writing(monkeypatch):
    """`bench saves` refused its own figures: for a GiB the kernel works for seconds, which counted as other programs'."""
    moments = iter(
        [
            (0.0, {0: (0.0, 0.0), 1: (0.0, 0.0)}, 0.0, 0.0, Writeback(0.0, 0, 0)),
            (10.0, {0: (10.0, 0.0), 1: (5.0, 0.0)}, 10.0, 0.0, Writeback(5.0, 2**30, 2**30)),
        ]
    )
    monkeypatch.setattr(contention.MachineClock, "_now", lambda clock: next(moments))
    assert taken_fraction([MachineClock(threads=2).lap()]) == 0.0
