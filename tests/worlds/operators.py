"""What the tests of the operators share: the implementations, and programs that run in processes of their own."""

import os
import subprocess
import sys

import pytest
import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# In words: asked before the test, and not when tests are collected, because it may compile.
needs_cpp = pytest.mark.skipif(
    "not __import__('gptscale.ops.registry').ops.registry.ready()",
    reason="the C++ operators are not compiled here: gptscale prepare",
)


def implementations(*names):
    """Return parameters for a test, of which `cpp` is skipped where it is not compiled."""
    return [pytest.param(name, marks=needs_cpp) if name == "cpp" else name for name in names]


def run_code(code, **environment):
    """Run code in a Python of its own and return its stderr, because a kernel is chosen once in a process."""
    words, environment = [sys.executable, "-W", "ignore", "-c", code], {**os.environ, **environment}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def compiled_for_hopper(kernel, types, constants, attrs=None, **options):
    """Compile a Triton kernel for a GPU that is not here, and return its assembly."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    assert assembly["cubin"]
    return assembly
