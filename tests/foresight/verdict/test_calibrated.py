"""A run beside the calibration of its machine: products and exchanges that take longer than they should are told."""

from __future__ import annotations

import pytest
import torch
from made_traces import Part, trace

from gptscale.common.process.world import world_of
from gptscale.foresight.calibrate.file import MeasuredMachine, TimedOperation, add
from gptscale.foresight.calibrate.machine import this_machine
from gptscale.foresight.time.data_sheets import GLOO
from gptscale.foresight.time.operations import MessageShape
from gptscale.foresight.time.work import Operation
from gptscale.foresight.verdict.calibrated import CalibratedRun, calibrated_run, kind_of, products_of
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


def calibrate(file, run, product_s, spread=0.02, reduce_s=0.01):
    reduced = Operation("all-reduce", MessageShape(LARGE, 2, 2, 1), GLOO)
    seconds = {**dict.fromkeys(products_of(run), product_s), reduced: reduce_s}
    timed = [TimedOperation(operation, "fp32", s, spread, 7) for operation, s in seconds.items()]
    add(file, MeasuredMachine(MACHINE, timed))


def calibrated(folder, traces, **spread):
    """Return what a calibrated machine expects of a run, with its traces."""
    run = run_of()
    calibrate(folder / "c.json", run, product_s=1e-4, **spread)
    expected = calibrated_run(run, traces, MACHINE, folder / "c.json")
    assert expected is not None
    return expected


def processors(share):
    return [share] * 2


def test_products_of_a_step_are_those_of_all_layers_and_passes():
    run = run_of("--global-batch-size", "8", "--grad-accum-steps", "2", "--n-layer", "3")
    products = products_of(run)
    macs = sum(n * o.shape[0] * o.shape[1] * o.shape[2] for o, n in products.items())
    h, tokens = run.gpt.n_embd, run.tokens_per_step
    # Twice the parameters of the matrices a token forward, and twice that backward, counted in multiplications.
    assert macs == 3 * tokens * (3 * 12 * h * h + h * run.gpt.padded_vocab_size)


def test_an_unmeasured_machine_expects_nothing(tmp_path):
    assert calibrated_run(run_of(), traced(LARGE, 0.01), MACHINE, tmp_path / "none.json") is None


def test_products_that_take_longer_than_calibrated(tmp_path):
    traces = traced(LARGE, 0.01)
    expected = calibrated(tmp_path, traces)
    assert expected.products_s == pytest.approx(1e-4 * sum(products_of(run_of()).values()) / 2)
    # The made-up traces count 0.7 of a backward of 0.1 s as products.
    assert expected.times_slower(traces, processors(1.0)) == pytest.approx(0.07 / expected.products_s)
    assert expected.times_slower(traces, processors(0.01)) == 1.0
    assert CalibratedRun().times_slower(traces, processors(1.0)) == 1.0


def test_a_calibration_with_a_wide_spread_expects_nothing_of_products(tmp_path):
    assert calibrated(tmp_path, traced(LARGE, 0.01), spread=0.5).products_s is None


@pytest.mark.parametrize(
    ("wait_s", "words"), [(0.03, "all-reduce 0.035 GB/s, calibrated 0.105"), (0.011, "")], ids=["slow", "as calibrated"]
)
def test_an_exchange_that_is_slower_than_calibrated(tmp_path, wait_s, words):
    traces = traced(LARGE, wait_s)
    assert calibrated(tmp_path, traces).slow_exchange(Replay(traces), traces) == words


def test_a_small_exchange_is_told_in_milliseconds():
    traces = traced(SMALL, 0.03)
    kind = kind_of(traces[0].exchanges[0])
    assert kind == ("all-reduce", SMALL, 2)
    words = CalibratedRun(None, {kind: 0.001}).slow_exchange(Replay(traces), traces)
    assert words == "all-reduce of 4,096 bytes 30 ms, calibrated 1"
    # Without a calibration nothing is compared.
    assert CalibratedRun().slow_exchange(Replay(traces), traces) == ""
