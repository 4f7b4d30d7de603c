"""Who is missing, from beats in a store that is a dict."""

import pytest
from made_up_clock import Clock

from gptscale.common.process import heartbeat
from gptscale.common.process.heartbeat import Heartbeat, beat_of
from gptscale.common.process.progress import Progress


class Store(dict):
    def set(self, rank, words):
        self[rank] = words.encode()

    def get(self, rank):
        return super().get(rank, b"")


def beats_at(store, rank, step, part, *, waits=False):
    """Return the heartbeat of a rank that has told its place once, by hand."""
    own = Progress(Clock())
    own.step = step
    own.at(part)
    if waits:
        own.wait_begins()
    beat = Heartbeat(rank, 3, store, own)
    beat._closed.set()
    beat._beat()
    return beat


@pytest.fixture
def store(monkeypatch):
    """Ranks whose hearts beat tell their place again while another looks."""
    store = Store()
    store.beating = []
    # Between two looks a busy machine may let a second pass.
    monkeypatch.setattr(heartbeat.time, "time", lambda: 0.0)
    monkeypatch.setattr(heartbeat.time, "sleep", lambda s: [beat._beat() for beat in store.beating])
    return store


def test_a_rank_that_beats_but_does_not_come(store):
    own, lost = beats_at(store, 0, 7, "optimizer", waits=True), beats_at(store, 1, 7, "data")
    store.beating = [lost, beats_at(store, 2, 7, "forward", waits=True)]
    assert own.missing() == ("rank 1", "for 0 s at step 7 in data, while rank 0 was at step 7 in optimizer")


def test_a_rank_that_failed_of_itself_is_not_blamed(store):
    own, failed = beats_at(store, 0, 7, "forward", waits=True), beats_at(store, 1, 7, "forward", waits=True)
    failed.missing()
    store.beating = [failed]
    assert own.missing() is None


def test_without_a_store_there_is_no_answer():
    with Heartbeat.of_world(0, 1) as alone:
        assert alone.missing() is None


@pytest.mark.promise("X10")
def test_junk_is_no_beat(store):
    """It was a traceback in the launcher, and the run had no row."""
    escape = b'[1, 2, "\\u001b[2J", true, 0.1, 0.1]'
    for junk in (b"", b"{", b"[" * 9999, escape, b'{"a": 1}', b'[1, "2"]', b"null", b"\xff"):
        store[1] = junk
        assert beat_of(store, 1) is None


def test_rank_0_took_the_store_along(store, monkeypatch):
    """Where the launcher holds the store, its loss says nothing about rank 0."""
    own = beats_at(store, 1, 7, "backward")

    def gone(rank):
        raise RuntimeError("Connection reset by peer")

    store.get = gone
    assert own.missing() == ("rank 0", "with the rendezvous that it served, while rank 1 was at step 7 in backward")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert own.missing() is None
