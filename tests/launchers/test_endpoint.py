"""A machine joins others only where torch's store answers."""

import socket
import time

import pytest
from torch.distributed import TCPStore

from gptscale.launchers import endpoint


def test_only_a_store_counts(monkeypatch, capsys):
    joined = []
    monkeypatch.setattr("torch.distributed.run.main", joined.append)
    monkeypatch.setattr(endpoint, "ANSWERS_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began, port = time.monotonic(), silent.getsockname()[1]
        with pytest.raises(SystemExit, match="2"):
            endpoint.main("127.0.0.1", port, ["x"])
        assert time.monotonic() - began < 60
    assert f"another program than torchrun has 127.0.0.1:{port}, in --endpoint" in capsys.readouterr().err
    monkeypatch.setattr(endpoint, "ANSWERS_S", 20.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint.main("127.0.0.1", store.port, ["x"])
    assert joined == [["x"]]
