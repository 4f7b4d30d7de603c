"""What a rank with DeepSpeed does once: import its Muon, uncompiled and so without torch's compiler, and start `numactl`.

It starts nothing to find out who made the CPU.
"""

import subprocess
import sys

import pytest

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
