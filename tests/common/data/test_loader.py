import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptscale.common.data import loader
from gptscale.common.data.loader import Batches, Prefetcher, split
from gptscale.common.data.sources import Array, open_source
from gptscale.common.errors import DataError

CPU = torch.device("cpu")


def counting(n):
    """Return a source whose token i is i, so that a batch shows where it was read."""
    return Array(np.arange(n, dtype=np.uint16), 65536, "counting")


def test_a_batch_is_slices_of_the_source_and_targets_are_one_further():
    batch = Batches(counting(1000), seq_len=16, global_batch_size=4, seed=1).batch(5)
    assert batch.step == 5
    assert batch.inputs.shape == batch.targets.shape == (4, 16)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    for row, (inputs, targets) in zip(batch.sequences, zip(batch.inputs, batch.targets, strict=True), strict=True):
        assert inputs.tolist() == list(range(16 * row, 16 * row + 16))
        assert targets.tolist() == list(range(16 * row + 1, 16 * row + 17))


@given(n_tokens=st.integers(9, 500), seq_len=st.integers(1, 8), step=st.integers(0, 200))
def test_no_batch_reads_beyond_the_source_and_none_of_it_is_wasted(n_tokens, seq_len, step):
    batches = Batches(counting(n_tokens), seq_len=seq_len, global_batch_size=4, seed=0)
    assert batches.n_sequences * seq_len + 1 <= n_tokens < (batches.n_sequences + 1) * seq_len + 1
    assert int(batches.batch(step).targets.max()) < n_tokens


def test_the_ranks_together_read_the_global_batch():
    common = {"seq_len": 16, "global_batch_size": 8, "seed": 1}
    alone = Batches(counting(1000), **common).batch(9)
    ranks = [Batches(counting(1000), **common, data_rank=rank, data_size=4) for rank in range(4)]
    for part in ("inputs", "targets"):
        assert torch.equal(torch.cat([getattr(rank.batch(9), part) for rank in ranks]), getattr(alone, part))
    assert all(ranks[0].sequences(9, r) == rank.batch(9).sequences for r, rank in enumerate(ranks))


def test_bytes_of_a_token_are_those_of_the_targets_of_all_ranks(bpe_folder, tmp_path):
    (tmp_path / "text.txt").write_text("def naïve(os):\n    return 3.14  # café\n" * 60)
    source = open_source(str(tmp_path / "text.txt"), tokenizer=bpe_folder, vocab_size=512)
    of_ranks = [
        Batches(source, seq_len=16, global_batch_size=4, seed=1, data_rank=r, data_size=n) for n, r in ((1, 0), (2, 1))
    ]
    targets = np.concatenate([of_ranks[0].batch(step).targets.flatten().numpy() for step in range(3)])
    expected = source.id_bytes[targets].sum() / targets.size
    assert [batches.bytes_per_token(3) for batches in of_ranks] == pytest.approx([expected] * 2)
    assert expected > 1.2
    assert Batches(counting(100), seq_len=8, global_batch_size=2, seed=1).bytes_per_token(1) is None


# A short source still holds one sequence out.
@pytest.mark.parametrize(("n_tokens", "n_train"), [(1000, 950), (34, 17)])
def test_the_held_out_part_is_the_end_and_training_never_reads_it(n_tokens, n_train):
    train, held_out = split(counting(n_tokens), seq_len=16)
    assert (len(train), len(held_out)) == (n_train, n_tokens - n_train)
    assert held_out.read(0, len(held_out)).tolist() == list(range(n_train, n_tokens))
    with pytest.raises(IndexError):
        train.read(n_train - 10, 11)
    assert train.fingerprint == held_out.fingerprint == counting(n_tokens).fingerprint


@pytest.mark.parametrize(("n_tokens", "fix"), [(33, "use --seq-len 15"), (4, "use --seq-len 1 "), (3, "more text")])
def test_too_few_tokens_are_an_error_whose_advice_works(n_tokens, fix):
    with pytest.raises(DataError, match=rf"{n_tokens} tokens, expected at least 34.*in counting.*{fix}"):
        split(counting(n_tokens), seq_len=16)
    if "--seq-len" in fix:
        split(counting(n_tokens), seq_len=int(fix.split()[2]))


class Scripted(Batches):
    """Batches that record what is read, and that can fail or wait."""

    def __init__(self, before=lambda step: None):
        super().__init__(counting(1000), seq_len=16, global_batch_size=4, seed=1)
        self.before, self.asked = before, list[int]()

    def batch(self, step):
        self.asked.append(step)
        self.before(step)
        return super().batch(step)


def test_the_prefetcher_gives_the_same_batches_in_order_each_read_once():
    batches = Scripted()
    with Prefetcher(batches, CPU) as data:
        got = [data.get(step) for step in range(10)]
    expected = Batches(counting(1000), seq_len=16, global_batch_size=4, seed=1)
    assert [batch.step for batch in got] == list(range(10))
    assert all(torch.equal(batch.inputs, expected.batch(batch.step).inputs) for batch in got)
    assert batches.asked[:10] == list(range(10))
    assert set(batches.asked[10:]) <= {10, 11}


def test_the_prefetcher_reads_ahead_and_no_further():
    reached = threading.Event()
    batches = Scripted(lambda step: reached.set() if step == 3 else None)
    with Prefetcher(batches, CPU, depth=3) as data:
        data.get(0)
        assert reached.wait(60)
        time.sleep(0.05)
        assert batches.asked == [0, 1, 2, 3]


def test_an_unexpected_step_starts_the_reading_ahead_anew():
    batches = Scripted()
    with Prefetcher(batches, CPU) as data:
        assert [data.get(step).step for step in (0, 1, 7, 8, 2)] == [0, 1, 7, 8, 2]


def test_an_error_in_the_thread_is_raised_for_its_step_and_reading_goes_on():
    raised = [OSError("disk gone"), SystemExit(3), TimeoutError("slow server")]
    failures = list(raised)

    def fail_once(step):
        if step == 2 and failures:
            raise failures.pop(0)

    with Prefetcher(Scripted(fail_once), CPU) as data:
        assert [data.get(step).step for step in (0, 1)] == [0, 1]
        for failure in raised:
            with pytest.raises(type(failure), match=str(failure)):
                data.get(2)
        assert [data.get(step).step for step in (2, 3)] == [2, 3]


def test_a_hanging_read_is_an_error_and_holds_up_neither_steps_nor_end(monkeypatch):
    monkeypatch.setattr(loader, "WAIT_S_MAX", 0.05)
    release = threading.Event()
    data = Prefetcher(Scripted(lambda step: release.wait(200) and None), CPU)
    begin = time.perf_counter()
    with pytest.raises(DataError, match=r"step 1 waited 0.05 s for its batch, in counting"):
        data.get(0)
    data.close()
    assert time.perf_counter() - begin < 60
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "gptscale-data")
    release.set()


def test_closing_ends_the_thread():
    with Prefetcher(Scripted(), CPU) as data:
        data.get(0)
    deadline = time.monotonic() + 60
    while any(t.name == "gptscale-data" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "gptscale-data" for t in threading.enumerate())
