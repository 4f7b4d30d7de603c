"""A machine joins others only where torch's store answers."""

import socket
import time

from torch.distributed import TCPStore

from gptscale.launchers.endpoint import has_store


def test_only_a_store_counts():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert not has_store("127.0.0.1", silent.getsockname()[1], 0.5)
        assert time.monotonic() - began < 60
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert has_store("127.0.0.1", store.port, 20.0)
