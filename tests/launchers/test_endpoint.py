"""A machine joins others only where torch's store answers."""

import socket

import pytest
import torch.distributed.run
from torch.distributed import TCPStore

from gptscale.launchers import endpoint


def test_only_a_store_counts(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(torch.distributed.run, "main", started.append)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint.main("127.0.0.1", store.port, ["words"])
    assert started == [["words"]]
    monkeypatch.setattr(endpoint, "ANSWERS_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SystemExit, match="2"):
        endpoint.main("127.0.0.1", silent.getsockname()[1], ["words"])
    assert "another program than torchrun has 127.0.0.1:" in capsys.readouterr().err
    assert len(started) == 1
