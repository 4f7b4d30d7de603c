"""Ranks that are all alike go on after the roll call, and all others end at once with one line."""

import json
import signal
import threading
import time

import pytest
import torch.distributed as dist
from worlds import Started, imports_of

from gptscale.common.errors import ConfigError, DataError, PeerError
from gptscale.common.process import roll_call
from gptscale.common.process.program import Program
from gptscale.common.process.roll_call import Refusal, RefusedError, RollCall, check_same_on_ranks

FACTS = {"--lr": "0.1", "the data's fingerprint": "abc"}


def sign_all_in(*facts, timeout_s=200.0, refused=()):
    """Have a rank for each of `facts` sign in, in threads, and return what each raised, within seconds.

    refused: the numbers of the ranks that leave `error` instead. A rank without facts never comes.
    """
    store, ended, said = dist.HashStore(), {}, {}
    error = DataError("no such file", "in --data", "name a file")

    def come(rank):
        call = RollCall(store, rank, len(facts))
        try:
            if rank in refused:
                said[rank] = call.refuse(error)
                ended[rank] = call.leave()
            else:
                ended[rank] = call.sign_in(facts[rank], timeout_s)
        except (ConfigError, PeerError) as raised:
            ended[rank] = raised

    threads = [threading.Thread(target=come, args=[rank]) for rank in range(len(facts)) if facts[rank] is not None]
    began = time.monotonic()
    for thread in threads[1:]:
        thread.start()
    if None in facts:
        # Rank 0 looks once, so all that come at all are there before.
        store.wait([f"gptscale/roll call/start/rank {rank}" for rank in range(1, len(facts)) if facts[rank]])
    threads[0].start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 20
    return ended


@pytest.fixture(autouse=True)
def _sigterm_acts_again():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_refused_rank_says_why_before_it_can_be_ended():
    store = dist.HashStore()
    store.set("gptscale/roll call/start/outcome", json.dumps(Refusal(1, "", 2, "no", "in --data", "name")))
    with pytest.raises(RefusedError):
        RollCall(store, 1, 2).sign_in(FACTS, 1.0)
    signal.raise_signal(signal.SIGTERM)


def test_ranks_that_are_alike_go_on():
    ended = sign_all_in(FACTS, FACTS, FACTS)
    assert ended == {0: None, 1: None, 2: None}


def test_all_hear_of_all_that_differs():
    ended = sign_all_in(FACTS, FACTS, FACTS | {"--lr": "0.2"})
    lines = {str(error) for error in ended.values()}
    assert lines == {"--lr is 0.1 on rank 0,1 but 0.2 on rank 2, in what the ranks were started with, start all alike"}
    assert all(isinstance(error, RefusedError) and not error.is_said for error in ended.values())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_hear_why_a_rank_was_refused(rank, monkeypatch):
    """At once, although it never signs in. Another rank of its machine need not say so again."""
    ended = sign_all_in(FACTS, FACTS, FACTS, refused=[rank])
    assert ended.pop(rank) is None
    assert {str(each) for each in ended.values()} == {f"rank {rank} was refused: no such file, in --data, name a file"}
    assert all(error.is_said for error in ended.values())
    elsewhere = Refusal.of(DataError("no", "in --data", "name"), rank)._replace(host="another")
    assert not elsewhere.error().is_said
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert elsewhere.error().is_said


def test_rank_0_waits_for_no_refused_rank_that_waited_for_it_in_vain(monkeypatch):
    monkeypatch.setattr(roll_call, "RANK_0_S", 0.1)
    store, began = dist.HashStore(), time.monotonic()
    assert not RollCall(store, 1, 2).refuse(DataError("no such file", "in --data", "name a file"))
    with pytest.raises(RefusedError, match="rank 1 was refused"):
        RollCall(store, 0, 2).sign_in(FACTS, 200.0)
    assert time.monotonic() - began < 20


def test_the_first_of_several_that_were_refused_is_named():
    ended = sign_all_in(FACTS, FACTS, FACTS, FACTS, refused=[0, 3])
    assert {str(ended[rank])[:6] for rank in (1, 2)} in ({"rank 0"}, {"rank 3"})


def test_a_rank_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(roll_call, "LONGER_S", 50.0)
    ended = sign_all_in(FACTS, None, FACTS, None, timeout_s=0.0)
    assert {str(error) for error in ended.values()} == {
        "rank 1,3 did not come within 0 s, in the rendezvous, look for its own message"
    }
    assert all(isinstance(error, PeerError) for error in ended.values())


def test_rank_0_says_it_for_a_rank_beside_it(monkeypatch):
    error = ConfigError("unknown option", "on the command line", "see --help")
    another = ConfigError("another", "in --lr", "use 1")
    monkeypatch.setattr(roll_call, "RANK_0_S", 0.1)

    def says(outcome):
        store = dist.HashStore()
        if outcome != "rank 0 never came":
            store.set("gptscale/roll call/start/outcome", json.dumps(outcome))
        return RollCall(store, 1, 2).refuse(error)

    assert says(Refusal.of(error, 0))
    assert not says(Refusal.of(another, 0))
    assert not says(Refusal.of(error, 1))
    assert not says(Refusal.of(error, 0)._replace(host="another"))
    assert not says(None)
    assert not says("rank 0 never came")


@pytest.mark.promise("X10")
@pytest.mark.parametrize(
    "junk", [b"{", b"[" * 5000, b"[1, 2]", b'{"a": 1}', b"7", b"\xff", b'"' + b"a" * (1 << 21) + b'"']
)
@pytest.mark.parametrize("key", ["rank 1", "outcome"])
def test_junk_in_the_rendezvous_is_one_line(key, junk, monkeypatch):
    """Whoever reaches a rendezvous that is a port can write there."""
    monkeypatch.setattr(roll_call, "REACH_S", 0.1)
    store = dist.HashStore()
    store.set(f"gptscale/roll call/start/{key}", junk)
    with pytest.raises(ConfigError) as caught:
        RollCall(store, *((0, 2) if key == "rank 1" else (1, 2))).sign_in(FACTS, 0.0)
    assert f"the entry {key!r} was not written by gptscale" in str(caught.value)
    assert str(caught.value).endswith("in the rendezvous, see who else can reach its port")
    assert len(str(caught.value).splitlines()) == 1


def test_ranks_that_were_started_with_other_options():
    facts = {"--seq-len": 8, "--lr": None, "--resume": None}
    check_same_on_ranks([facts])
    check_same_on_ranks([facts] * 4)
    with pytest.raises(ConfigError) as error:
        check_same_on_ranks([facts, facts | {"--lr": 0.5}, facts | {"--lr": 0.5, "--seq-len": 4}])
    assert str(error.value) == (
        "--seq-len is 8 on rank 0,1 but 4 on rank 2; --lr is None on rank 0 but 0.5 on rank 1,2, "
        "in what the ranks were started with, start all alike"
    )
    with pytest.raises(ConfigError, match="a is 0 on rank 0 but 1 on rank 1,2,3,4,5,6,7,8 and 91 more, in"):
        check_same_on_ranks([{"a": 0}] + [{"a": 1}] * 99)


@pytest.mark.promise("C17")
@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("what", ["ddp", "lenet"])
def test_a_refused_rank_tells_the_others_before_any_timeout(what, refused, tmp_path, free_port):
    """As Slurm starts ranks: rank 0 opens the store, even if it is refused. The other waited for 30 or 120 seconds."""
    began, started = time.monotonic(), []
    for rank in (0, 1):
        common = ["--device", "cpu", "--out", str(tmp_path / "out")]
        if what == "ddp":
            data = str(tmp_path / "no.txt") if rank == refused else "synthetic"
            target, words = "gptscale.recipes", ["ddp", *common, "--data", data]
        else:
            mistake = ["--learning-rte", "1"] if rank == refused else []
            target, words = "gptscale.lenet.run.worker", [*common, "--strategy", "ddp", *mistake]
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": free_port}
        program = Program(target, tuple(words), imports=imports_of((what,), ""))
        variables = {name: str(value) for name, value in places.items()}
        started.append(Started(program, MASTER_ADDR="127.0.0.1", **variables))
    ends = [rank.ended(100) for rank in started]
    assert [status for status, _, _ in ends] == [2, 2]
    errors = [[line for line in err.splitlines() if "warning" not in line] for _, _, err in ends]
    assert len(errors[refused]) == 1, errors
    (line,) = errors[refused]
    assert ("no.txt" if what == "ddp" else "learning-rte") in line
    # On one machine one line is enough. A rank that waits until a timeout prints a line too.
    assert errors[1 - refused] == []
    assert time.monotonic() - began < 60
    assert not (tmp_path / "out").exists()
