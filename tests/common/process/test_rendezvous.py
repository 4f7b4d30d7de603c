"""A rank with a broken environment, or a rendezvous that is not there: one line, soon, before torch tries for minutes."""

import os
import socket
import socketserver
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gptscale.common.errors import ConfigError
from gptscale.common.process import rendezvous
from gptscale.common.process.program import Program
from gptscale.common.process.rendezvous import open_store, warn_of_open_port
from gptscale.common.process.task import run_captured
from gptscale.common.process.world import World, process_group

WORLDS = Path(__file__).parents[2] / "worlds"
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
BROKEN = {
    "rank is no number": (RANK_1 | {"RANK": "x"}, "RANK is 'x', expected 0 to 1"),
    "rank beyond the world": (RANK_1 | {"RANK": "2"}, "RANK is '2', expected 0 to 1"),
    "negative": (RANK_1 | {"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1', expected 0 to 1"),
    "no ranks": (RANK_1 | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', expected 1 to"),
    "an absurd world": (RANK_1 | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9999"),
    "empty": (RANK_1 | {"RANK": ""}, "RANK is not set"),
    "a digit that is none": (RANK_1 | {"RANK": "\u00b2"}, "expected 0 to 1"),
    "ranks of this machine": (RANK_1 | {"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x', expected 1 to 2"),
    "rank alone": ({"RANK": "1"}, "LOCAL_RANK, WORLD_SIZE is not set though RANK is"),
}


@pytest.mark.promise("C15")
@pytest.mark.parametrize("case", BROKEN)
def test_a_variable_that_makes_no_sense_is_named(monkeypatch, case):
    variables, message = BROKEN[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        World.from_environment("cpu")
    assert message in str(caught.value)
    assert str(caught.value).endswith("in the environment, start with `gptscale run` or torchrun")


@pytest.fixture
def address(monkeypatch, free_port):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setattr(rendezvous, "REACH_S", 200.0)
    monkeypatch.setattr(rendezvous, "SILENCE_S", 0.5)
    return "127.0.0.1", free_port


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rendezvous_that_nobody_names(monkeypatch, address, name):
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=f"{name} is not set, in the environment"):
        open_store(0, 5.0)


@pytest.mark.promise("C15")
def test_a_rendezvous_that_does_not_answer_is_an_error_in_time(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "REACH_S", 1.5)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r":\d+ did not answer for \d+ s .Connection refused., in MASTER_ADDR"):
        open_store(1, 5.0)
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(ConfigError, match=r"nowhere.invalid:\d+ did not answer for \d+ s"):
        open_store(1, 5.0)
    assert time.monotonic() - began < 60


@pytest.mark.promise("C15")
def test_a_server_that_is_no_store_is_refused_at_once(address):
    """torch would ask it again and again, with a page of C++ frames each time."""

    class Answers(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(100)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.TCPServer(address, Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match=r"is no rendezvous \(it answers b'HTTP'\)"):
            open_store(1, 5.0)
        server.shutdown()


@pytest.mark.promise("C15")
def test_a_port_that_accepts_and_stays_silent_is_told_in_time(address):
    """A rank waited for more than five minutes, without a word."""
    began = time.monotonic()
    with socket.create_server(address), pytest.raises(ConfigError, match="takes the connection and says nothing"):
        open_store(1, 300.0)
    assert time.monotonic() - began < 60


@pytest.mark.promise("X10")
def test_a_byte_does_not_hold_the_store_of_rank_0(address):
    """A port scanner sends as much."""
    store = open_store(0, 5.0)
    with socket.create_connection(address) as scanner:
        scanner.sendall(b"\0")
        store.set("a", "b")
        for _ in range(3):
            assert open_store(1, 5.0).get("a") == b"b"


@pytest.mark.promise(
    "C15 | a port in use, a wrong address, a missing variable | `gptscale run` needs no port; else one line within 30 "
    "seconds, with the process that has the port; `multinode.sh` names a wrong endpoint as soon"
)
def test_a_port_that_is_taken_names_its_process(address):
    taken = rf"port {address[1]} is in use by process {os.getpid()} \(.+\), in MASTER_PORT"
    with socket.create_server(address), pytest.raises(ConfigError, match=taken):
        open_store(0, 5.0)


def test_a_rendezvous_on_all_interfaces_is_told_in_one_line(address, capsys, monkeypatch):
    for by in ("rank 0", "torchrun"):
        warn_of_open_port()
        (line,) = capsys.readouterr().err.splitlines()
        said = f"gptscale: warning: {by} lets every machine that reaches this one write to port {address[1]}, on all interfaces"
        assert line.startswith(said)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    # Under `gptscale run` it is like this.
    monkeypatch.setenv("GPTSCALE_RENDEZVOUS", "/proc/1/fd/1")
    warn_of_open_port()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", [["gptscale.recipes", "ddp", "--data", "synthetic"], ["gptscale.lenet.run.worker", "--strategy", "ddp"]]
)
@pytest.mark.parametrize("variables", [{"RANK": "x"}, {"MASTER_PORT": "0"}], ids=str)
def test_a_rank_says_one_line_and_ends_with_2(module, variables, tmp_path):
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", **variables}
    words = (*module[1:], "--device", "cpu", "--out", str(tmp_path / "out"))
    # Once afresh, so that a line of an import would be seen.
    ended = run_captured(Program(module[0], words), timeout=400, environ=environ, fork="MASTER_PORT" in variables)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("gptscale: error: ")
    assert next(iter(variables)) in line
    assert ended.returncode == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.promise("C18 | torchrun's restarts share a store | every start has its own part of it")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_torchrun_restarts_meet_again(tmp_path):
    """torchrun keeps one store for all starts. GPTSCALE_RESTARTS=20 has them meet that often."""
    last = os.environ.get("GPTSCALE_RESTARTS", "2")
    torchrun = ("--standalone", "--nproc-per-node", "2", "--max-restarts", last)
    words = (*torchrun, str(WORLDS / "world_restarts.py"), last, str(tmp_path / "met"))
    ended = run_captured(Program("torch.distributed.run", words), timeout=880)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "met").read_text() == f"{last}\n"


def test_a_group_that_a_library_makes_waits_no_longer_than_the_runs_own(address, monkeypatch):
    """DeepSpeed gives its groups no timeout: a rank that stood still was missed after half an hour."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(dist.distributed_c10d, name, dist.distributed_c10d.default_pg_timeout)
    with process_group(World(0, 0, 1, torch.device("cpu"), 7.0)):
        group = dist.new_group([0])
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
