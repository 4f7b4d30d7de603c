"""A run beside the calibration of its machine: products and exchanges that take longer than they should are told."""

import pytest
import torch
from made_traces import Part, trace

from gptscale.common.process.world import world_of
from gptscale.foresight.calibrate.file import MeasuredMachine, Operation, TimedOperation, add
from gptscale.foresight.calibrate.parts import products_of
from gptscale.foresight.calibrate.worker import this_machine
from gptscale.foresight.verdict.calibrated import UNMEASURED, CalibratedRun, calibrated_run, kind_of
from gptscale.foresight.verdict.replay import Replay
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import resolve

BOTH = (0, 1)
SMALL, LARGE = 4096, 2**20
MACHINE = this_machine(torch.device("cpu"), 2)


def run_of(*words):
    config, own = parse_run("ddp", ["--device", "cpu", "--data", "synthetic", "--seq-len", "64", *words])
    return resolve("ddp", config, own, world_of("cpu", None, 2))


def traced(nbytes, wait_s):
    parts = [Part("backward", False, 0.1), Part("backward", True, wait_s, 0, ("all_reduce", BOTH, nbytes))]
    return [trace(rank, parts) for rank in BOTH]


def calibrated(folder, traces, spread=0.02):
    """Return what a machine expects of a run that takes 0.1 ms for each of its products, and 10 ms for a reduction."""
    run = run_of()
    tokens = run.batch.micro_batch_size * run.seq_len
    seconds = {operation: 1e-4 for operation, _ in products_of(run.gpt, tokens, 1)}
    seconds |= {Operation("all-reduce", (LARGE, 2, 2)): 1e-2}
    timed = [TimedOperation(operation, "fp32", s, spread, 7) for operation, s in seconds.items()]
    add(folder / "c.json", MeasuredMachine(MACHINE, timed))
    expected = calibrated_run(run, traces, MACHINE, folder / "c.json")
    assert expected is not None
    return expected


def test_products_of_a_forward_are_those_of_all_layers():
    gpt = run_of("--n-layer", "3").gpt
    macs = sum(n * o.shape[0] * o.shape[1] * o.shape[2] for o, n in products_of(gpt, 64, 1))
    assert macs == 64 * (3 * 12 * gpt.n_embd**2 + gpt.n_embd * gpt.padded_vocab_size)


def test_an_unmeasured_machine_expects_nothing(tmp_path):
    traces = traced(LARGE, 0.01)
    assert calibrated_run(run_of(), traces, MACHINE, tmp_path / "none.json") is UNMEASURED
    assert (UNMEASURED.times_slower(traces, [1.0] * 2), UNMEASURED.slow_exchange(Replay(traces))) == (1.0, "")


def test_products_that_take_longer_than_calibrated(tmp_path):
    traces = traced(LARGE, 0.01)
    expected = calibrated(tmp_path, traces)
    run = run_of()
    # Forward once and backward twice, of all micro-batches of a rank.
    n = 3 * (4 * run.gpt.n_layer + 1) * run.batch.grad_accum_steps
    assert expected.products_s == pytest.approx(1e-4 * n)
    # The made-up traces count 0.7 of a backward of 0.1 s as products.
    assert expected.times_slower(traces, [1.0] * 2) == pytest.approx(0.07 / expected.products_s)
    assert expected.times_slower(traces, [0.01] * 2) == 1.0


def test_a_calibration_with_a_wide_spread_expects_nothing_of_products(tmp_path):
    assert calibrated(tmp_path, traced(LARGE, 0.01), spread=0.5).products_s is None


@pytest.mark.parametrize(
    ("wait_s", "words"), [(0.03, "all-reduce 0.035 GB/s, calibrated 0.105"), (0.011, "")], ids=["slow", "as calibrated"]
)
def test_an_exchange_that_is_slower_than_calibrated(tmp_path, wait_s, words):
    traces = traced(LARGE, wait_s)
    assert calibrated(tmp_path, traces).slow_exchange(Replay(traces)) == words


def test_a_small_exchange_is_told_in_milliseconds():
    traces = traced(SMALL, 0.03)
    kind = kind_of(traces[0].exchanges[0])
    assert kind == ("all-reduce", SMALL, 2)
    words = CalibratedRun(None, {kind: 0.001}).slow_exchange(Replay(traces))
    assert words == "all-reduce of 4,096 bytes 30 ms, calibrated 1"
