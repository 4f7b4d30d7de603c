"""A run of another program stands beside ours, marked, and is ranked only if the user says that its work is the same.

The samples were written by Weights & Biases 0.31.0 (offline), by the line that torchtitan 0.3.0 logs, and by Lightning 2.6.6.
"""

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from table_rows import rows

from gptscale.common.errors import StorageError
from gptscale.common.settings.run import todays_workload, workload_hash
from gptscale.launchers.cli import main
from gptscale.launchers.commands import import_run
from gptscale.results.columns import SUMMARY
from gptscale.results.comparison.groups import compare
from gptscale.results.comparison.read import load
from gptscale.results.comparison.tables import cells, notes
from gptscale.results.record.files import append_row, write_json

SAMPLES = Path(__file__).parent / "samples"
WANDB, TITAN, LIGHTNING = (
    ["import", kind, str(SAMPLES / name)]
    for kind, name in (("wandb", "offline-run"), ("torchtitan", "titan.log"), ("lightning", "metrics.csv"))
)
WORK = todays_workload({"seq_len": 64, "lr": 5e-4}, {})


def of_ours(out):
    """Leave a run of ours, of the work WORK, and return its name."""
    identity = {"run_id": "ours", "status": "ok", "recipe": "single", "world_size": 1, "seq_len": 64, "lr": 5e-4}
    identity |= {"global_batch_size": 8, "timestamp": "2026-01-01T00:00:00Z", "workload_hash": workload_hash(WORK)}
    append_row(SUMMARY, out, identity | {"tokens_per_s": 1000.0})
    (out / "runs" / "ours").mkdir(parents=True)
    start = {"workload": WORK, "command": [], "environment": {"python": "", "packages": {}, "device": ""}}
    write_json(out / "runs" / "ours" / "run.json", start | {"identity": identity})


@pytest.mark.parametrize(
    ("words", "steps", "losses", "expected"),
    [
        (WANDB, [1, 2, 3, 4], [6.2, 5.9], {"model": "tiny", "lr": "0.0005", "tokens_per_s": "5004.0"}),
        ([*WANDB, "--facts", "world_size=2"], [1, 2, 3, 4], [6.2, 5.9], {"tokens_per_s_per_device": "2502.0"}),
        (TITAN, [1, 10, 20, 30], [8.12345, 6.5], {"tokens_per_s": "273066.0", "step_time_s_median": ""}),
        ([*TITAN, "--facts", "world_size=8"], [1, 10, 20, 30], [8.12345, 6.5], {"tokens_per_s": "2184528.0"}),
        (LIGHTNING, [*range(1, 9)], [5.880069, 1.674328], {"tokens_per_s": "", "recipe": "lightning"}),
        ([*LIGHTNING, "--map", "loss=val_loss"], [4, 8], [2.229290, 0.896980], {"steps": "8"}),
    ],
)
def test_a_sample_becomes_a_row_and_steps(words, steps, losses, expected, folder):
    assert main(words) == 0
    (row,) = rows(folder / "results" / "summary.csv")
    expected = expected | {"imported_from": words[1], "status": "ok"}
    assert {name: row[name] for name in expected} == expected
    assert [float(row["loss_first"]), float(row["loss_last"])] == pytest.approx(losses)
    table = pd.read_csv(folder / "results" / "runs" / row["run_id"] / "steps.csv")
    assert (list(table.step), [table.loss.iloc[0], table.loss.iloc[-1]]) == (steps, pytest.approx(losses))


def test_a_csv_is_mapped_and_its_clock_gives_the_times(folder):
    lines = ["it,l,clock", *(f"{i},{5 - i}.5,{100 + 2 * i}" for i in range(5)), "4,nan,108", "5,,110"]
    (folder / "own.csv").write_text("\n".join(lines))
    words = "--map step=it,loss=l,elapsed_s=clock --first-step 0 --facts seq_len=64,global_batch_size=2".split()
    assert main(["import", "csv", "own.csv", *words]) == 0
    (row,) = rows(folder / "results" / "summary.csv")
    assert (row["step_time_s_median"], row["tokens_per_s"], row["loss_last"]) == ("2.0", "64.0", "nan")


def test_it_is_ranked_only_where_somebody_says_that_its_work_is_the_same(folder):
    out = folder / "results"
    of_ours(out)
    for words in ([*WANDB], [*WANDB, "--run-name", "twin"], [*WANDB, "--run-name", "same", "--same-work", "ours"]):
        assert main(words) == 0
    comparison = compare(load([out]))
    assert [group.first["run_id"] for group in comparison.ranked] == ["same", "ours"]
    assert [row["status"] for row in cells(comparison)] == ["ok imported", "ok", "ok imported", "ok imported"]
    assert [row["speed-up"] for row in cells(comparison)] == ["5.00x", "1.00x", "-", "-"]
    assert "wandb x1: other work: nobody says it is the same (import --same-work)" in notes(comparison)
    assert "wandb x1: imported from wandb, its figures are as that program defines them" in notes(comparison)


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (["csv", "x"], None, "it cannot be read: No such file"),
        (["csv", "x"], "", "there is no 'step'"),
        (["csv", "x"], "step,los\n1,2\n", "there is no 'loss', in import, give loss=NAME, did you mean 'los'"),
        (["csv", "x"], "step,loss\n1,two\n", "loss 'two' is no figure"),
        (["csv", "x"], "step,loss\n-1,2\n", "step '-1' is no figure"),
        (["csv", "x"], "step,loss\n1.5,2\n", "step '1.5' is no figure"),
        (["csv", "x"], "step,loss,lr\n1,2,inf\n", "lr 'inf' is no figure"),
        (["csv", "x"], "step,loss\n1,2,3\n", "line 2 has not 2 cells"),
        (["csv", "x"], "step,loss\n1,\n", "no line has a step and a loss"),
        (["csv", "x"], "step,loss\n0,2\n", "there is a step 0, in --first-step"),
        (["csv", "x", "--map", "loss=train"], "step,loss\n1,2\n", "there is no 'train', in --map"),
        (["csv", "x", "--map", "los=loss"], "step,loss\n1,2\n", "'los' is no such name"),
        (["csv", "x", "--facts", "world_size=0"], "step,loss\n1,2\n", "world_size '0' is no such number"),
        (["csv", "x", "--facts", "run_id=a"], "step,loss\n1,2\n", "'run_id' is no such name"),
        (["csv", "x", "--run-name", "../a"], "step,loss\n1,2\n", "'../a' is no name of a run"),
        (["csv", "x", "--same-work", "other"], "step,loss\n1,2\n", "runs/other has no run.json"),
        (["torchtitan", "x"], "\x1b[31mstep: 1\n\xff", "there is no 'step'"),
        (["torchtitan", "."], None, "it is a folder"),
        (["lightning", "x"], "epoch,step,train_loss\n0,0,{}\n", "loss '{}' is no figure"),
        (["wandb", "x"], "", "has not one file run-*.wandb"),
        (["tensorboard", "x"], "", "invalid choice 'tensorboard'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words, content, said, folder, refused):
    if content is not None:
        (folder / "x").write_text(content)
    assert said in refused(["import", *words])


def test_contradicting_facts_are_refused(folder, refused):
    of_ours(folder / "results")
    assert "seq_len is 32 here, 64 there" in refused([*WANDB, "--same-work", "ours", "--facts", "seq_len=32"])


def test_a_log_of_wandb_that_is_damaged_foreign_or_torn(folder, refused, monkeypatch, capsys):
    shutil.copytree(SAMPLES / "offline-run", folder / "run")
    log = next((folder / "run").glob("*.wandb"))
    whole = log.read_bytes()
    for content in (b"", b"PK" + whole, whole[:1000] + b"?" + whole[1001:]):
        log.write_bytes(content)
        assert "is damaged" in refused(["import", "wandb", "run"])
    log.write_bytes(whole[:-400])
    assert main(["import", "wandb", "run"]) == 0
    (row,) = rows(folder / "results" / "summary.csv")
    assert (row["status"], row["error"]) == ("failed", "its log ends before it does")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "wandb.proto.wandb_internal_pb2", None)
    assert "wandb is not installed, in import, pip install" in refused(["import", "wandb", "run", "--run-name", "more"])


def test_a_row_that_the_disk_does_not_take_leaves_no_folder(folder, monkeypatch):
    def full(*arguments):
        raise StorageError("no space", "in summary.csv", "free space")

    monkeypatch.setattr(import_run, "append_row", full)
    assert main(LIGHTNING) == 5
    assert not list(folder.glob("results/runs/*"))
