"""The lines that end a vision run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptscale.lenet.run.record import print_summary

ROW: dict[str, Any] = {"model": "lenet", "status": "ok", "data": "digits", "n_test": 1449}


def printed(capsys: pytest.CaptureFixture[str], **figures: Any) -> list[str]:
    print_summary(ROW | figures, Path("out/lenet.csv"), Path("out/runs/r"))
    return capsys.readouterr().out.splitlines()


def test_what_was_not_measured_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys)
    assert lines[1] == "lenet ok on digits: loss - -> -, test accuracy - of 1,449 images"
    assert "  speed   - images/s, load - and update - per step, training -, in all - (99 % after -)" in lines
    assert "  busy    processor -" in lines
    assert lines[-2:] == ["  files   out/runs/r", "  row     out/lenet.csv"]


def test_figures_have_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"loss_first": 2.3, "loss_last": 0.1, "test_accuracy": 0.9876, "images_per_s": 12345.6, "load_s": 1e-5}
    text = "\n".join(printed(capsys, **figures, cpu_util_percent=98.7, peak_rss_gib=0.5, skipped_steps=3))
    assert "loss 2.3000 -> 0.1000, 3 steps skipped, test accuracy 98.76% of 1,449 images" in text
    assert "12,346 images/s, load 0.000010 s" in text
    assert "host 0.50 GiB" in text
    assert "processor 99 %" in text
    assert "GPU" not in text


def test_a_gpu_has_its_own_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(printed(capsys, gpu_util_percent=80.0, gpu_mem_used_gib=1.5))
    assert "GPU 80 % busy with 1.50 GiB in use, -" in text
