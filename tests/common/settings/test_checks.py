"""The shared checks of options: what they refuse, and in which words."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.memory.__main__ import MemoryLadderOptions
from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, check_range, check_ranges, check_run_name, ignored
from gptscale.common.settings.command_line import changed_options, parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.commands.doctor import DoctorOptions
from gptscale.launchers.commands.tokenize_text import TokenizeOptions
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.studies.precision import PrecisionOptions
from gptscale.lenet.studies.workers import WorkersOptions
from gptscale.recipes.colossal_data import ColossalGeminiConfig
from gptscale.recipes.colossal_hybrid import ColossalPipelineConfig
from tools.trace_pipeline import RunAndTraceOptions


@dataclass(frozen=True)
class Options:
    """Some options of a command."""

    seq_len: int = 8
    lr: float | None = None


def refused(check, *words, **options):
    with pytest.raises(ConfigError) as error:
        check(*words, **options)
    return str(error.value)


def test_a_value_out_of_its_range():
    for value in (1, 2.5, 10, None):
        check_range(value, 1, 10, "seq_len")
    for value in (0, 11, math.nan, math.inf, -math.inf):
        message = refused(check_range, value, 1, 10, "seq_len")
        assert message == f"seq_len {value} is out of range, in --seq-len, use 1 to 10"
    assert refused(check_range, 0, 1, 10, "seq_len", fix="use 4").endswith(", use 4")
    ranges = {"seq_len": (1, 8), "lr": (0.0, 100.0)}
    check_ranges(Options(), ranges)
    # The first of two is named.
    assert refused(check_ranges, Options(0, -1.0), ranges).startswith("seq_len 0 is out of range")


def test_output_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in (None, Path("a.csv"), tmp_path / "a.csv"):
        check_output_file(file, "--csv")
    fix = "in --csv, name a file in a folder that exists"
    assert refused(check_output_file, tmp_path, "--csv") == f"{tmp_path} is a folder, {fix}"
    check_output_file(Path("a.svg"), "--png")
    assert refused(check_output_file, Path("a.b"), "--png").startswith("a.b does not end as a picture does, in --png")
    missing = Path("nowhere/a.csv")
    assert refused(check_output_file, missing, "--csv") == f"{missing} is in a folder that does not exist, {fix}"
    assert refused(check_output_file, missing, "--csv", "cannot be written") == f"{missing} cannot be written, {fix}"


@pytest.mark.promise("X5")
def test_run_names():
    for name in (None, "a", "ddp-2.run_1", "x" * 64):
        check_run_name(name, None)
    check_run_name("a", "auto")
    check_run_name(None, "results/runs/a")
    for name in ("", "-a", ".a", "a/b", "x" * 65, "a b", "a\0b", "../../etc/x", "/etc/x", "a\n", "=HYPERLINK(1)", "é"):
        assert refused(check_run_name, name, None).startswith(f"bad run name {name!r}, in --run-name, use 1 to 64")
    assert refused(check_run_name, None, "auto").startswith("nothing names the run to resume, in --resume")


# Each is refused, and accepted with the words behind "|", which its error names.
REFUSED = [
    (RunConfig, "--beta1 0.9 --optimizer sgd | --optimizer adamw"),
    (RunConfig, "--muon-momentum 0.9 | --optimizer muon"),
    (RunConfig, "--beta2=0.99 --optimizer sgd | --optimizer adamw"),
    (RunConfig, "--min-lr-ratio 0.2 --lr-schedule constant | --lr-schedule cosine"),
    (RunConfig, "--decay-from 20 | --lr-schedule wsd"),
    (RunConfig, "--tokenizer bytes --data synthetic | --data stdlib"),
    (RunConfig, "--tokenizer gpt2 --data tokens.bin | --data stdlib"),
    (RunConfig, "--eval-batches 4 | --eval-every 10"),
    (RunConfig, "--keep-checkpoints 3 | --save-last"),
    (RunConfig, "--trust-checkpoint | --resume PATH"),
    (RunConfig, "--allow_data_change | --resume PATH"),
    (VisionConfig, "--momentum 0.9 | --optimizer sgd"),
    (VisionConfig, "--data-dir data | --data mnist"),
    (VisionConfig, "--keep-checkpoints 2 | --save-every 1"),
    (VisionConfig, "--operators custom --model pure_linear | --model lenet"),
    (VisionConfig, "--batch-norm sync | --model cnn"),
    (WorkersOptions, "--data-dir x | --data mnist"),
    (PrecisionOptions, "--loss-scale 2 --modes fp32 | --modes fp16-fixed"),
    (ColossalPipelineConfig, "--num-model-chunks 2 | --schedule interleaved"),
    (ColossalGeminiConfig, "--offload-param-frac 0.5 | --offload-optim-frac 1"),
    (DoctorOptions, "--model tiny | --nvme-path FOLDER"),
    (TokenizeOptions, "--eval-fraction 0.1 a.txt --out a.bin | --eval-out FILE.bin"),
]


@pytest.mark.parametrize(
    ("kind", "case"), REFUSED, ids=[case.partition(" ")[0] + " of " + k.__name__ for k, case in REFUSED]
)
def test_an_option_without_effect_is_refused_with_its_default_too(kind, case):
    words, remedy = (part.split() for part in case.split("|"))
    with pytest.raises(ConfigError) as error:
        parse(kind, words, prog="gptscale")
    option = words[0].partition("=")[0].replace("_", "-")
    assert error.value.where == f"in {option}"
    assert error.value.fix.startswith("leave it out, or ")
    assert error.value.fix.endswith(" ".join(remedy))
    assert "{" not in error.value.what
    parse(kind, [*words, *remedy], prog="gptscale")


def test_what_never_has_an_effect():
    with pytest.raises(ConfigError, match="leaves no run, in --steps, leave it out"):
        parse(RunAndTraceOptions, ["--steps", "50"], prog="python -m tools.trace_pipeline")
    said = "a dry run tries no batch, in --minutes, leave it out, or leave --dry-run out"
    with pytest.raises(ConfigError, match=said):
        parse(MemoryLadderOptions, ["--dry-run", "--minutes", "3"], prog="python -m benchmarks.memory")


def test_words_of_a_run_leave_out_what_has_no_effect():
    """Code may set what a command line may not, as a study gives every run its --data-dir."""
    config = RunConfig(optimizer="sgd", beta1=0.5, eval_batches=2, steps=7)
    assert ignored(config) >= {"beta1", "eval_batches"}
    words = changed_options(config, RunConfig())
    assert words == ["--steps", "7", "--optimizer", "sgd"]
    assert parse(RunConfig, words, prog="gptscale") == RunConfig(optimizer="sgd", steps=7)
