"""Trials of rows: under the mock of CUDA, and on this machine's processor."""

from dataclasses import replace

import pytest

from gptscale.common.errors import GptscaleError
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.plan.enumeration import enumerate_runs
from gptscale.foresight.plan.question import cpu_cluster, gpu_cluster
from gptscale.foresight.plan.rows import PlannedRow, places_of
from gptscale.foresight.plan.trials import CONTENDED, MEASURED, RECORDED, measured, simulated
from gptscale.foresight.price.picture import letters
from gptscale.foresight.simulate.simulation import simulate

pytestmark = pytest.mark.slow
WORK = {"model": "tiny", "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 1024, "seq_len": 64}


def rows_of(cluster, recipe, batch, **more):
    device = "cpu" if cluster.is_cpu else "cuda"
    config = RunConfig(**WORK, global_batch_size=batch, device=device, **more)
    groups, _ = enumerate_runs(config, cluster, [recipe])
    for group in groups:
        yield PlannedRow(*group[0], cluster, places_of(*group[0]), 1.0)


def row_of(recipe, batch, micro_batches):
    rows = rows_of(gpu_cluster("h100-80", 1, 2, None), recipe, batch, precision="bf16")
    return next(row for row in rows if row.run.batch.grad_accum_steps == micro_batches)


@pytest.fixture
def host(monkeypatch):
    """Return a function that says how long the host takes to ask for a step."""

    def takes(seconds):
        def timed(*arguments, **options):
            simulation = simulate(*arguments, **options)
            simulation.facts["host_s"] = seconds
            # Each call takes as long as any other, and not as long as a busy machine took.
            works = simulation.recorded
            return replace(simulation, recorded=[replace(w, at=i / len(works)) for i, w in enumerate(works, 1)])

        monkeypatch.setattr("gptscale.foresight.plan.trials.simulate", timed)

    return takes


def test_a_step_takes_as_long_as_its_host_asks_for_it(host):
    row = row_of("fsdp", batch=10, micro_batches=5)
    host(0.0)
    ahead = simulated(row)
    host(RECORDED * 0.2)
    slow = simulated(row)
    # The optimizer, which the host asks for once a step, has a part of it.
    assert 4 * 0.2 < slow.seconds < 5 * 0.2 + ahead.seconds
    assert slow.bound_by in ("the host (99%)", "the host (100%)")
    assert slow.low == ahead.low
    assert slow.mfu * slow.seconds == pytest.approx(ahead.mfu * ahead.seconds)


@pytest.mark.parametrize(("recipe", "off"), [("fsdp", 1e-3), ("zero1", 0.03)])
def test_micro_batches_that_are_not_recorded_lie_on_a_straight_line(monkeypatch, host, recipe, off):
    """The memory and time of five micro-batches, told by three of them, and with all five recorded."""
    host(0.0)
    row = row_of(recipe, batch=10, micro_batches=5)
    short = simulated(row)
    monkeypatch.setattr("gptscale.foresight.plan.trials.RECORDED", 5)
    whole = simulated(row)
    # The tokens of a whole step lie on the device: inputs and targets of two micro-batches more.
    assert whole.memory.allocated - short.memory.allocated == 2 * 2 * 8 * WORK["seq_len"]
    assert whole.memory.reserved == short.memory.reserved
    assert short.seconds == pytest.approx(whole.seconds, rel=off)
    assert short.mfu == pytest.approx(whole.mfu, rel=off)
    assert len(short.replayed[0].forwards()) == RECORDED


def test_the_stages_of_a_pipeline_are_replayed_together(host):
    host(0.0)
    row = row_of("pipeline", batch=4, micro_batches=4)
    told = simulated(row)
    assert {*told.replayed} == {0, 1}
    # Each waits for the other: the bubble of two stages and four micro-batches is a fifth.
    idle = [step.idle / step.step_s for step in told.replayed.values()]
    assert all(0.05 < share < 0.6 for share in idle)
    lines = letters(told.replayed)
    assert {line.split()[1] for line in lines[:-1]} == {"0", "1"}
    assert all(len(line.split(maxsplit=5)[-1]) == 80 for line in lines[:-1])


def test_a_row_runs_on_this_machine(monkeypatch):
    row = next(rows_of(cpu_cluster(2, 8 * 2**30), "ddp", 4))
    timing = measured(row)
    assert 0 < timing.low <= timing.seconds <= timing.high < 60
    assert timing.grade in (MEASURED, CONTENDED)
    monkeypatch.setattr("gptscale.foresight.plan.trials.LIMIT_S", 0.01)
    with pytest.raises(GptscaleError, match=r"no 8 steps in 0\.01 s"):
        measured(row)
