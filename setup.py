"""All metadata is in setup.cfg. This compiles the operators while the package is installed, if torch and a compiler are there.

They are not in an isolated build (pip's default), and need not be: then the operators are compiled at their first use.
GPTSCALE_SKIP_KERNELS=1 leaves them to that as well.
"""

import os
import runpy
import shutil
import sys

from setuptools import setup


def kernels():
    """Arguments for setup() that build the extension; none where it cannot be built."""
    if os.environ.get("GPTSCALE_SKIP_KERNELS") or shutil.which(os.environ.get("CXX", "c++")) is None:
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}

    class Build(BuildExtension):
        """A compile that fails is said, and does not keep the package from being installed."""

        def run(self):
            try:
                super().run()
            except Exception as error:  # ninja's failures come as RuntimeError, others as the compiler's own
                print(f"gptscale: operators not compiled ahead of time: {error}", file=sys.stderr)
                self.extensions = []

    described = runpy.run_path("ops/build/sources.py")
    files = [f"ops/csrc/{path.name}" for path in described["sources"]()]
    name = f"gptscale.ops._kernels_{described['fingerprint'](torch.__version__)}"
    extension = CppExtension(name, files, extra_compile_args=described["FLAGS"], extra_link_args=["-fopenmp"])
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


setup(**kernels())
