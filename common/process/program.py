"""What a process of ours executes, apart from how it is started."""

from __future__ import annotations

from dataclasses import dataclass

from gptscale.common.process import environments


@dataclass(frozen=True)
class Program:
    """A Python program: a module (`python -m target words`) or a file (`python target words`).

    environment: the one that it needs beside the running one, see environments.py.
    imports: modules that it will import anyway; a warm parent imports them once for all that ask for the same ones.
    """

    target: str
    words: tuple[str, ...] = ()
    environment: str = ""
    imports: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether it is a module of this package, which needs nothing of the current folder."""
        return self.target.startswith("gptscale.")

    @property
    def command(self) -> list[str]:
        """The command line that starts it afresh."""
        target = [] if self.target.endswith(".py") else ["-Pm" if self.is_ours else "-m"]
        return [environments.python(self.environment), "-u", *target, self.target, *self.words]
