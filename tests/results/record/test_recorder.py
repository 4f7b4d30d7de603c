"""The recorder with a made-up engine and clock: no processes, no model, every figure known beforehand."""

import dataclasses
import math
import re
from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from made_up_clock import Clock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptscale.common.engine import StepResult
from gptscale.common.errors import NumericError
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.results.record import recorder as recorder_module
from gptscale.results.record.recorder import Recorder

TAGS = {"train/loss", "train/grad_norm", "train/lr", "train/tokens_per_s", "train/peak_mem_gib"}


def make_run(rank=0, **options):
    config = RunConfig(**{"seq_len": 16, "steps": 10, "timing_warmup_steps": 0, **options})
    world = World(rank, rank, 2, torch.device("cpu"), 60.0)
    return Run("ddp", config, config.gpt(), plan_batch(2, global_batch_size=4), world)


def result(loss, grad_norm=1.0, rank_losses=None):
    shares = rank_losses or (loss / 2, loss / 2)
    return StepResult(torch.tensor(loss), torch.tensor(grad_norm), torch.tensor(shares))


def record(recorder, clock, steps, *, step_s=0.5, wait_s=0.1):
    """Steps that take `step_s`, `wait_s` of it waiting for data, and whose loss is 10 / step."""
    read = []
    for step in steps:
        with recorder.waiting():
            clock.passes(wait_s)
        clock.passes(step_s - wait_s)
        read.append(recorder.step(step, 1e-3, result(10 / step)))
    return read


def points(folder, tag):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found = [(e.step, e.value) for e in events.Scalars(tag)]
    assert len(found) == len(dict(found)), "a step is there twice"
    return dict(found)


def test_every_step_has_its_row_and_its_events(tmp_path, clock):
    with Recorder(make_run(), tmp_path, clock=clock) as recorder:
        assert record(recorder, clock, range(1, 11)) == [True] * 10
    rows = pd.read_csv(tmp_path / "steps.csv", float_precision="round_trip")
    assert list(rows.step) == list(range(1, 11))
    assert list(rows.tokens) == [64 * step for step in range(1, 11)]
    # Every digit of a float32 is there.
    assert list(rows.loss) == [torch.tensor(10 / step).item() for step in range(1, 11)]
    assert rows.step_time_s.tolist() == pytest.approx([0.5] * 10)
    assert rows.data_wait_s.tolist() == pytest.approx([0.1] * 10)
    assert set(EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]) == TAGS
    assert points(tmp_path, "train/loss") == dict(zip(rows.step, rows.loss, strict=True))
    assert points(tmp_path, "train/tokens_per_s")[3] == pytest.approx(128)
    assert (recorder.loss_first, recorder.loss_last, recorder.last_step) == (10.0, 1.0, 10)


def test_a_window_is_read_once_and_shared_equally(tmp_path, clock):
    with Recorder(make_run(log_every=4), tmp_path, clock=clock) as recorder:
        assert record(recorder, clock, range(1, 4)) == [False] * 3
        # The device is still at it when the host has sent the last step.
        clock.passes(2.0)
        assert record(recorder, clock, range(4, 5)) == [True]
        assert record(recorder, clock, range(5, 11)) == [False, False, False, True, False, True]
    times_s = pd.read_csv(tmp_path / "steps.csv").step_time_s.tolist()
    assert times_s == pytest.approx([1.0] * 4 + [0.5] * 6)


def test_warm_up_is_logged_but_not_timed(tmp_path, clock):
    with Recorder(make_run(timing_warmup_steps=3), tmp_path, start_step=2, clock=clock) as recorder:
        record(recorder, clock, range(3, 6), step_s=9.0)
        record(recorder, clock, range(6, 11), step_s=0.5)
    assert recorder.step_times_s == pytest.approx([0.5] * 5)
    speed = recorder.speed()
    assert speed["step_time_s_median"] == pytest.approx(0.5)
    assert speed["tokens_per_s"] == pytest.approx(128)
    assert speed["tokens_per_s_per_device"] == pytest.approx(64)
    assert speed["data_wait_fraction"] == pytest.approx(0.2)
    # A CPU has no peak in the table.
    assert speed["mfu"] is None
    assert len(pd.read_csv(tmp_path / "steps.csv")) == 8


def test_training_time_is_that_of_all_steps_and_of_those_before_a_resume(tmp_path, clock):
    for start, step_s in ((0, 0.5), (4, 2.0)):
        with Recorder(make_run(timing_warmup_steps=3), tmp_path, start_step=start, clock=clock) as recorder:
            record(recorder, clock, range(start + 1, start + 5), step_s=step_s)
    assert recorder.train_time_s == pytest.approx(4 * 0.5 + 4 * 2.0)
    assert recorder.loss_first == 10.0


@pytest.mark.parametrize(("device", "spans"), [("cuda", ["begin", "end"]), ("cpu", [])])
def test_a_gpu_is_sampled_in_the_timed_steps_only(device, spans, tmp_path, monkeypatch):
    sampled = []

    @contextmanager
    def sampler(device, columns):
        assert columns == ("gpu_util_percent",)
        sampled.append("begin")
        yield
        sampled.append("end")

    stand_ins = {"device_name": str, "synchronize": bool, "reset_peak_memory": bool, "MachineClock": Clock}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(recorder_module, name, lambda *args, of=stand_in: of())
    monkeypatch.setattr(recorder_module, "peak_memory", lambda device: {"peak_mem_allocated_gib": 1.0})
    monkeypatch.setattr("gptscale.results.record.usage.UsageSampler", sampler)
    monkeypatch.setattr(Clock, "lap", lambda clock: None, raising=False)
    run, clock = make_run(timing_warmup_steps=3), Clock()
    run = dataclasses.replace(run, world=dataclasses.replace(run.world, device=torch.device(device)))
    with Recorder(run, tmp_path, clock=clock) as recorder:
        record(recorder, clock, range(1, 3))
        assert sampled == []
        record(recorder, clock, range(3, 11))
    assert sampled == spans


def test_evaluating_and_saving_are_not_timed(tmp_path, clock):
    with Recorder(make_run(log_every=10, eval_every=3, save_every=4), tmp_path, clock=clock) as recorder:
        for step in range(1, 11):
            (read,) = record(recorder, clock, range(step, step + 1))
            # The steps before a pause are read, so that no pause waits for steps under way.
            assert read == (step in (3, 4, 6, 8, 9, 10))
            with recorder.paused():
                if step % 3 == 0:
                    clock.passes(7.0)
                    recorder.evaluated(step, torch.tensor(float(step)))
                if step % 4 == 0:
                    recorder.sync()
                    clock.passes(11.0)
    assert pd.read_csv(tmp_path / "steps.csv").step_time_s.tolist() == pytest.approx([0.5] * 10)
    assert pd.read_csv(tmp_path / "eval.csv").values.tolist() == [[3, 3.0], [6, 6.0], [9, 9.0]]
    assert points(tmp_path, "eval/loss") == {3: 3.0, 6: 6.0, 9: 9.0}


def test_writing_counts_as_time_of_the_next_step(tmp_path, monkeypatch, clock):
    with Recorder(make_run(), tmp_path, clock=clock) as recorder:
        monkeypatch.setattr(recorder._console, "say_step", lambda *figures: clock.passes(0.25))
        record(recorder, clock, range(1, 11))
    assert pd.read_csv(tmp_path / "steps.csv").step_time_s.tolist() == pytest.approx([0.5] + [0.75] * 9)


def test_rows_are_on_disk_after_sync(tmp_path, clock):
    with Recorder(make_run(log_every=10), tmp_path, clock=clock) as recorder:
        record(recorder, clock, range(1, 4))
        recorder.sync()
        assert list(pd.read_csv(tmp_path / "steps.csv").step) == [1, 2, 3]
        assert list(points(tmp_path, "train/loss")) == [1, 2, 3]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("log_every", [1, 5])
def test_nan_on_one_rank_stops_all_and_is_named(tmp_path, rank, log_every, clock):
    run = make_run(rank, log_every=log_every)
    with (
        pytest.raises(NumericError, match=r"loss nan.*at step 3 \(data rank 1, sequences \[2001, 2002\]\)"),
        Recorder(run, tmp_path, sequences=lambda s, r: (1000 * s + r, 1000 * s + r + 1), clock=clock) as recorder,
    ):
        record(recorder, clock, range(1, 3))
        clock.passes(0.5)
        recorder.step(3, 1e-3, result(math.nan, 2.0, (0.5, math.nan)))
        record(recorder, clock, range(4, 6))
    if rank == 0:
        rows = pd.read_csv(tmp_path / "steps.csv")
        assert list(rows.step) == [1, 2, 3]
        assert math.isnan(rows.loss[2])
    else:
        assert not list(tmp_path.iterdir())


@pytest.mark.promise("N4 | a loss scale at its floor | 6, after 30 skipped steps")
def test_fp16_may_overflow_now_and_then_but_not_for_ever(tmp_path):
    with Recorder(make_run(precision="fp16", steps=100), tmp_path) as recorder:
        for step in range(1, 30):
            recorder.step(step, 1e-3, result(1.0, math.inf))
        # After a good step, counting begins anew.
        recorder.step(30, 1e-3, result(1.0, 1.0))
        for step in range(31, 60):
            recorder.step(step, 1e-3, result(1.0, math.inf))
        with pytest.raises(NumericError, match="30 fp16 steps overflowed in a row, at step 60"):
            recorder.step(60, 1e-3, result(1.0, math.inf))


def test_resume_leaves_each_step_once(tmp_path, clock):
    with Recorder(make_run(eval_every=2), tmp_path, clock=clock) as recorder:
        for step in range(1, 9):
            record(recorder, clock, range(step, step + 1))
            if step % 2 == 0:
                recorder.evaluated(step, torch.tensor(1.0))
    # died after step 8; the newest checkpoint is of step 5
    with Recorder(make_run(eval_every=2), tmp_path, start_step=5, clock=clock) as resumed:
        for step in range(6, 11):
            record(resumed, clock, range(step, step + 1), step_s=2.0)
            if step % 2 == 0:
                resumed.evaluated(step, torch.tensor(2.0))
    rows = pd.read_csv(tmp_path / "steps.csv")
    assert list(rows.step) == list(range(1, 11))
    assert rows.step_time_s.tolist() == pytest.approx([0.5] * 5 + [2.0] * 5)
    assert list(pd.read_csv(tmp_path / "eval.csv").loss) == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert points(tmp_path, "eval/loss") == {2: 1.0, 4: 1.0, 6: 2.0, 8: 2.0, 10: 2.0}
    for tag in TAGS:
        assert list(points(tmp_path, tag)) == list(range(1, 11)), tag
    # This is the speed of the second process.
    assert points(tmp_path, "train/tokens_per_s")[8] == pytest.approx(32)
    # These are the losses of the whole run.
    assert (resumed.loss_first, resumed.loss_last) == (10.0, 1.0)
    assert len((tmp_path / "steps.discarded.csv").read_text().splitlines()) == 3


def test_starting_anew_under_the_same_name_leaves_each_step_once(tmp_path, clock):
    for _ in range(2):
        with Recorder(make_run(steps=3), tmp_path, clock=clock) as recorder:
            record(recorder, clock, range(1, 4))
    assert list(pd.read_csv(tmp_path / "steps.csv").step) == [1, 2, 3]
    assert list(points(tmp_path, "train/loss")) == [1, 2, 3]


def flipped(events):
    content = bytearray(events)
    content[len(content) // 2] ^= 16
    return content


@pytest.mark.promise("S16 | a cut or damaged TensorBoard file | costs what was cut; the CSV has all of it")
@pytest.mark.parametrize(
    ("damage", "saved", "kept"),
    [(lambda events: events[:-20], 4, range(1, 11)), (flipped, 5, range(6, 11))],
    ids=["cut", "a flipped bit"],
)
def test_damaged_events_cost_only_what_was_damaged_and_no_row(damage, saved, kept, tmp_path, clock):
    with Recorder(make_run(), tmp_path, clock=clock) as recorder:
        record(recorder, clock, range(1, 6))
    (events,) = tmp_path.glob("events*")
    events.write_bytes(damage(events.read_bytes()))
    with Recorder(make_run(), tmp_path, start_step=saved, clock=clock) as resumed:
        record(resumed, clock, range(saved + 1, 11))
    assert list(pd.read_csv(tmp_path / "steps.csv").step) == list(range(1, 11))
    assert list(points(tmp_path, "train/loss"))[-len(kept) :] == list(kept)


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_log_has_every_tenth_line_the_first_and_the_last(on_terminal, tmp_path, capsys, monkeypatch, clock):
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with Recorder(make_run(steps=23), tmp_path, start_step=4, clock=clock) as recorder:
        record(recorder, clock, range(5, 24))
    steps = [int(step) for step in re.findall(r"(?m)step +(\d+)/23  loss", capsys.readouterr().out)]
    assert steps == (list(range(5, 24)) if on_terminal else [5, 10, 20, 23])


def test_other_ranks_keep_silent_and_write_nothing(tmp_path, capsys, clock):
    with Recorder(make_run(rank=1, eval_every=5), tmp_path, clock=clock) as recorder:
        record(recorder, clock, range(1, 11))
        recorder.evaluated(10, torch.tensor(1.0))
        recorder.sync()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""
    assert recorder.loss_last == 1.0


def test_no_tensorboard_no_events(tmp_path, clock):
    with Recorder(make_run(tensorboard=False), tmp_path, clock=clock) as recorder:
        record(recorder, clock, range(1, 11))
    assert [p.name for p in tmp_path.iterdir()] == ["steps.csv"]
