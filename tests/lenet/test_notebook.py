"""Tests of the notebook of the vision experiments: it is committed with its outputs, and it runs from top to bottom."""

import os
from pathlib import Path

import pytest

from gptscale.lenet.run.columns import read_summary

NOTEBOOK = Path(__file__).parents[2] / "examples" / "lenet.ipynb"
MAX_BYTES = 400_000
CELL_TIMEOUT_S = 300


def test_it_is_committed_as_it_ran():
    nbformat = pytest.importorskip("nbformat")
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data", "execute_result"}
    # There are no warnings.
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    text = [str(output.get("text") or output.data.get("text/plain")) for output in outputs]
    assert not [line for line in text if "/home/" in line or "/root/" in line or "/tmp/" in line]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 7


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_and_ends_with_its_accuracies(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("torchvision")
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3")
    # An assertion that fails in a cell fails here.
    client.execute(env=environment, cwd=str(tmp_path))
    (summary,) = tmp_path.glob("lenet-*/lenet.csv")
    rows = read_summary(summary).set_index("run_id")
    accuracy = rows.test_accuracy
    assert rows.index.tolist() == [
        "baseline", "dataloader", "fast", "fp32", "bf16", "one-process", "two-processes", "gelu-erf", "gelu-custom-erf",
    ]  # fmt: skip
    assert (rows.status == "ok").all()
    assert accuracy["baseline"] >= 0.985
    assert accuracy[["fp32", "bf16"]].min() >= 0.96
    # The notebook says why the two are not the same.
    assert abs(accuracy["one-process"] - accuracy["two-processes"]) <= 0.02
    assert rows.world_size["two-processes"] == 2
    assert abs(accuracy["gelu-erf"] - accuracy["gelu-custom-erf"]) <= 0.02
    assert rows.images_per_s["fast"] > rows.images_per_s["dataloader"]
    assert rows.workload_hash["one-process"] == rows.workload_hash["two-processes"]
