import json

import pytest

from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.launchers import nvme
from gptscale.launchers.commands import doctor
from gptscale.recipes import RECIPES


def test_json_has_every_recipe_and_device(capsys):
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["recipes"]) == set(RECIPES)
    assert found["recipes"]["single"] is None
    assert found["devices"][0]["device"] == "cpu"
    assert found["packages"]["torch"]
    assert "gloo" in found["backends"]


def test_says_what_is_missing_and_the_line_that_brings_it(capsys, lacking_engines):
    found = doctor.gather()["recipes"]
    assert "pip install 'gptscale[deepspeed-of-nowhere]'" in found["absent"]
    assert "does not import (ModuleNotFoundError: No module named 'a_file_that_was_lost')" in found["broken"]
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "Traceback" not in said
    assert "GiB of disk free here" in said
    # In the table too, whose text may be cut into lines.
    assert "'gptscale[deepspeed-of-nowhere]'" in "".join(said.split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cxx_compiler": None}, "apt-get install g++"),
        ({"shared_memory_gib": 0.06}, "--shm-size"),
        ({"free_disk_gib": 1.0}, "two are kept"),
        ({"packages": {"torch": "99.1", "deepspeed": "0.19.8+abc"}}, "outside what was tried: torch 99.1 (>=2.5.1,<"),
    ],
)
def test_warns_of_what_will_bite_later(change, words):
    fine = {"cxx_compiler": "g++", "shared_memory_gib": 8.0, "free_disk_gib": 100.0, "packages": {}}
    assert doctor.warnings(fine) == []
    assert words in doctor.warnings(fine | change)[0]


def test_measures_a_disk_and_judges_it(capsys, tmp_path, monkeypatch):
    if deepspeed_ops.lack(["pin_memory", "async_io"]):
        pytest.skip("DeepSpeed's async_io is not compiled here: run gptscale prepare")
    monkeypatch.setattr(nvme, "FILE_BYTES", 2**22)
    assert doctor.main(["--nvme-path", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nvme"]["read_gib_per_s"] > 0
    assert found["nvme"]["write_gib_per_s"] > 0
    assert "a step of zero_infinity on one device moves 55 GiB" in found["nvme"]["verdict"]
    assert list(tmp_path.iterdir()) == []
    assert set(found["operators"]) == {"cpu_adam", "pin_memory", "async_io"}


def test_a_fast_disk_keeps_up_and_a_slow_one_starves():
    """At 2 GiB/s each way 20 N + 18 N bytes of 1.6b take 27.6 s. At 100 TFLOP/s that is 281 thousand tokens."""
    said = nvme.verdict(PRESETS["1.6b"], {"read_gib_per_s": 2.0, "write_gib_per_s": 2.0}, 100.0)
    assert "starves unless a step has 275 sequences or more (281,600 tokens" in said
    assert "the disk keeps up" in nvme.verdict(PRESETS["1.6b"], {"read_gib_per_s": 1e6, "write_gib_per_s": 1e6}, 0.001)
