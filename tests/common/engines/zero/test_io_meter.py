"""The meter of a handle: bytes by direction, times from request to wait, and how long the caller was blocked."""

import torch

from gptscale.common.engines.zero.io_meter import MeteredHandle, Traffic


class Disk:
    """A handle whose requests take no time and whose waits take three seconds."""

    def __init__(self):
        self.now = 0.0

    def async_pread(self, buffer, path, offset):
        self.now += 1
        return 0

    async_pwrite = async_pread

    def sync_pwrite(self, buffer, path, offset):
        self.now += 2
        return 0

    def wait(self):
        self.now += 3
        return 2

    def is_pinned(self, tensor):
        return True


def test_counts_and_passes_on():
    disk, traffic, data = Disk(), Traffic(), torch.zeros(1000)
    handle = MeteredHandle(disk, traffic, clock=lambda: disk.now)
    handle.async_pread(data, "a", 0)
    handle.async_pread(data, "b", 0)
    handle.async_pwrite(data, "c", 0)
    assert handle.wait() == 2
    assert handle.is_pinned(data)
    assert traffic == Traffic(read_bytes=8000, written_bytes=4000, read_s=6.0, write_s=4.0, waited_s=3.0)
    handle.sync_pwrite(data, "d", 0)
    assert traffic == Traffic(read_bytes=8000, written_bytes=8000, read_s=6.0, write_s=6.0, waited_s=5.0)
