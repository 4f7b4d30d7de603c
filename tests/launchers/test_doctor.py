import json
import sys

import pytest

import gptscale.recipes
from gptscale.launchers import doctor
from gptscale.recipes import RECIPES, Recipe


def test_json_has_every_recipe_and_device(capsys):
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["recipes"]) == set(RECIPES)
    assert found["recipes"]["single"] is None
    assert found["devices"][0]["device"] == "cpu"
    assert found["packages"]["torch"]
    assert "gloo" in found["backends"]


def test_says_what_is_missing_and_the_line_that_brings_it(capsys, monkeypatch, tmp_path):
    (tmp_path / "broken_engine_recipe.py").write_text("raise OSError('libsomething.so not found')")
    monkeypatch.syspath_prepend(tmp_path)
    rows = {
        "absent": Recipe("gptscale.recipes.single", "SingleConfig", "", engine="deepspeed-of-nowhere"),
        "broken": Recipe("broken_engine_recipe", "SingleConfig", ""),
        "gpu": Recipe("gptscale.recipes.single", "SingleConfig", "", needs_cuda=True),
    }
    monkeypatch.setitem(sys.modules, "broken_engine_recipe", None)
    monkeypatch.delitem(sys.modules, "broken_engine_recipe")
    for name, row in rows.items():
        monkeypatch.setitem(gptscale.recipes.RECIPES, name, row)
    found = doctor.gather()["recipes"]
    assert "pip install 'gptscale[deepspeed-of-nowhere]'" in found["absent"]
    assert "does not import (OSError: libsomething.so not found)" in found["broken"]
    assert found["single"] is None
    assert doctor.main([]) == 0
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cxx_compiler": None}, "apt-get install g++"),
        ({"shared_memory_gib": 0.06}, "--shm-size"),
        ({"free_disk_gib": 1.0}, "two are kept"),
    ],
)
def test_warns_of_what_will_bite_later(change, words):
    fine = {"cxx_compiler": "g++", "shared_memory_gib": 8.0, "free_disk_gib": 100.0}
    assert doctor.warnings(fine) == []
    assert words in doctor.warnings(fine | change)[0]
