"""Ranking, the guard against unequal work, repeats and spreads, and every form the comparison is written in."""

import csv
import io
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import chain

import matplotlib.image
import pandas as pd
import pytest
from compared_runs import WORK, add_run, hash_of
from matplotlib.axes import Axes
from rich.console import Console

from gptscale.common.errors import StorageError
from gptscale.launchers.cli import main
from gptscale.recipes import RECIPES
from gptscale.results.columns import SUMMARY
from gptscale.results.comparison import picture, write
from gptscale.results.comparison.groups import Group, compare
from gptscale.results.comparison.memory_bars import draw_memory
from gptscale.results.comparison.picture import Drawing
from gptscale.results.comparison.read import load
from gptscale.results.comparison.run_files import DamagedFileError, run_file, whole_lines
from gptscale.results.comparison.tables import as_csv, as_text, cells, notes, show
from gptscale.results.comparison.write import write_comparison
from gptscale.results.record.files import write_json
from gptscale.results.render import markdown, picture_bytes, subplots

TIERS = "tiers of speed (the spread of each reaches into that of the first of its tier)"


def add_runs(out, **speeds):
    for recipe, tokens_per_s in speeds.items():
        add_run(out, recipe, tokens_per_s)


def add_failure(out, recipe, status="oom", error="out of memory (2 GiB)", **changes):
    add_run(out, recipe, ran=False, status=status, error=error, **changes)


def order(comparison):
    return [group.name for group in comparison.ranked]


def shown(comparison, width=100):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    show(comparison, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the pixels of pictures, which take longest: all forms and damaged steps are drawn in tests of their own."""
    monkeypatch.setattr(write, "picture_bytes", lambda figure, kind="png": b"pixels")


def test_without_single_the_first_run_is_the_measure(tmp_path):
    add_run(tmp_path, "ddp", 8000.0, work={"steps": 30})
    add_runs(tmp_path, zero1=2000.0, ddp=4000.0, fsdp=1000.0)
    comparison = compare(load([tmp_path]))
    assert [row["speed-up"] for row in cells(comparison)] == ["2.00x", "1.00x", "0.50x", "-"]
    assert notes(comparison)[0].startswith("speed-up: beside zero1 x2, the first of this work")


STATE = {"state_weights_gib": 4.0, "state_gradients_gib": 4.0, "state_optimizer_gib": 8.0, "state_host_gib": 0.0}
STATE |= {"state_disk_gib": 0.0, "state_formula": "16 N", "state_formula_gib": 15.5}


def test_state_time_and_utilisation_are_columns_where_a_run_has_them(tmp_path):
    add_run(tmp_path, "single", 1000.0)
    assert not {"state MiB", "time s", "GPU %", "MFU"} & set(cells(compare(load([tmp_path])))[0])
    add_run(tmp_path, "ddp", 1500.0, train_time_s=12.34, gpu_util_percent=87.6, **STATE)
    on_host = {"state_optimizer_gib": 0.5, "state_host_gib": 1.0, "state_disk_gib": 2.0}
    add_run(tmp_path, "zero_infinity", 100.0, **(STATE | on_host))
    ddp, single, infinity = cells(compare(load([tmp_path])))
    assert (ddp["time s"], ddp["GPU %"], ddp["state GiB"], "host GiB" in ddp) == ("12.3", "88", "16.00", False)
    assert (single["time s"], single["GPU %"], single["state GiB"]) == ("-", "-", "-")
    assert infinity["state GiB"] == "8.50 + 1.00 host + 2.00 disk"
    found = csv.DictReader(io.StringIO(as_csv(compare(load([tmp_path]))).decode()))
    (line,) = [line for line in found if line["name"] == "ddp x2"]
    assert (float(line["train_time_s"]), float(line["state_formula_gib"])) == (12.34, 15.5)


def test_a_bar_of_state_is_stacked_by_kind_up_to_the_rest_of_the_peak(tmp_path):
    add_run(tmp_path, "single", 1000.0, peak_mem_allocated_gib=20.0, **STATE)
    axis: Axes = subplots(1, 1, (5, 3))[1][0, 0]
    draw_memory(axis, compare(load([tmp_path])).ranked, ["black"], alone=False)
    bars = [(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axis.patches if bar.get_width()]  # type: ignore[attr-defined]
    assert bars == [(0, 4), (4, 4), (8, 8), (16, 4)]
    assert axis.get_legend_handles_labels()[1][1:4] == ["weights", "gradients", "optimizer state"]
    assert [list(line.get_xdata()) for line in axis.lines] == [[15.5, 15.5]]  # type: ignore[arg-type]
    assert [text.get_text() for text in axis.texts] == ["16 GiB", "= 16 N"]


def test_other_work_is_not_ranked_and_says_what_differs(tmp_path):
    add_runs(tmp_path, single=1000.0, ddp=2000.0)
    run_id = add_run(tmp_path, "fsdp", 9000.0, work={"steps": 30, "lr": 1e-3, "data_fingerprint": "bbbb"})
    comparison = compare(load([tmp_path]))
    assert order(comparison) == ["ddp x2", "single x1"]
    assert [group.name for group in comparison.apart] == ["fsdp x2"]
    differ = "steps 30 (ranked: 20); lr 0.001 (ranked: 0.0005); data_fingerprint bbbb (ranked: aaaa)"
    assert notes(comparison) == [f"fsdp x2: other work: {differ}"]
    assert cells(comparison)[2]["speed-up"] == "-"
    # Then only the columns say it.
    (tmp_path / "runs" / run_id / "run.json").unlink()
    assert notes(compare(load([tmp_path]))) == ["fsdp x2: other work: steps 30 (ranked: 20)"]


def test_a_technique_has_a_ratio_and_equal_tokens_are_told(tmp_path):
    add_run(tmp_path, "single", work={"global_batch_size": 8, "steps": 20})
    add_run(tmp_path, "ddp", work={"global_batch_size": 8, "steps": 20})
    changes = {"precision": "bf16", "optimizer_state": "8bit"}
    add_run(tmp_path, "single", 1500.0, work={"global_batch_size": 8, "steps": 20, **changes}, **changes)
    portions = {"global_batch_size": 16, "steps": 10}
    add_run(tmp_path, "single", work=portions, **portions)
    comparison = compare(load([tmp_path]))
    technique, other = comparison.apart
    assert (technique.name, cells(comparison)[2]["speed-up"]) == ("single x1 state=8bit bf16", "1.50x")
    assert technique.notes[0].startswith("same data by another technique: precision bf16 (ranked: ")
    assert other.notes == ["as many tokens in other batches: steps 10 (ranked: 20); global_batch_size 16 (ranked: 8)"]
    assert cells(comparison)[3]["speed-up"] == "-"


def test_work_of_most_recipes_is_ranked_newest_among_equals(tmp_path):
    add_run(tmp_path, "single", repeat=1)
    add_run(tmp_path, "ddp", repeat=2)
    add_run(tmp_path, "single", repeat=3, work={"steps": 30})
    assert order(compare(load([tmp_path]))) == ["single x1", "ddp x2"]
    add_run(tmp_path, "fsdp", repeat=4, work={"steps": 30})
    assert order(compare(load([tmp_path]))) == ["single x1", "fsdp x2"]


def test_a_sweep_ranks_what_it_just_ran(tmp_path, capsys, undrawn):
    add_runs(tmp_path, single=1000.0, ddp=1000.0, fsdp=1000.0)
    add_run(tmp_path, "ddp", work={"steps": 30}, micro_batch_size=2)
    write_comparison([tmp_path], tmp_path)
    rows = list(csv.DictReader((tmp_path / "comparison.csv").open()))
    assert [(row["recipe"], row["ranked"], row["micro_batch_size"]) for row in rows][0] == ("ddp", "true", "2")
    assert {row["ranked"] for row in rows[1:]} == {"false"}
    assert all((tmp_path / f"comparison.{kind}").stat().st_size for kind in ("csv", "md", "png", "html"))
    assert "wrote" in capsys.readouterr().out


def test_repeats_are_one_group_with_median_and_spread(tmp_path):
    for repeat, tokens_per_s in enumerate((1000.0, 1100.0, 1300.0)):
        add_run(tmp_path, "ddp", tokens_per_s, repeat=repeat)
    # It died late: its speed up to there is no repeat of the others.
    add_run(tmp_path, "ddp", 5000.0, repeat=4, status="failed", error="rank 1 died")
    (group,) = compare(load([tmp_path])).ranked
    assert group.median("tokens_per_s") == 1100
    assert group.spread == (1000, 1300)
    (row,) = cells(compare(load([tmp_path])))
    assert (row["runs"], row["status"]) == ("4", "3 ok 1 failed")
    assert group.notes == ["failed: rank 1 died"]


def test_tiers_of_speed_do_not_chain_from_the_first_to_the_last(tmp_path):
    for i, recipe in enumerate(("single", "ddp", "fsdp", "zero1", "zero3")):
        add_run(tmp_path, recipe, 1000.0 * 0.85**i, jitter=0.1)
    comparison = compare(load([tmp_path]))
    assert [group.tier for group in comparison.ranked] == [1, 1, 2, 2, 3]
    assert notes(comparison) == [f"{TIERS}: 1. single x1, ddp x2; 2. fsdp x2, zero1 x2; 3. zero3 x2"]
    tiers = [row["tier"] for row in csv.DictReader(io.StringIO(as_csv(comparison).decode()))]
    assert tiers == ["1", "1", "2", "2", "3"]


def test_the_spread_of_one_run_is_that_of_its_steps(tmp_path):
    add_run(tmp_path, "single", 1000.0, jitter=0.2)
    add_run(tmp_path, "ddp", 1100.0, jitter=0.01)
    comparison = compare(load([tmp_path]))
    assert comparison.ranked[1].spread == pytest.approx((1000 / 1.2, 1000 / 0.8))
    assert [group.tier for group in comparison.ranked] == [1, 1]
    # A row that some other program wrote may have any figure.
    group = comparison.ranked[0]
    for name in ("step_time_s_p10", "step_time_s_p90"):
        assert Group("x", [group.first | {name: 0.0}]).spread is None


def test_a_speed_on_a_machine_in_use_is_in_no_tier(tmp_path):
    add_run(tmp_path, "single", 1000.0, taken_fraction=0.04)
    add_run(tmp_path, "ddp", 2000.0, taken_fraction=0.31)
    add_run(tmp_path, "fsdp", 4000.0)
    comparison = compare(load([tmp_path]))
    assert [row["status"] for row in cells(comparison)] == ["ok", "ok contended", "ok"]
    assert [group.tier for group in comparison.ranked] == [1, None, 2]
    assert notes(comparison) == ["ddp x2: contended and not ranked, others took 31% of the machine"]


def test_verdicts_are_a_column_and_a_bar_of_shares(tmp_path):
    run_id = add_run(tmp_path, "ddp", bound_by="data-bound", gain_if_removed=0.25)
    add_run(tmp_path, "single", 500.0)
    verdict = tmp_path / "runs" / run_id / "verdict.json"
    verdict.write_text(json.dumps({"shares": {"data": 0.25, "products": 0.75}}))
    comparison = compare(load([tmp_path]))
    assert [row["bound by"] for row in cells(comparison)] == ["data-bound -25%", "-"]
    assert "bound by" in as_text(comparison, markdown)
    assert picture.shares_of(comparison.ranked[0])["products"] == 0.75
    assert picture.shares_of(comparison.ranked[1]) == {}
    huge = f'{{"shares": {{"data": 1{"0" * 400}}}}}'
    for damaged in ("", "[]", huge, '{"shares": 3}', '{"shares": {"data": 7}}', '{"shares": {"data": "x"}}'):
        verdict.write_text(damaged)
        assert picture.shares_of(compare(load([tmp_path])).ranked[0]) == {}


def test_failed_runs_are_listed_last_with_their_error(tmp_path):
    add_failure(tmp_path, "fsdp")
    comparison = compare(load([tmp_path]))
    assert "oom" in shown(comparison)
    assert picture_bytes(Drawing(comparison).figure())
    add_run(tmp_path, "single")
    comparison = compare(load([tmp_path]))
    assert order(comparison) == ["single x1", "fsdp x2"]
    assert [row["status"] for row in cells(comparison)] == ["ok", "oom"]
    assert notes(comparison) == ["fsdp x2: oom: out of memory (2 GiB)"]


def test_a_run_counts_once_as_it_ended_and_so_does_a_place_given_twice(tmp_path):
    run_id = add_run(tmp_path, "ddp", 900.0, status="interrupted")
    add_run(tmp_path, "ddp", 1000.0, run_id=run_id)
    (group,) = compare(load([tmp_path])).ranked
    assert len(group.rows) == 1
    assert group.median("tokens_per_s") == 1000
    add_run(tmp_path, "single")
    paths = [tmp_path, tmp_path / "summary.csv", tmp_path / "runs" / ".." / "summary.csv", tmp_path / "runs" / run_id]
    assert len(load(paths)) == 2
    # A run's folder is its row alone.
    assert [row["run_id"] for row in load(paths[3:])] == [run_id]


def test_equal_names_are_told_apart(tmp_path):
    add_run(tmp_path, "ddp", 1000.0, micro_batch_size=4, grad_accum_steps=1)
    add_run(tmp_path, "ddp", 900.0, micro_batch_size=2, grad_accum_steps=2)
    assert order(compare(load([tmp_path]))) == [
        "ddp x2 micro_batch_size=4 grad_accum_steps=1",
        "ddp x2 micro_batch_size=2 grad_accum_steps=2",
    ]


def test_what_is_no_summary_is_one_line(folder, refused):
    assert "holds no summary.csv" in refused(["compare", "x.csv"])
    for content in (b"", b"\x00\xff\xfe binary", b"a,b\n1,2\n", b"a,b\n1,2,3,4\n1\n1,2,3,4,5\n"):
        (folder / "x.csv").write_bytes(content)
        assert "is no summary" in refused(["compare", "x.csv"])


N = len(SUMMARY.names)
TOO_MANY = f"{N + 1} cells in place of {N}"
DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "a word for a number": (lambda line: line.replace("1234.5", "fast"), "could not convert string to float: 'fast'"),
    "an infinite number": (lambda line: line.replace("1234.5", "inf"), "tokens_per_s inf is out of range"),
    "a negative number": (lambda line: line.replace("1234.5", "-5"), "tokens_per_s -5.0 is out of range"),
    "too few cells": (lambda line: line[: len(line) // 2], f"cells in place of {N}"),
    "too many cells": (lambda line: line + ",1", TOO_MANY),
    "an open quote": (lambda line: line.replace("stdlib", '"stdlib'), f"cells in place of {N}"),
    "NULs": (lambda line: "\0" * 500, f"1 cells in place of {N}"),
    "nothing": (lambda line: "", f"1 cells in place of {N}"),
    "endless": (lambda line: line + "," + "x" * 10**6, TOO_MANY),
    "a status of no run": (lambda line: line.replace(",ok,", ",fine,"), "status 'fine' is none of ok, oom"),
    "a path": (lambda line: line.replace("single-0-0", "../../secret"), "'../../secret' is no name of a run"),
}


def test_damaged_rows_are_told_and_all_others_are_compared(tmp_path, undrawn):
    add_runs(tmp_path, single=1234.5, ddp=2000.0, fsdp=1000.0)
    path = tmp_path / "summary.csv"
    header, line, *others = path.read_text().splitlines()
    damaged = [damage(line).replace("single-0-0", f"single-{n}") for n, (damage, _) in enumerate(DAMAGE.values(), 2)]
    path.write_text("\n".join([header, *damaged, *others]) + "\n")
    comparison = compare(load([tmp_path]))
    assert order(comparison) == ["ddp x2", "fsdp x2"]
    for n, (group, (_, said)) in enumerate(zip(comparison.apart, DAMAGE.values(), strict=True), 2):
        assert group.name in (f"single-{n}", f"line {n}")
        (note,) = group.notes
        assert note.startswith(f"line {n} of summary.csv: ")
        assert said in note
    assert [row["status"] for row in cells(comparison)] == ["ok", "ok", *["damaged"] * len(DAMAGE)]
    assert "damaged" in shown(comparison)
    write_comparison([tmp_path], tmp_path)


COSTS = """
import sys, time
from gptscale.launchers.cli import main
status = main(["compare", sys.argv[1]])
costs = time.process_time(), "torch" in sys.modules
print(status, *costs, file=sys.stderr)
"""


def test_ten_thousand_rows_are_quick(tmp_path):
    add_run(tmp_path, "single", steps=False)
    path = tmp_path / "summary.csv"
    header, line = path.read_text().splitlines()
    named = [line.replace("single-0-0", f"r{i}").replace(",1000.0,", f",{1e5 / (i + 7)},") for i in range(10_000)]
    lines = [line.replace(",4,1,8,", f",{i // 50},1,8,") for i, line in enumerate(named)]
    lines[::9] = [line.replace(",ok,,", ",failed,out of memory,") for line in lines[::9]]
    path.write_text("\n".join([header, *lines]) + "\n")
    command = [sys.executable, "-c", COSTS, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    status, seconds, has_torch = ended.stderr.split()
    assert (status, has_torch) == ("0", "False")
    assert float(seconds) < 5
    assert len(re.findall("(?m)^single x1 ", ended.stdout)) == 200


def test_a_summary_of_damaged_rows_only(tmp_path, undrawn):
    add_run(tmp_path, "single")
    path = tmp_path / "summary.csv"
    path.write_text(path.read_text().splitlines()[0] + 50 * "\nx" + "\n")
    comparison = compare(load([tmp_path]))
    assert len(cells(comparison)) == 21
    assert "30 more lines" in shown(comparison)
    write_comparison([tmp_path], tmp_path)


RUN_JSONS = {
    "an empty object": b"{}",
    "a list": b"[]",
    "cut": b'{"workload": {"mod',
    "deep": b"[" * 200_000,
    "huge": b'{"a": "' + b"x" * 2**21 + b'"}',
    "no text": b"\xff\xfe",
    "other types": b'{"workload": 3, "command": {}, "environment": []}',
    "NaN and a long number": b'{"workload": NaN, "x": ' + b"9" * 5000 + b"}",
    "types inside": b'{"workload": {}, "command": [1], "environment": {"python": 1, "device": 1, "packages": {}}}',
}


def test_damaged_run_jsons_are_told(tmp_path, undrawn):
    add_run(tmp_path, "single")
    for n, content in enumerate(RUN_JSONS.values()):
        for recipe, steps in (("ddp", 20), ("fsdp", 30)):
            run_id = add_run(tmp_path, recipe, run_id=f"{recipe}-{n}", work={"steps": steps}, micro_batch_size=n)
            (tmp_path / "runs" / run_id / "run.json").write_bytes(content)
    write_comparison([tmp_path], tmp_path)
    rows = load([tmp_path])
    comparison = compare(rows, rows[0]["workload_hash"])
    assert order(comparison) == ["single x1", *(f"ddp x2 micro_batch_size={n}" for n in range(len(RUN_JSONS)))]
    said = notes(comparison)
    for n, kind in enumerate(RUN_JSONS):
        assert any(note.startswith(f"ddp x2 micro_batch_size={n}: ddp-{n}: run.json is ") for note in said), kind
        assert f"fsdp x2 micro_batch_size={n}: other work: steps 30 (ranked: 20)" in said, kind


def test_damaged_steps_are_told(tmp_path):
    """A run whose rank 0 is killed in its first step leaves an empty steps.csv."""
    names = [add_run(tmp_path, recipe) for recipe in ("single", "ddp", "fsdp", "zero1")]
    steps = [tmp_path / "runs" / name / "steps.csv" for name in names]
    steps[1].write_bytes(b"")
    steps[2].write_bytes(b"a,b\n1,2\n")
    steps[3].write_bytes(steps[0].read_bytes() + b"\0" * 50 + b"\n21,x,1e400\n\n")
    write_comparison([tmp_path], tmp_path)
    said = (tmp_path / "comparison.md").read_text()
    assert "ddp x2: ddp-1-0: steps.csv is not read: it is empty" in said
    assert "fsdp x2: fsdp-2-0: steps.csv is not read: it has no columns step and loss" in said
    assert "zero1 x2: zero1-3-0: steps.csv has 3 lines that are no rows" in said


@pytest.mark.parametrize("link", ["runs", "runs/single-0-0", "runs/single-0-0/run.json", "a name"])
def test_nothing_outside_the_results_is_read(tmp_path, link, undrawn):
    out = tmp_path / "out"
    add_run(out, "single")
    if link == "a name":
        (tmp_path / "run.json").write_text((out / "runs" / "single-0-0" / "run.json").read_text())
        (out / "summary.csv").write_text((out / "summary.csv").read_text().replace("single-0-0", "../.."))
    else:
        (out / link).rename(tmp_path / "secret")
        (out / link).symlink_to(tmp_path / "secret")
    write_comparison([out], out)
    assert "gptscale run single" not in (out / "comparison.html").read_text()
    assert "is a link" in as_text(compare(load([out])), markdown) or link == "a name"


@pytest.mark.promise("X6")
def test_a_planted_link_is_not_written_through(tmp_path):
    add_run(tmp_path / "out", "single")
    (tmp_path / "out" / "comparison.md").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="symbolic link"):
        write_comparison([tmp_path / "out"], tmp_path / "out")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.promise(
    "X12 | escape sequences and secrets | written out; files are private; the environment is never written"
)
def test_text_of_a_foreign_run_is_no_escape_sequence_markup_tag_or_formula(tmp_path, capsys, undrawn):
    evil = "\x1b]0;x\x07\u202etxt.\u2066"
    run_id = add_run(tmp_path, "single")
    add_run(tmp_path, "ddp")
    add_failure(tmp_path, "fsdp", "failed", "=1+1 | <script>alert(1)</script> [bold]x[/nothing]")
    file = tmp_path / "runs" / run_id / "run.json"
    content = json.loads(file.read_text()) | {"command": [evil], "recipe_config": {evil: evil}}
    file.write_text(json.dumps(content))
    path = tmp_path / "summary.csv"
    path.write_text(path.read_text().replace("somebody's", evil + "<b>$x$"))
    write_comparison([tmp_path], tmp_path)
    printed = capsys.readouterr().out
    as_rows, text, html = ((tmp_path / f"comparison.{kind}").read_text() for kind in ("csv", "md", "html"))
    assert all(c.isprintable() or c == "\n" for c in printed + as_rows + text + html)
    assert r"\x1b]0;x\x07\u202etxt.\u2066&lt;b&gt;" in html
    assert "[/nothing]" in "".join(printed.split())
    assert "<script" not in text + html
    assert r"\|" in text
    assert "&lt;script" in html
    assert not any(value.startswith(("=", "+", "@")) for value in chain(*csv.reader(io.StringIO(as_rows))))


def test_files_of_a_comparison_have_the_rights_that_umask_leaves(tmp_path, undrawn):
    add_run(tmp_path, "single")
    before = os.umask(0o027)
    try:
        write_comparison([tmp_path], tmp_path)
    finally:
        os.umask(before)
    for kind in ("csv", "md", "png", "html"):
        assert stat.S_IMODE((tmp_path / f"comparison.{kind}").stat().st_mode) == 0o640


def test_a_picture_of_very_many_groups_shows_the_fastest_without_steps_too(tmp_path):
    for n in range(43):
        add_run(tmp_path, "ddp", 1000.0 + n, micro_batch_size=n, steps=False)
    comparison = compare(load([tmp_path]))
    figure = Drawing(comparison).figure()
    assert "3 slower groups are not drawn" in figure.get_suptitle()
    assert [text.get_text() for text in figure.axes[2].get_yticklabels()] == order(comparison)[:40]


def test_a_table_of_all_recipes_keeps_every_word_whole(tmp_path):
    for i, recipe in enumerate(RECIPES):
        more = {"bound_by": "communication-bound", "gain_if_removed": 0.15, "taken_fraction": 0.1}
        add_run(tmp_path, recipe, 12_345.6 / (i + 1), train_time_s=123.4, **STATE, **more)
    add_failure(tmp_path, "fsdp", micro_batch_size=2)
    for width in (130, 100, 80):
        text = shown(compare(load([tmp_path])), width)
        assert max(map(len, text.splitlines())) <= width
        words = set(text.split())
        assert {*RECIPES, "communication-bound", "contended", "-15%", "tokens/s", "speed-up"} <= words
        assert ("not shown in" in text) == (width < 130)
        assert ("loss" in words) == (width > 80)


def test_all_forms_are_written(tmp_path, capsys):
    add_runs(tmp_path, single=1000.0, fsdp=1500.0, ddp=2000.0)
    add_failure(tmp_path, "zero3")
    files = {kind: tmp_path / f"table.{kind}" for kind in ("csv", "md", "tex", "png", "svg", "pdf", "html")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert main(["compare", *options, str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(f"wrote {file}" in said for file in files.values())
    rows = list(csv.DictReader(files["csv"].open()))
    assert [row["name"] for row in rows] == ["ddp x2", "fsdp x2", "single x1", "zero3 x2"]
    assert float(rows[0]["tokens_per_s"]) == 2000
    assert float(rows[0]["relative_speed"]) == 2
    table = [line for line in files["md"].read_text().splitlines() if line.startswith("|")]
    assert len(table) == 6
    assert len({line.count("|") for line in table}) == 1
    tex = files["tex"].read_text()
    assert r"\begin{tabular}{lr" in tex
    assert tex.count(r" \\") == 5
    assert matplotlib.image.imread(files["png"]).shape[:2] > (500, 1000)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert all(files[kind].read_bytes().startswith(begin) for kind, begin in begins.items())
    html = files["html"].read_text()
    assert html.count("data:image/png") == 4
    sources = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", html) + re.findall(r"url\(([^)]*)\)", html)
    assert all(source.startswith("data:") for source in sources)
    assert "@import" not in html
    for said in ("ddp x2", "gptscale run ddp", "torch 2.11.0", "What the columns mean", "cpu: somebody&#39;s"):
        assert said in html


def test_a_panel_is_a_narrower_picture_with_names_of_its_own(tmp_path):
    for recipe in ("single", "ddp"):
        run_id = add_run(tmp_path, recipe, state_weights_gib=1.0, state_formula="16 N / d", state_formula_gib=1.0)
        verdict = {"shares": {"data": 0.25, "products": 0.75}}
        (tmp_path / "runs" / run_id / "verdict.json").write_text(json.dumps(verdict))
    words = {"loss": "ddp x2", "memory": "d: data ranks", "time": "data: waiting for the next batch"}
    for panel, word in words.items():
        file = tmp_path / "panel.svg"
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            assert main(["compare", str(tmp_path), "--panel", panel, "--svg", str(file)]) == 0
        assert word in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-folder"], ""),
        ([".", "--pgn", "x.png"], ""),
        ([".", "--md", "nowhere/x.md"], ""),
        ([".", "--png", "."], ""),
        ([".", "--png", "a.svg"], "a.svg does not end in .png, in --png, write a.png"),
        ([".", "--panel", "speed"], "there is no picture to show it, in --panel"),
        ([".", "--panel", "time", "--csv", "a.csv", "--png", "a.png"], "there is no panel 'time', in --panel, choose"),
        ([".", "--tex", "no/a.tex"], "in --tex, name a file in a folder that exists"),
    ],
    ids=str,
)
def test_bad_command_lines_are_refused_before_any_file_is_written(words, message, folder, refused):
    add_run(folder, "single")
    assert message in refused(["compare", *words])


def test_a_run_of_version_3_is_a_repeat_of_one_with_fp32_state(tmp_path):
    """It lacks optimizer_state, since there was only one, and the columns on fp8."""
    for part, speed in (("old", 100.0), ("new", 120.0)):
        add_run(tmp_path / part, "single", speed, optimizer_state="fp32")
    file = tmp_path / "old" / "summary.csv"
    old = [column.name for column in SUMMARY.columns if column.since <= 3]
    pd.read_csv(file, dtype=str)[old].to_csv(file, index=False)
    (group,) = compare(load([tmp_path / "old", tmp_path / "new"])).ranked
    assert group.name == "single x1"
    assert group.median("tokens_per_s") == 110


OLDER_WORK = {**WORK, "betas": [0.9, 0.95], "optimizer_state_precision": "fp32"}


@pytest.mark.parametrize(("on_spike", "ranked"), [("warn", ["ddp x2", "single x1"]), ("skip", ["ddp x2"])])
def test_work_that_an_older_version_recorded_is_hashed_as_todays(tmp_path, on_spike, ranked):
    """Until 0.3.0 a workload was without `on_spike`, and two of its names were others. run.json had all options already."""
    older = add_run(tmp_path, "single", 100.0, workload_hash="0123456789abcdef")
    add_run(tmp_path, "ddp", 200.0)
    start = tmp_path / "runs" / older / "run.json"
    write_json(start, json.loads(start.read_text()) | {"workload": OLDER_WORK, "config": {"on_spike": on_spike}})
    comparison = compare(load([tmp_path]), hash_of(WORK))
    assert order(comparison) == ranked
    apart = [] if len(ranked) == 2 else [["other work: on_spike skip (ranked: warn)"]]
    assert [group.notes for group in comparison.apart] == apart


def test_a_row_without_run_json_keeps_its_hash(tmp_path, undrawn):
    gone = add_run(tmp_path, "single", workload_hash="0123456789abcdef")
    (tmp_path / "runs" / gone / "run.json").unlink()
    assert [row["workload_hash"] for row in load([tmp_path])] == ["0123456789abcdef"]
    assert main(["compare", str(tmp_path), "--html", str(tmp_path / "x.html")]) == 0
    assert gone not in (tmp_path / "x.html").read_text()


def test_runs_that_differ_in_an_option_of_their_recipe_are_no_repeats(tmp_path):
    for run_id, stage, speed in (("a", 2, 900.0), ("b", 3, 500.0), ("c", 3, 510.0)):
        add_run(tmp_path, "zero_offload", speed, run_id=run_id)
        file = tmp_path / "runs" / run_id / "run.json"
        write_json(file, json.loads(file.read_text()) | {"recipe_config": {"stage": stage, "offload": "cpu"}})
    assert order(compare(load([tmp_path]))) == ["zero_offload x2 stage=2", "zero_offload x2 stage=3"]


def test_what_a_group_waits_for_and_what_was_predicted_is_a_note(tmp_path):
    costs = {"offload_wait_fraction": 0.25, "bubble_fraction": 0.3, "bubble_fraction_theory": 0.2}
    predicted = {"predicted_step_time_s": 0.9, "predicted_peak_mem_gib": 1.1, "peak_mem_allocated_gib": 1.0}
    add_run(tmp_path, "ddp", 1024.0, **costs, **predicted)
    add_run(tmp_path, "single", 500.0)
    assert notes(compare(load([tmp_path]))) == [
        "ddp x2: 25.0% of the step waiting for what is on the host or on disk",
        "ddp x2: pipeline idle 30.0% of the time, its schedule alone would be 20.0%",
        "ddp x2: step 900.0 ms predicted, 1,000.0 measured (-10.0%); peak memory 1.10 GiB predicted, 1.00 measured (+10.0%)",
    ]


def test_a_last_line_without_a_newline_is_left_out():
    assert list(whole_lines(io.BytesIO(b"a\nb\nc"))) == [b"a\n", b"b\n"]
    assert list(whole_lines(io.BytesIO(b""))) == []


@pytest.mark.parametrize("run_id", ["../secret", "a/b", "", "\0"])
def test_a_name_cannot_lead_out_of_the_results(run_id, tmp_path):
    with pytest.raises(DamagedFileError, match="is no name of a run"), run_file(str(tmp_path), run_id, "run.json"):
        pass
