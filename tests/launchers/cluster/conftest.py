"""Fixtures of the tests on several machines, all of them on this one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, SlurmCluster, slurm_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm cluster of four nodes. A test that ends a node brings it back."""
    with slurm_cluster(tmp_path_factory.mktemp("cluster")) as made:
        made.programs()
        yield made


@pytest.fixture
def slurm(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SlurmCluster]:
    """The cluster, whose sbatch is also this process's, in an empty working folder."""
    monkeypatch.setenv("PATH", f"{cluster.folder}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    yield cluster
    # Shown with a test that failed, with what waits on each node.
    for machine in filter(Machine.is_on, cluster.machines.values()):
        print(machine.name, machine.run("ps", "-eo", "pid,stat,wchan:20,etimes,args").stdout, sep="\n")
    for log in (*tmp_path.rglob("jobs/*.log"), *cluster.folder.glob("slurm*.log")):
        print(f"{log.name}:", *log.read_text(errors="replace").splitlines()[-40:], sep="\n")
