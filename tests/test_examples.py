"""The examples run as their docstrings say, and learn something. The commands of the page for students run too."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import ok, ranks, rows

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
STATE = ("state_weights_gib", "state_gradients_gib", "state_optimizer_gib")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, capfd, monkeypatch, free_port):
    """The one that needs nothing of the package is started by torchrun, the others as its ranks, from a warm parent."""
    if example == EXAMPLES[0]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example]
        subprocess.run(command, timeout=400, check=True)
    else:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_port))
        ranks(example, 2)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capfd.readouterr().out)]
    assert len(losses) >= 3
    assert losses[-1] < 0.8 * losses[0]


def test_a_strategy_of_the_llama_takes_at_most_15_lines():
    tree = ast.parse((ROOT / "examples" / "llama.py").read_text())
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in tree.body if isinstance(node, ast.FunctionDef)}
    shared = {"pipeline": "clip_stages", "hybrid_3d": "clip_stages"}
    for name in "ddp fsdp zero fairscale_sdp tensor_parallel context_parallel pipeline hybrid_3d".split():
        assert lines[name] + lines.get(shared.get(name), 0) <= 15, name


def test_the_copy_imports_nothing_of_the_package():
    assert not re.search("(import|from) gptscale", EXAMPLES[0].read_text())


@pytest.mark.slow
def test_the_first_operator_is_right(tmp_path, quick_compiler):
    page = (ROOT / "docs" / "ops" / "first_operator.md").read_text()
    for name, kind in (("gelu.cpp", "cpp"), ("first.py", "python")):
        (tmp_path / name).write_text(re.search(f"```{kind}\n(.*?)```", page, re.DOTALL)[1])
    assert len((tmp_path / "gelu.cpp").read_text().splitlines()) <= 30
    environ = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "MAX_JOBS": "1", "CXX": quick_compiler}
    command = [sys.executable, "first.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert ended.stdout.endswith("equal to torch's, and its gradient too\n"), ended.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_page_for_students_keeps_its_word(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "guides" / "students.md").read_text()
    for command in re.findall(r"(?m)^    gptscale (.+)$", page):
        ok(*shlex.split(command), timeout=400)
    runs = rows(tmp_path / "study" / "summary.csv")
    assert len({row["loss_last"][:6] for row in runs}) == 1
    held = {row["run_id"]: f"{1024 * sum(float(row[column]) for column in STATE):.1f}" for row in runs}
    assert held == dict(re.findall(r"(?m)^\| (\w+) \| ([\d.]+) \|", page))
