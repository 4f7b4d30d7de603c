"""Every command that a page shows, and every option that an error advises, is one that the command line takes."""

import ast
import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from gptscale.common.process import environments
from gptscale.common.settings import command_line
from gptscale.common.settings.checks import option_of
from gptscale.launchers.cli import COMMANDS, main
from gptscale.launchers.cluster.submission import SBATCH, SBATCH_FLAGS
from gptscale.launchers.run.options import parse_run
from gptscale.lenet.cli import USAGE
from gptscale.recipes import RECIPES

ROOT = Path(__file__).parents[1]
# A log of what was typed then, and pages of what changed.
HISTORY = {"docs/measurements/LOG.md", "CHANGELOG.md"}
PAGES = [
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("skills/*.md"))
    if str(page.relative_to(ROOT)) not in HISTORY
]
PROGRAMS = ("gptscale ", "torchrun ", "launchers/multinode.sh ", "make ", "salloc ", "python -m ")


def commands(page):
    """Yield the commands of a page's blocks and of its text between backticks, without comments and without `...`."""
    text = page.read_text().replace("\\\n", " ")
    # In a sentence, an option without its value is only named, and so is one without a recipe.
    named = re.compile(r".* --[a-z-]+|gptscale (run|simulate|submit) --.*")
    sentences = [words for words in re.findall(r"`([^`\n]+)`", text) if not named.fullmatch(words)]
    for line in [*re.findall(r"(?m)^    (\S.*)$", text), *sentences]:
        command = re.sub(r"(\s+(#|\()|\s{3,}gptscale ).*", "", line)
        if command.startswith(PROGRAMS) and not re.search(r"\.\.\.|<|…", command):
            yield command


COMMANDS_SHOWN = sorted({command for page in PAGES for command in commands(page)})


@pytest.fixture
def read_only(monkeypatch):
    """End every command as soon as its options are read, whether or not Colossal-AI's environment is there."""

    def stop(options):
        raise SystemExit(0)

    monkeypatch.setattr(command_line, "_check_paths", stop)
    monkeypatch.setattr(environments, "require", lambda *package: None)


def understands(words):
    """Check the words behind `gptscale`. A word for a group of commands, or with --help, is understood too."""
    # A plan is read before the options are, and no page's file is here.
    if "--plan" in words or (len(words) == 1 and (words[0] in COMMANDS or words[0] == "lenet")):
        return
    values = {"RECIPE": "ddp", "N": "2", "FILE": "file", "DIR": "folder", "NAME": "name", "B": "8", "RUN": "run"}
    values["D"] = "digits"
    words = [values.get(word, word) for word in words]
    with pytest.raises(SystemExit) as end:
        sys.exit(main(words))
    assert not end.value.code


@pytest.mark.parametrize("command", COMMANDS_SHOWN)
def test_a_command_of_the_pages_is_understood(command, read_only, capsys):
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
        assert words[1] in targets or "=" in words[1]
        return
    if words[0] == "salloc":
        words = words[words.index("gptscale") :]
    if words[0] == "launchers/multinode.sh":
        ended = subprocess.run(
            ["bash", *words[:1], "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True
        )
        words = shlex.split(ended.stdout)
    if words[0] == "gptscale":
        understands(words[1:])
        return
    if words[0] == "torchrun":
        read = get_args_parser().parse_args(words[1:])
        assert read.module or (ROOT / read.training_script).is_file()
        words = ["python", "-m", read.training_script, *read.training_script_args]
    module, rest = words[2], words[3:]
    if module.startswith("gptscale.recipes"):
        names = [name for name, row in RECIPES.items() if row.module == module]
        name = names[0] if names else rest.pop(0).replace("NAME", "ddp")
        with pytest.raises(SystemExit) as end:
            parse_run(name, rest)
        assert not end.value.code
    elif module.startswith(("benchmarks", "tools.")):
        folder = ROOT / module.replace(".", "/")
        program = importlib.import_module(f"{module}.__main__" if folder.is_dir() else module)
        if hasattr(program, "start"):
            with pytest.raises(SystemExit) as end:
                program.main(rest)
            assert not end.value.code
    elif not module.endswith(".py"):
        importlib.import_module(module)


@pytest.mark.parametrize("word", sorted(USAGE.keys() - {"report"}))
def test_every_vision_command_downloads_what_it_names(word, read_only):
    understands(["lenet", word, "--data", "mnist", "--download"])


def options_of_all_commands():
    """Return every option of every dataclass of options in the package."""
    options = {"--help", "--dry-run", "--resume", *(f"--{name}" for name in SBATCH | SBATCH_FLAGS)}
    for folder in ("common", "recipes", "foresight", "lenet", "launchers"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            name = ".".join(["gptscale", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
            if path.stem == "__main__":
                continue
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError:
                # It needs an engine that is not installed.
                continue
            for kind in vars(module).values():
                if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                    fields = dataclasses.fields(kind)
                    options |= {option_of(field.name) for field in fields}
                    # Annotated[..., tyro.conf.arg(name="as")]
                    options |= {f"--{n}" for f in fields for n in re.findall(r"""name=["']([a-z-]+)""", str(f.type))}
    return options


# Options of other programs.
TORCHRUN = "--nproc-per-node --standalone --nnodes --rdzv-backend --rdzv-endpoint"
FOREIGN = {*TORCHRUN.split(), "--check", "--shm-size", "--force-reinstall", "--endpoint"}
# Where "gptscale" is a subject, and no command.
VERBS = {"does", "reads", "that", "up", "wrote"}


@cache
def advice():
    """Return the place and the text of each sentence of the package that is no docstring, with {} for what is filled in."""
    found = []
    for path in sorted(ROOT.glob("[clrfo]*/**/*.py")):
        nodes = [] if "mock_cuda" in path.parts else list(ast.walk(ast.parse(path.read_text())))
        parts = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        parts |= {id(value) for n in nodes if isinstance(n, ast.JoinedStr) for value in n.values}
        for node in (n for n in nodes if isinstance(n, ast.Constant | ast.JoinedStr) and id(n) not in parts):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(v.value if isinstance(v, ast.Constant) and type(v.value) is str else "{}" for v in values)
            if " " in text and "srun" not in text:
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return found


def test_the_options_that_errors_name_exist():
    known = options_of_all_commands() | FOREIGN
    unknown = [
        f"{where}: {option}"
        for where, text in advice()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*(?![\w{-])", text)
        if option not in known and option.replace("--no-", "--") not in known
    ]
    assert unknown == []


def test_a_command_that_an_error_advises_takes_its_options(capsys):
    """What `gptscale WORD --help` shows is what the words behind it may be. The overview has every WORD."""
    shown, unknown = {}, []
    for where, text in advice():
        for word, rest in re.findall(r"(?<![\w.-])gptscale ([a-z]+)((?: (?:\.\.\. )?[\w{}.-]+)*)", text):
            if word not in VERBS:
                names = {"lenet": USAGE, "run": RECIPES, "submit": RECIPES, "simulate": RECIPES}.get(word, ())
                first = [name for name in rest.split()[:1] if name in names]
                words = (word, *(first or list(names)[:1]))
                if words not in shown:
                    understands([*words, "--help"])
                    shown[words] = re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)
                unknown += [f"{where}: {word} {o}" for o in re.findall(r"--[a-z-]+", rest) if o not in shown[words]]
    assert unknown == []
    assert {word for word, *_ in shown} == COMMANDS.keys()


def test_extras_and_modules_that_errors_name_exist():
    texts = "\n".join(text for _, text in advice())
    cfg = (ROOT / "setup.cfg").read_text()
    assert {*re.findall(r"gptscale\[([a-z-]+)\]", texts)} <= {*re.findall(r"(?m)^([a-z-]+) =$", cfg)}
    assert {*re.findall(r"python -m ([a-z_.]+)", texts)} <= {"benchmarks.model", "gptscale.recipes"}


def test_advice_for_a_wheel_does_not_name_make(monkeypatch, tmp_path):
    assert environments.remedy("colossalai") == "make colossalai"
    monkeypatch.setattr(environments, "__file__", str(tmp_path / "gptscale" / "common" / "process" / "environments.py"))
    beside = environments.folder("colossalai")
    made = f"python3 -m venv {beside} && {beside}/bin/pip install 'gptscale[colossalai]'"
    assert environments.remedy("colossalai") == made
