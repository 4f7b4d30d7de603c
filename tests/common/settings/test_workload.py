"""What is part of a run's work: every option that is not listed as none."""

import dataclasses

import pytest

from gptscale.common.process.world import world_of
from gptscale.common.settings.plan_file import PLANNED
from gptscale.common.settings.run import changed_work, todays_workload
from gptscale.common.settings.run_config import FIXED, KEPT, NOT_WORK, SPLIT, RunConfig
from gptscale.launchers.run.options import default_recipe_config
from gptscale.launchers.run.preflight import preflight

OPTIONS = {field.name for field in dataclasses.fields(RunConfig)}
OTHER = {"model": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 32, "vocab_size": 300, "seq_len": 16, "dropout": 0.1}
OTHER |= {"activation": "gelu_erf", "data": "synthetic", "seed": 5, "steps": 7, "global_batch_size": 4}
OTHER |= {"precision": "bf16", "on_spike": "skip", "min_lr_ratio": 0.2, "weight_decay": 0.0, "clip_grad_norm": 0.0}
OTHER |= {"beta1": 0.8, "beta2": 0.9}
OTHER |= {"optimizer": "sgd", "optimizer_state": "bf16", "lr": 0.5, "lr_schedule": "constant", "warmup_steps": 1}


def work(tmp_path, **options):
    config = RunConfig(**{"out": tmp_path, "device": "cpu"} | options)
    return preflight("single", config, default_recipe_config("single"), world_of("cpu", 0, 1)).work


def test_the_lists_name_options():
    assert {*SPLIT, *KEPT, *NOT_WORK, *FIXED, *PLANNED} <= OPTIONS
    assert set(OTHER) == OPTIONS - NOT_WORK


@pytest.mark.parametrize("option", OTHER)
def test_each_other_option_is_work(option, tmp_path):
    assert work(tmp_path, **{option: OTHER[option]}) != work(tmp_path)


def test_a_recorded_workload_is_its_own_todays_workload(tmp_path):
    recorded = work(tmp_path, on_spike="skip")
    assert todays_workload(recorded, {}) == recorded


def test_a_checkpoint_of_an_older_version_tells_what_changes(tmp_path):
    now = work(tmp_path, beta1=0.8)
    older = {name: now[name] for name in now if name not in ("beta1", "beta2", "optimizer_state", "on_spike")}
    older |= {"betas": [0.9, 0.95], "optimizer_state_precision": "bf16"}
    assert sorted(changed_work(older, now)) == ["beta1 was 0.9, is 0.8", "optimizer_state was bf16, is fp32"]
