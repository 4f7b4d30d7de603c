"""Compile the operators while the package is installed, if torch and a compiler are there.

All metadata but the long description is in setup.cfg. In an isolated build, which is pip's default, torch is not there. Then the
operators are compiled at their first use, and so they are with GPTSCALE_SKIP_KERNELS=1.
"""

import configparser
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup

# The folders that are the package. benchmarks/ and tools/ are run from the checkout.
ROOMS = ("common", "foresight", "launchers", "lenet", "ops", "recipes", "results")


def kernels():
    """Return the arguments for setup() that build the extension, or none where it cannot be built."""
    if os.environ.get("GPTSCALE_SKIP_KERNELS") or shutil.which(os.environ.get("CXX", "c++")) is None:
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}

    class Build(BuildExtension):
        """A build step that reports a failed compile and lets the install go on without it."""

        def run(self):
            try:
                super().run()
            # A failure of ninja is a RuntimeError. Other failures have the exceptions of their compiler.
            except Exception as error:
                print(f"gptscale: operators not compiled ahead of time: {error}", file=sys.stderr)
                self.extensions = []

    build = runpy.run_path("ops/build/sources.py")
    files = [f"ops/csrc/{path.name}" for path in build["sources"]()]
    name = f"gptscale.ops._kernels_{build['fingerprint'](torch.__version__)}"
    # Python's own flags ask for debug information, which would take longer to write than the code.
    flags = [*build["FLAGS"], "-g0"]
    extension = CppExtension(name, files, extra_compile_args=flags, extra_link_args=["-fopenmp"])
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


def readme():
    """Return the README for a package index, where a link to a file leads to the project's home, or becomes plain words."""
    cfg = configparser.ConfigParser()
    cfg.read("setup.cfg")
    home = cfg["metadata"].get("url")

    def link(match):
        image, words, path = match.groups()
        if home:
            return f"{image}[{words}]({home}/{'raw' if image else 'blob'}/main/{path})"
        return "" if image else words

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?://)([^)]+)\)", link, Path("README.md").read_text(encoding="utf-8"))


found = find_packages(include=[name for room in ROOMS for name in (room, f"{room}.*")])
setup(packages=[f"gptscale.{name}" for name in found], long_description=readme(), **kernels())
