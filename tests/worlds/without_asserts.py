"""Leave out the assert statements of test files: a plugin of pytest for the mock of CUDA, which computes no numbers.

python -O would leave out those of torch too, some of which the compiler reads, and would compile all that is imported anew.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader


class WithoutAsserts(SourceFileLoader):
    """Load a test file, from its source and never from the code that other sessions have left."""

    def get_code(self, fullname):
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=1)


class TestFiles:
    """Find test files, before the other finders do."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        spec = PathFinder.find_spec(fullname, path, target) if fullname.rpartition(".")[2].startswith("test_") else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = WithoutAsserts(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, TestFiles)
