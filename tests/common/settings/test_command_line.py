"""Dataclasses of options from a command line and back, with any mistake in one line."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from gptscale.common.errors import ConfigError
from gptscale.common.settings.command_line import bare_resume, changed_options, fail, parse
from gptscale.common.settings.run_config import RunConfig


@dataclass(frozen=True)
class RunOptions:
    """The options of a run."""

    steps: int = 5
    out_folder: Path = Path("results")
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    board: bool = True
    resume: str | None = None


@dataclass(frozen=True)
class Both:
    """A run's options and the launcher's."""

    run: RunOptions = field(default_factory=RunOptions)
    nproc: int = 1


def read(*words):
    return parse(Both, words, prog="gptscale test", about="A test.")


def refused(*words):
    with pytest.raises(ConfigError) as error:
        read(*words)
    return str(error.value)


def test_nested_fields_have_no_prefix():
    assert read() == Both()
    assert read("--steps", "7", "--nproc=2", "--out_folder", "x") == Both(RunOptions(7, Path("x")), 2)


def test_a_mistake_is_one_line(capsys):
    where = "on the command line, see gptscale test --help"
    assert refused("--precision", "fp4").startswith("invalid choice 'fp4' for argument '--precision'")
    assert refused("--steps", "many").endswith(where)
    assert "\n" not in refused("--steps", "many")
    assert capsys.readouterr().err == ""


@pytest.mark.promise("C10")
def test_an_unknown_option_names_the_nearest():
    said = "unknown option '--out-foldr', on the command line, did you mean '--out-folder'?"
    assert refused("--out-foldr", "x") == said
    assert refused("--stepz=3").endswith("did you mean '--steps'?")
    assert refused("--max-steps", "3").endswith("did you mean '--steps'?")
    assert refused("word").startswith("unknown option 'word'")


@pytest.mark.parametrize(("path", "why"), [("x" * 300, "File name too long"), ("a\0b", ".*embedded null .*")])
def test_what_cannot_be_a_path(path, why):
    assert re.search(rf"cannot be a path \({why}\), in --out-folder, give another", refused("--out-folder", path))
    with pytest.raises(ConfigError, match="cannot be a path"):
        parse(RunConfig, ["--data", path], prog="gptscale")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("--learning-rte", "did you mean '--lr'?"),
        ("--learning_rate", "did you mean '--lr'?"),
        ("--warmup-step", "did you mean '--warmup-steps'?"),
        ("--frobnicate", "see gptscale --help"),
        ("--x", "see gptscale --help"),
        ("-", "see gptscale --help"),
    ],
)
def test_only_a_near_option_is_suggested(word, fix):
    """Before, --learning-rte was taken for --timing-warmup-steps."""
    with pytest.raises(ConfigError) as error:
        parse(RunConfig, [word, "3"], prog="gptscale")
    assert error.value.fix == fix


def test_help_ends_with_status_0(capsys):
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    assert "usage: gptscale test" in capsys.readouterr().out


def test_changed_options_make_the_same_again():
    assert changed_options(RunOptions(), RunOptions()) == []
    options = RunOptions(7, Path("a b"), "bf16", True, False, "auto")
    words = changed_options(options, RunOptions())
    rest = "--precision bf16 --compile --no-board --resume auto".split()
    assert words == ["--steps", "7", "--out-folder", "a b", *rest]
    assert read(*words).run == options
    assert changed_options(RunOptions(), options)[:2] == ["--steps", "5"]


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["--resume"], ["--resume", "newest"]),
        (["--resume", "a/b"], ["--resume", "a/b"]),
        (["--resume", "--steps", "3"], ["--resume", "newest", "--steps", "3"]),
        ([], []),
    ],
)
def test_bare_resume_means_the_newest_checkpoint(words, result):
    assert bare_resume(words) == result


def test_fail_prints_one_line(capsys):
    assert fail(ConfigError("a\nb", "there", "mend it")) == 2
    assert capsys.readouterr().err == "gptscale: error: a\\nb, there, mend it\n"
