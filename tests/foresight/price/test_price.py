"""A recorded step is read, priced and replayed: what belongs to what, and when each stream runs."""

import dataclasses

import pytest

from gptscale.foresight.price.cost import KERNEL_S, costs_of
from gptscale.foresight.price.record import Call, Work, recorded_step, summary
from gptscale.foresight.price.replay import replay
from gptscale.foresight.price.step_time import priced, step_times

H100 = costs_of("h100-80")


def calls(*rows):
    """Return calls, one each tenth of a second, between the marks of a step."""
    marked = [("mark", "step begins", 0), *rows, ("mark", "step ends", 0)]
    return [
        Call(i / 10, kind, stream, name, tuple([*sizes, 0, 0, 0, 0][:4]))
        for i, (kind, name, stream, *sizes) in enumerate(marked)
    ]


def test_work_gets_what_its_operation_computes_and_touches():
    begins = ("operation", "", 0)
    product, kernel, *both, free, copied = recorded_step(
        calls(
            begins,
            ("product", "gemm", 0, 64, 32, 16, 1),
            ("operation", "mm bf16", 0, 0, 700, 0, 1),
            begins,
            ("kernel", "flash_fwd_kernel", 0, 4, 128),
            ("operation", "_scaled_dot_product_flash_attention fp16", 0, 5000, 900, 0, 2),
            begins,
            ("kernel", "a", 0, 1, 1),
            ("kernel", "b", 0, 1, 1),
            ("operation", "add bf16", 0, 0, 100, 0, 1),
            ("kernel", "of_a_library", 0, 2, 256),
            ("copy", "host to device", 5, 4096),
        )
    )
    assert (product.flops, product.nbytes, product.precision, product.part) == (2 * 64 * 32 * 16, 700, "bf16", 1)
    assert (kernel.flops, kernel.nbytes, kernel.part, kernel.is_attention) == (5000, 900, 2, True)
    assert [each.nbytes for each in both] == [50, 50]
    assert (free.nbytes, free.threads) == (None, 512)
    assert (copied.nbytes, copied.stream, copied.at) == (4096, 5, pytest.approx(12 / 13))


def test_a_cuda_graph_runs_what_it_captured_on_the_stream_of_its_launch():
    captured = [
        ("capture", "begins", 5),
        ("operation", "", 0),
        ("product", "gemm", 5, 64, 32, 16, 1),
        ("operation", "mm bf16", 0, 0, 700, 0, 1),
        ("kernel", "beside", 6, 1, 128),
        ("capture", "ends", 5, 77),
    ]
    launch = ("graph", "launch", 0, 77)
    before = [Call(-1.0, kind, stream, name, (*sizes, 0, 0, 0, 0)[:4]) for kind, name, stream, *sizes in captured]
    alone = [Call(-0.5, "kernel", 0, "of an earlier step", (1, 1, 0, 0))]
    work = recorded_step([*before, *alone, *calls(launch, launch)])
    assert [(each.kind, each.stream, each.nbytes) for each in work] == 2 * [("product", 0, 700), ("kernel", 6, None)]
    assert [each.at for each in work] == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3])
    # A graph that is captured within the step runs at its launches alone.
    assert len(recorded_step(calls(*captured, launch))) == 2


def test_a_message_knows_its_peer_and_a_collective_its_machine():
    sent, reduced = recorded_step(
        calls(
            ("mark", "to 3", 0),
            ("collective", "send", 9, 100, 2, 0),
            ("operation", "", 0),
            ("collective", "all-reduce", 9, 100, 16, 0),
            ("operation", "allreduce_ bf16", 0, 0, 0, 4, 2),
        )
    )
    assert (sent.peer, reduced.peer, reduced.ranks, reduced.on_node) == (3, None, 16, 4)


@pytest.mark.parametrize("listed", [[], calls()[:-1], calls()[1:]])
def test_a_step_that_does_not_end_is_none(listed):
    assert recorded_step(listed) is None


def test_a_step_is_summed_up():
    copied = [Work(0.0, "copy", 0, "host to device", nbytes=size) for size in (100, 28)]
    gathered = [collective(nbytes=4096)] * 2
    work = [product(2, 3, 5), product(2, 3, 5), Work(0.0, "kernel", 0, "gelu"), *copied, *gathered]
    assert summary(work) == {
        "launches": 5,
        "product_flops": 2 * 2 * (2 * 3 * 5),
        "kernels": {"gelu": 1},
        "collectives": [{"name": "all-gather", "nbytes": 4096, "ranks": 8, "count": 2}],
        "copied": {"host to device": 128},
    }


def product(m, n, k, precision="bf16", **more):
    return Work(0.0, "product", 0, "mm", 2.0 * m * n * k, 0.0, precision, (m, n, k, 1), **more)


def test_a_large_product_reaches_the_share_and_a_small_one_less():
    large, small = (2.0 * n**3 / H100.seconds(product(n, n, n)) / H100.peak("bf16") for n in (16384, 512))
    assert H100.reached.products * 0.93 < large < H100.reached.products
    assert small < large / 4


def test_precisions_have_their_rates():
    fp8, bf16, tf32, fp32 = (H100.seconds(product(8192, 8192, 8192, p)) for p in ("fp8", "bf16", "tf32", "fp32"))
    assert fp8 < bf16 < tf32 < fp32
    assert tf32 / bf16 == pytest.approx(2, rel=0.01)
    a100 = costs_of("a100-80")
    short, long = ({p: a100.seconds(product(8192, 8192, k, p)) for p in ("bf16", "fp32")} for k in (512, 8192))
    # Twice as long for each operation, but in fp32, whose tiles take longer than the pipeline to fill.
    assert short["bf16"] > 1.8 * long["bf16"] / 16
    assert short["fp32"] < 1.1 * long["fp32"] / 16


def collective(name="all-gather", nbytes=1e9, ranks=8, on_node=0, **more):
    return Work(0.0, "collective", 7, name, nbytes=nbytes, ranks=ranks, on_node=on_node, **more)


def test_collectives_follow_the_links():
    inside, outside = H100.seconds(collective()), H100.seconds(collective(ranks=16))
    apart = H100.seconds(collective(ranks=16, on_node=1))
    assert inside == pytest.approx(1e9 * 7 / 8 / (450e9 * H100.reached.inside), rel=0.05)
    # Eight groups whose ranks lie on machines of their own share the links of each.
    assert inside < outside < apart
    assert H100.seconds(collective("all-reduce")) == pytest.approx(2 * inside, rel=0.03)
    assert H100.seconds(collective(ranks=1)) == KERNEL_S


def message(name="send", peers=(0, 1), nbytes=1e9, **more):
    return collective(name, nbytes, 16, 8, sizes=(*peers, 0, 0), **more)


def test_messages_cross_and_those_between_machines_take_longer():
    near, far, own = (H100.seconds(message(peers=peers)) for peers in ((0, 7), (0, 8), (0, 0)))
    assert near == pytest.approx(1e9 / (450e9 * H100.reached.inside), rel=0.02)
    assert far == pytest.approx(1e9 / (400e9 / 8 * H100.reached.outside), rel=0.02)
    assert own < near / 10
    ring = [message(), message("receive", (0, 8))]
    assert H100.together(ring) == pytest.approx(far)
    assert H100.together([message(), message()]) == pytest.approx(2 * near, rel=0.02)
    # Each rank sends half of what it has to the other machine.
    assert H100.seconds(collective("all-to-all", 16e9, 16, 8)) == pytest.approx(8 * far, rel=0.01)
    step = step_of(*ring, kernel(100), order("record", 1, 7), order("wait", 1))
    assert ([span.work.name for span in step.spans], step.only_sends) == (["send", "add"], 0.0)


def test_attention_on_few_tokens_and_products_of_an_older_torch_are_slower():
    short, long = (Work(0.0, "kernel", 0, "flash", 1e12, nbytes, "bf16") for nbytes in (4e9, 5e8))
    assert H100.seconds(short) == pytest.approx(1.6 / 1.075 * H100.seconds(long), rel=0.01)
    work, older = product(8192, 8192, 1600), costs_of("h100-80", torch="2.5.1+cu124")
    assert H100.seconds(work) < 0.6 * older.seconds(work)
    assert costs_of("h100-80", torch="2.11.0+cu130") == H100
    assert costs_of("h100-96").reached == older.reached
    first, second = (costs_of("a100-80", torch=version).reached.attention for version in ("2.1.2", "2.2.0+cu121"))
    assert first == second / 2


def test_a_kernel_is_as_long_as_its_bytes_unless_it_permutes_numbers():
    works = [Work(0.0, "kernel", 0, name, nbytes=3.35e9) for name in ("add", "clone")]
    (add, clone), (faster, same) = ([costs.seconds(work) for work in works] for costs in (H100, costs_of("h200")))
    assert add == pytest.approx(KERNEL_S + 1e-3 / H100.reached.memory)
    assert (faster / add, same / clone) == pytest.approx((3.35 / 4.8, 1), rel=0.01)


def step_of(*work, host_s=0.0, costs=H100):
    return replay({0: work}, costs, {0: host_s})[0]


# bytes of a kernel of one millisecond
MS = 3.35e9 * H100.reached.memory


def kernel(ms, stream=0, at=0.0):
    return Work(at, "kernel", stream, "add", nbytes=ms * MS)


def order(kind, event, stream=0, name="event"):
    return Work(0.0, kind, stream, name, event=event)


def test_streams_run_beside_each_other_until_an_event_is_waited_for():
    beside = step_of(kernel(2, 0), kernel(3, 1))
    behind = step_of(kernel(2, 0), order("record", 1), order("wait", 1, 1), kernel(3, 1))
    assert beside.step_s == pytest.approx(3e-3, rel=0.01)
    # The next step's first kernel runs beside this step's second one.
    assert behind.step_s == pytest.approx(3e-3, rel=0.01)
    chained = step_of(
        *[order("wait", 2), kernel(2, 0), order("record", 1), order("wait", 1, 1), kernel(3, 1), order("record", 2, 1)]
    )
    assert chained.step_s == pytest.approx(5e-3, rel=0.01)


def test_the_host_is_the_floor_and_waits_where_it_synchronises():
    assert step_of(kernel(2), host_s=0.01).step_s == pytest.approx(0.01)
    waits = step_of(kernel(2), order("sync", 0, name="stream"), host_s=0.01)
    assert waits.step_s == pytest.approx(0.012, rel=0.01)


def test_communication_is_exposed_where_nothing_is_computed():
    gathered = collective(nbytes=1e9)
    hidden = step_of(gathered, kernel(20))
    assert (hidden.only_sends, hidden.idle) == (0.0, pytest.approx(0.0, abs=1e-5))
    # Kernels take longer while a collective runs.
    assert hidden.step_s > 20e-3
    after = step_of(
        order("wait", 5, 7), gathered, order("record", 1, 7), order("wait", 1), kernel(1), order("record", 5)
    )
    assert after.only_sends == pytest.approx(H100.seconds(gathered), rel=0.01)


def test_stages_wait_for_each_other():
    sends = dataclasses.replace(collective("send", 1e6, 2), peer=1)
    receives = dataclasses.replace(collective("receive", 1e6, 2), peer=0)
    first = [kernel(4), order("record", 1), order("wait", 1, 7), sends]
    last = [receives, order("record", 1, 7), order("wait", 1), kernel(1)]
    steps = replay({0: first, 1: last}, H100, {0: 0.0, 1: 0.0})
    assert steps[1].step_s == pytest.approx(4e-3, rel=0.02)
    # Without the first stage its message is there at once.
    assert replay({1: last}, H100, {1: 0.0})[1].step_s < 2e-3


def test_ranks_that_wait_for_ever_are_refused():
    each = {rank: [dataclasses.replace(collective("receive"), peer=1 - rank)] for rank in (0, 1)}
    with pytest.raises(ValueError, match="wait for each other"):
        replay(each, H100, {0: 0.0, 1: 0.0})


def test_a_step_is_told_in_shares_of_the_peak():
    work = [product(8192, 8192, 8192, part=part) for part in (1, 2, 2, 2)]
    unknown = Work(0.0, "kernel", 0, "of_a_library", threads=1024)
    time = step_times({0: [*work, unknown]}, H100, {0: 0.0})[0]
    # Three forwards are three quarters of four products: the fourth is computed again.
    assert time.mfu == pytest.approx(0.75 * time.hfu)
    assert 0.8 * H100.reached.products < time.hfu < H100.reached.products
    assert (time.bound, time.guessed) == ("products", {"of_a_library": 1})
    assert time.as_json()["low_s"] < time.step_s < time.as_json()["high_s"]


def test_products_in_fp32_are_a_share_of_the_peak_that_was_asked_for():
    step = replay({0: [product(4096, 4096, 4096, precision="fp32")]}, H100, {0: 0.0})[0]
    alone, asked = (priced(step, step.step_s, H100, precision) for precision in ("", "bf16"))
    assert alone.hfu / asked.hfu == pytest.approx(H100.peak("bf16") / H100.peak("fp32"))
