"""`gptscale plan` as it is typed, with trials that are told instead of simulated."""

import json
import re

import pytest
from told_trials import tried

from gptscale.common.errors import ConfigError
from gptscale.foresight.commands.plan import main
from gptscale.foresight.plan import planning
from gptscale.launchers.commands.run import main as run

SMALL = "--model gpt2 --gpus-per-node 2 --global-batch-size 16 --recipes ddp,fsdp,zero1".split()


@pytest.fixture(autouse=True)
def _no_simulation(monkeypatch):
    monkeypatch.setattr(planning, "simulated", tried)


def test_a_plan_recommends_a_command_and_leaves_its_files(tmp_path, capsys):
    files = [f"--{kind}={tmp_path}/plan.{kind}" for kind in ("png", "md", "html")]
    assert main([*SMALL, *files, "--explain", "1", "--save", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recommended  ddp dp2")
    assert "gptscale run ddp --nproc 2 --model gpt2 --global-batch-size 16" in out
    assert out.count("  Not ") == 2
    assert "data sheet: no such device was measured" in out
    # Each moment of a stream is a letter.
    streams = {line.split()[2]: line.split()[-1] for line in out.splitlines() if line.startswith("  rank 0 ")}
    assert re.fullmatch(r"P+[:.]*", streams["stream"])
    assert re.fullmatch(r"[~:.]+", streams["link"])
    assert len(streams["stream"]) == len(streams["link"]) == 80
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert " * | ddp dp2 |" in (tmp_path / "plan.md").read_text()
    assert "data:image/png;base64," in (tmp_path / "plan.html").read_text()
    content = json.loads((tmp_path / "plan.json").read_text())
    assert {row["memory_by"] for row in content["rows"]} == {"simulation"}
    assert {row["recipe"] for row in content["rows"]} == {"ddp", "fsdp", "zero1"}


def test_a_saved_row_starts_a_run_and_contradictions_are_refused(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    main([*SMALL, "--save", str(plan)])
    capsys.readouterr()
    its = ["--plan", str(plan), "--dry-run", "--data", "synthetic", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert run(its) == 0
    out = capsys.readouterr().out
    assert "recipe   ddp on 2 x cpu, bf16" in out
    assert f"--plan {plan}" in out
    with pytest.raises(ConfigError, match="not what the plan predicts: micro_batch_size"):
        run([*its, "--micro-batch-size", "1"])


def test_more_devices_are_drawn(tmp_path):
    assert main([*SMALL, "--scaling", "--png", str(tmp_path / "scaling.png")]) == 0
    assert (tmp_path / "scaling.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "h100"], "unknown device 'h100', in --device, did you mean 'h100-80'"),
        (["--device", "tpu"], "For this machine's processor: gptscale plan --here"),
        (["--link", "ib-4000"], "unknown link 'ib-4000', in --link, did you mean"),
        (["--nodes", "0"], "nodes 0 is out of range"),
        (["--model", "gpt5"], "unknown model 'gpt5'"),
        (["--recipes", "dpp"], "unknown recipe 'dpp', in --recipes, did you mean 'ddp'"),
        (["--recipes", "single"], "no recipe accepts this work .*it is one process, not 8"),
        (["--recipes", "ddp", "--global-batch-size", "9"], "global batch 9 is not a multiple of 8"),
        (["--recipes", "tensor_parallel", "--gpus-per-node", "5"], "no recipe accepts this work"),
        (["--recipes", "ddp,fsdp", "--model", "gpt3-175b"], "nothing fits .*: fsdp dp8, .*, comes nearest and lacks"),
        (["--explain", "99", "--recipes", "ddp"], "the table has no row 99"),
        (["--here", "--device", "h200"], "--here is this machine"),
        (["--nproc", "4"], "the devices are --nodes times"),
        (["--scaling"], "the picture has no file"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words, message):
    with pytest.raises(ConfigError, match=message):
        main(words)
