"""A saved plan: nothing in it can change unseen, and a run is compared with it."""

import json

import pytest

from gptscale.common.errors import ConfigError, DataError
from gptscale.common.settings.plan_file import check_planned, options_of, predicted_columns, read_row
from gptscale.foresight.plan.planning import save_plan
from gptscale.launchers.commands.run import with_plan
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.start import plan_run

WORDS = ["--model", "tiny", "--global-batch-size", "8", "--micro-batch-size", "4", "--device", "cpu"]


@pytest.fixture
def saved(tmp_path):
    run, own = run_of()
    row = {"recipe": "ddp", "nodes": 1, "ranks": 2, "words": WORDS, "options": options_of(run, own)}
    row |= {"predicted_step_time_s": 0.5, "predicted_peak_mem_gib": 1.25}
    path = tmp_path / "plan.json"
    save_plan(path, {"recommended": 2, "rows": [row | {"nodes": 2, "ranks": 4}, row]})
    return path


def run_of(*more, nproc=2):
    config, own = parse_run("ddp", [*WORDS, *more])
    return plan_run("ddp", config, own, nproc).run, own


def test_a_run_as_planned_gets_what_the_plan_predicts(saved):
    check_planned(*run_of("--steps", "3", "--seed", "7"), saved, None)
    columns = predicted_columns(saved, None)
    assert columns["predicted_step_time_s"] == 0.5
    assert columns["predicted_peak_mem_gib"] == 1.25
    assert columns["plan_hash"] == json.loads(saved.read_text())["sha256"][:16]


def test_a_run_that_is_not_the_planned_one_is_refused(saved):
    with pytest.raises(ConfigError, match="activation_checkpointing full here, none there"):
        check_planned(*run_of("--activation-checkpointing", "full"), saved, None)
    with pytest.raises(ConfigError, match="ranks 1 here, 2 there"):
        check_planned(*run_of(nproc=1), saved, None)


def test_an_edited_plan_another_version_no_plan_and_no_row_are_told(saved):
    content = json.loads(saved.read_text())
    for text, said in (
        (content | {"recommended": 1}, "changed after it was saved"),
        (content | {"format": 99}, "format 99"),
        ({}, "this is no plan"),
        ([1], "this is no plan"),
    ):
        edited = saved.with_name("edited.json")
        edited.write_text(json.dumps(text))
        with pytest.raises(DataError, match=said):
            read_row(edited)
    with pytest.raises(ConfigError, match="no row 3"):
        read_row(saved, 3)


def test_the_plan_comes_first_on_the_command_line_and_the_user_after_it(saved):
    its = ["--plan", str(saved), "--steps", "3"]
    assert with_plan(its) == ["ddp", "--nproc", "2", *WORDS, *its]
    assert with_plan(["fsdp", "--steps", "3"]) == ["fsdp", "--steps", "3"]
    submit = "use gptscale submit ddp --nodes 2 --gpus-per-node 2 --model"
    with pytest.raises(ConfigError, match=f"the plan is for 2 nodes, in --plan, {submit}"):
        with_plan([f"--plan={saved}", "--plan-row", "1"])
