"""A disk is measured through DeepSpeed's own file I/O, and judged."""

import re

import pytest

from benchmarks import nvme
from gptscale.common.engines.zero import operators as deepspeed_ops
from gptscale.common.errors import ConfigError
from gptscale.common.settings.gpt_config import PRESETS


def test_measures_a_disk_and_judges_it(capsys, tmp_path, monkeypatch):
    if deepspeed_ops.lack(["pin_memory", "async_io"]):
        pytest.skip("DeepSpeed's async_io is not compiled here: run gptscale prepare")
    monkeypatch.setattr(nvme, "FILE_BYTES", 2**22)
    assert nvme.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "GiB/s through DeepSpeed's async_io" in said
    assert "a step of zero_infinity on one device moves 55 GiB" in said
    assert list(tmp_path.iterdir()) == []


def test_a_fast_disk_keeps_up_and_a_slow_one_starves():
    """At 2 GiB/s each way 20 N + 18 N bytes of 1.6b take 27.6 s. At 100 TFLOP/s that is 281 thousand tokens."""
    said = nvme.verdict(PRESETS["1.6b"], nvme.DiskSpeed(2.0, 2.0), 100.0)
    assert "starves unless a step has 275 sequences or more (281,600 tokens" in said
    assert "the disk keeps up" in nvme.verdict(PRESETS["1.6b"], nvme.DiskSpeed(1e6, 1e6), 0.001)


@pytest.mark.parametrize(
    ("words", "said"), [(["nowhere"], "nowhere is no folder"), ([".", "--model", "1.6c"], "did you mean '1.6b'?")]
)
def test_a_bad_folder_or_model_is_refused(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        nvme.main(words)
