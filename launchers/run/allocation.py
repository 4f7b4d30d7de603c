"""The nodes of a job of Slurm, and the options of sbatch in a command line. It imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_range

# Options of sbatch that are handed on as they are. All but the last few have a value.
SBATCH = frozenset(
    "account begin comment constraint cpus-per-gpu cpus-per-task dependency exclude gres hint job-name licenses mail-type "
    "mail-user mem mem-per-cpu mem-per-gpu network nice nodelist output partition priority qos reservation signal switches "
    "time time-min tmp wckey".split()
)
SBATCH_FLAGS = frozenset(["exclusive", "hold", "oversubscribe"])


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job."""

    nodes: int = 1
    """Nodes of the job."""
    min_nodes: int | None = None
    """Go on with as few nodes as this when others are gone: the same global batch, with more accumulation. Default --nodes."""
    gpus_per_node: int | None = None
    """GPUs on each node, and as many ranks. Without it the run is on CPUs."""

    def __post_init__(self) -> None:
        check_range(self.nodes, 1, 4096, "nodes")
        check_range(self.min_nodes, 1, self.nodes, "min_nodes")
        check_range(self.gpus_per_node, 1, 64, "gpus_per_node")


def split_sbatch(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of sbatch in a command line, each as one word `--name=value`, and the other words."""
    sbatch, others, words = [], [], iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in SBATCH | SBATCH_FLAGS:
            others.append(word)
            continue
        if name in SBATCH and not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"--{name} has no value", "in the options of sbatch", f"give --{name}=VALUE")
        if not value.isprintable():
            raise ConfigError(f"--{name} has a value of several lines", "in the options of sbatch", "give one line")
        sbatch.append(f"--{name}={value}" if value else f"--{name}")
    return sbatch, others
