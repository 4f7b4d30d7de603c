"""Tests of the studies of batch and backend: the same work has the same loss, and equal rows do not differ significantly."""

import dataclasses

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from gptscale.common.process.world import World
from gptscale.lenet.comparison.tables import Column
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.strategy import backend_of, other_devices
from gptscale.lenet.studies.backend import verdict

LENET = ["--model", "lenet", "--augment", "none"]
ON_CUDA = World(0, 0, 2, torch.device("cuda", 0), 60.0)


@pytest.mark.slow
def test_batches(study, capsys):
    """Two processes with half of the batch each compute what one process with the whole batch computes."""
    rows = study("batch", *LENET, "--per-rank", "32")
    assert rows.batch_size.to_dict() == {"1 x 32": 32, "1 x 64": 64, "2 x 32": 64}
    assert rows.world_size.tolist() == [1, 1, 2]
    assert rows.backend.fillna("").tolist() == ["", "", "gloo"]
    assert (rows.optimizer.eq("adamw") & rows.weight_decay.eq(0.05) & rows.lr_schedule.eq("onecycle")).all()
    for column in ("loss_first", "loss_last"):
        assert abs(rows[column]["1 x 64"] - rows[column]["2 x 32"]) / rows[column]["1 x 64"] <= 1e-5
    assert rows.test_accuracy["1 x 64"] == rows.test_accuracy["2 x 32"]
    assert rows.avg_mem_gib.notna().all()
    said = capsys.readouterr().out
    assert "report D: 2 x 128" in said
    assert "memory is the resident set of a rank's process" in said


@pytest.mark.slow
def test_gloo_against_itself(study, capsys):
    rows = study("backend", *LENET, "--per-rank", "16")
    assert rows.backend.to_dict() == {"Gloo, 16 per rank": "gloo", "Gloo again, 16 per rank": "gloo"}
    assert (rows.strategy == "ddp").all()
    assert rows.loss_last.nunique() == 1
    said = capsys.readouterr().out
    assert "note: nccl is not run: it needs CUDA devices" in said
    assert "one run each tells nothing of their spread" in said


def test_what_is_said_of_two_backends():
    column = Column("training s", "s", ".1f", spread=True)
    near = {"NCCL": pd.DataFrame({"s": [10.0, 12.0]}), "Gloo": pd.DataFrame({"s": [11.0, 13.2]})}
    assert verdict(near, column) == [
        "training s: the median of Gloo lies +10.0% from NCCL's",
        "training s: NCCL and Gloo do not differ significantly, their spreads overlap",
    ]
    far = {"NCCL": pd.DataFrame({"s": [10.0, 11.0]}), "Gloo": pd.DataFrame({"s": [12.0, 13.0]})}
    assert verdict(far, column)[1] == "training s: NCCL and Gloo differ, their spreads do not overlap"


def test_torch_takes_gloo_for_both_devices():
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        votes = torch.ones(2)
        dist.all_reduce(votes)
        assert votes.tolist() == [1.0, 1.0]
        assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == "gloo"
    finally:
        dist.destroy_process_group()


def test_one_process_exchanges_nothing():
    alone = dataclasses.replace(ON_CUDA, world_size=1)
    assert backend_of(VisionConfig(), alone) is None
    assert backend_of(VisionConfig(strategy="ddp"), alone) == "nccl"


def test_dataparallel_lists_all_other_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert other_devices(VisionConfig(strategy="dataparallel"), ON_CUDA) == [torch.device("cuda", i) for i in (1, 2)]
    assert other_devices(VisionConfig(), ON_CUDA) == []
