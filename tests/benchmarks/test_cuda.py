"""The benches on a GPU: all that they measure is asked for once. Under the mock of CUDA no figure is looked at."""

import pytest
from worlds import ENVIRONMENT, IMPORTS, WORLDS, imports_of

from benchmarks import timing
from benchmarks.engines.minimal_splits import SETUPS
from benchmarks.model import worker as model
from benchmarks.model.options import CEILINGS, ModelBenchOptions, resolve
from benchmarks.ops.__main__ import OpsOptions, figures
from benchmarks.ops.cases import OPERATORS
from gptscale.common.process.mock import is_mock
from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch
from gptscale.launchers.run.preflight import why_not_here
from gptscale.ops import registry

pytestmark = pytest.mark.gpu
SHAPE = {"device": "cuda", "layers": 2, "hidden": 128, "heads": 4, "seq_len": 64, "vocab_size": 512, "batch_size": 2}


@pytest.fixture(autouse=True)
def _a_round_is_one_call_under_the_mock(monkeypatch):
    if is_mock():
        monkeypatch.setattr(timing, "ROUND_S", 0.0)


@pytest.mark.parametrize("contender", [CEILINGS, "single", "minimal"])
def test_a_contender_takes_its_steps(contender):
    bench = resolve(ModelBenchOptions(**SHAPE, contenders="single", steps=2, rounds=1))
    turn = model.main(bench.task(contender))
    if turn["status"] != "ok":
        raise RuntimeError(f"{contender}: {turn}")


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_case_of_an_operator_is_timed(operator):
    registry.ready()
    rows = list(figures(OpsOptions(operators=operator, device="cuda", dtypes="bf16", largest_kib=64, rounds=1)))
    if not rows or any(row["device"] == "cpu" for row in rows):
        raise RuntimeError(f"{operator}: {rows}")


# hybrid_3d needs two ranks.
@pytest.mark.parametrize("recipe", [name for name in SETUPS if name != "hybrid_3d"])
def test_an_engine_takes_its_steps_beside_its_librarys_own_loop(recipe):
    if reason := why_not_here(recipe):
        pytest.skip(reason)
    # The import of DeepSpeed asks CUDA what is there, and CUDA does not survive a fork. The mock does, which mock_engines.py
    # does not ask.
    imports = (*IMPORTS, "mock_engines") if is_mock() else imports_of((recipe,), "")
    program = Program(str(WORLDS / "world_engines.py"), (recipe,), imports=imports)
    if launch(program, 1, environment=ENVIRONMENT, fork=is_mock() or not recipe.startswith("zero")):
        raise RuntimeError(recipe)
