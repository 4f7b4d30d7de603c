"""What the start of a rank with DeepSpeed imports: its Muon, uncompiled, and so not torch's compiler."""

import subprocess
import sys

import pytest

CODE = """
import sys, deepspeed
from deepspeed.runtime import compiler
before = compiler.compile
import gptscale.common.engines.zero.library
assert compiler.compile is before
print("deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
"""


def test_muon_is_imported_and_torchs_compiler_is_not():
    pytest.importorskip("deepspeed")
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=200, check=True)
    assert ended.stdout.splitlines()[-1] == "True False"
