"""A user's DeepSpeed JSON: its allowed keys win, and "auto" keeps the run's value."""

import json
import subprocess
import sys

import pytest
import torch

from gptscale.common.engines.zero.options import merged
from gptscale.common.errors import ConfigError
from gptscale.common.process.roll_call import check_same_on_ranks
from gptscale.common.process.world import World
from gptscale.launchers.run.worker import facts_to_compare
from gptscale.recipes.zero import ZeroConfig

OURS = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 100}, "bf16": {"enabled": False}}


def test_free_keys_win_new_ones_are_added_and_auto_is_ours(tmp_path):
    user_json = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 7, "overlap_comm": True},
        "comms_logger": {"enabled": True},
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(user_json))
    assert merged(OURS, file) == {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 7, "overlap_comm": True},
        "bf16": {"enabled": False},
        "comms_logger": {"enabled": True},
    }
    assert OURS["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 100}


@pytest.mark.promise("C17")
def test_ranks_compare_the_content_of_the_file_and_not_its_name(tmp_path):
    facts, world = [], World(0, 0, 3, torch.device("cpu"), 60.0)
    for name, content in (("a", "{}"), ("b", "{}"), ("c", '{"dump_state": true}')):
        (tmp_path / name).write_text(content)
        config = ZeroConfig(stage=2, ds_config=tmp_path / name)
        facts.append(facts_to_compare("", world, config) | config.contents())
    check_same_on_ranks(facts[:2])
    said = r"^the content of --ds-config is \w{16} on rank 0,1 but \w{16} on rank 2, in what"
    with pytest.raises(ConfigError, match=said):
        check_same_on_ranks(facts)
    with pytest.raises(ConfigError, match=r"but None on rank 1"):
        check_same_on_ranks([facts[0], facts_to_compare("", world, ZeroConfig(stage=2))])


CODE = """
import sys, deepspeed
from deepspeed.runtime import compiler
before = compiler.compile
import gptscale.common.engines.zero.library
assert compiler.compile is before
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
import subprocess
started, subprocess.check_output = [], lambda command: started.append(command) or b"available: 1\\nnode 0 cpus: 0 1"
assert [CPU_Accelerator().device_count() for _ in range(3)] == [1] * 3 and started == [["numactl", "--hardware"]], started
from cpuinfo import get_cpu_info
assert get_cpu_info() == {}
print("deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.slow
def test_muon_is_imported_without_torchs_compiler_and_numactl_starts_once():
    pytest.importorskip("deepspeed")
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=400, check=True)
    assert ended.stdout.splitlines()[-1] == "True False"
