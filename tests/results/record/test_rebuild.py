"""What is read from the CSVs of a run when its TensorBoard events are written anew."""

import math

import pytest

from gptscale.common.errors import DataError
from gptscale.results.record.rebuild import points, rebuild_events

STEPS = "step,tokens,loss,grad_norm,lr,step_time_s,data_wait_s"


def written(folder, name, *lines):
    path = folder / name
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def test_a_step_has_its_scalars_and_the_speed_of_its_tokens(tmp_path):
    # 256 tokens in each step, of which the third took half a second.
    path = written(tmp_path, "steps.csv", STEPS, "3,768,2.5,0.75,0.001,0.5,0.1")
    assert list(points(path)) == [
        (3, {"train/loss": 2.5, "train/grad_norm": 0.75, "train/lr": 0.001, "train/tokens_per_s": 512.0})
    ]


def test_empty_cells_are_no_points_and_a_loss_that_is_no_number_is_one(tmp_path):
    path = written(tmp_path, "steps.csv", STEPS, "1,256,nan,,0.001,,")
    ((step, scalars),) = points(path)
    assert (step, sorted(scalars)) == (1, ["train/loss", "train/lr"])
    assert math.isnan(scalars["train/loss"])


def test_epochs_and_evaluations_have_tags_of_their_own(tmp_path):
    epochs = written(tmp_path, "epochs.csv", "epoch,step,test_accuracy,images_per_s", "1,40,0.9,1000")
    assert list(points(epochs)) == [(40, {"epoch/test_accuracy": 0.9, "epoch/images_per_s": 1000.0})]
    evaluations = written(tmp_path, "eval.csv", "step,tokens,loss", "10,2560,3.0")
    assert list(points(evaluations)) == [(10, {"eval/loss": 3.0})]


@pytest.mark.parametrize(
    "line",
    [
        "x,512,2.5,0.75,0.001,0.5,0.1",
        "0,512,2.5,0.75,0.001,0.5,0.1",
        "99999999999999999999,512,2.5,0.75,0.001,0.5,0.1",
        "2,512,2.5",
        "2,512,2.5,0.75,0.001,0.5,0.1,9",
        b"2,512,2.\xff5,0.75,0.001,0.5,0.1",
        "2,512,2.5,0.75,0.001," + "x" * 200_000 + ",0.1",
    ],
)
def test_a_damaged_row_is_named_and_the_old_events_stay(line, tmp_path):
    written(tmp_path, "steps.csv", STEPS, "1,256,2.5,0.75,0.001,0.5,0.1", line)
    events = tmp_path / "events.out.tfevents.1.here.2"
    events.write_bytes(b"old")
    with pytest.raises(DataError, match="line 3 is no row") as raised:
        rebuild_events(tmp_path)
    assert str(tmp_path / "steps.csv") in str(raised.value)
    assert [path.name for path in tmp_path.iterdir() if "events" in path.name] == [events.name]
