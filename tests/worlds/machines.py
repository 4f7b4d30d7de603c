"""Give a test machines on this one, each with its name, network, mounts and process ids. They need root."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from gptscale.common.process.fork_server import die_with_parent

NETWORK = "10.77.0."
HELD = Path(__file__).with_name("held")
SLURM = ("slurmctld", "slurmd", "munged", "sbatch")
# Variables of a job or of an earlier world would change the run.
FOREIGN = ("SLURM", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "TORCHELASTIC", "GPTSCALE_START", "PYTEST")


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = 300.0) -> Any:
    """Wait until `condition` returns something true, and return it. Fail after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: nothing came of it in {limit_s:.0f} s"
        time.sleep(0.1)
    return value


class Machine:
    """A host, as far as a process in it can tell. It ends, with all that runs on it, by `die` or with the test's process."""

    def __init__(self, name: str, number: int, hosts: Path) -> None:
        self.name, self.address, self.hosts, self.number = name, f"{NETWORK}{number}", hosts, number
        # A test may put others before Slurm's programs (`programs`).
        self.path = os.environ["PATH"]
        self.switch: Machine | None = None
        self.start()

    def start(self) -> None:
        """Switch it on, with the wire that it had."""
        own = f"hostname {self.name} && mount --bind {self.hosts} /etc/hosts && ip link set lo up"
        first = f"{own} && echo up && sleep inf & wait"
        namespaces = ["--mount", "--uts", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        command, null = ["unshare", *namespaces, "bash", "-c", first], subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=null, preexec_fn=die_with_parent)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"up\n":
            pytest.skip("namespaces cannot be made here")
        (self.pid,) = [child.pid for child in psutil.Process(self._process.pid).children()]
        if self.switch is not None:
            self.connect(self.switch)

    def connect(self, switch: Machine) -> None:
        """Give it its address, on a wire to `switch`, which has a bridge."""
        self.switch = switch
        wire = f"wire{self.number}"
        # In the network of the switch alone: the process id of this machine is one of this process's numbers.
        veth = f"ip link add {wire} type veth peer name eth0 netns {self.pid}".split()
        subprocess.run(["nsenter", "-t", str(switch.pid), "-n", *veth], check=True)
        switch.ok("ip", "link", "set", wire, "master", "bridge", "up")
        self.ok("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.ok("ip", "link", "set", "eth0", "up")

    def command(self, *words: Any, folder: str | None = None) -> list[str]:
        """Return the words that start a program on this machine, by default in this process's folder."""
        inside = ["-t", str(self.pid), "-m", "-u", "-n", "-p", f"--wd={folder or os.getcwd()}"]
        return ["nsenter", *inside, "--", *map(str, words)]

    def run(self, *words: Any, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program on this machine to its end."""
        environment = self._environment(variables)
        return subprocess.run(
            self.command(*words), env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def ok(self, *words: Any, **variables: str) -> str:
        """Run a program that must end well, and return what it printed."""
        ended = self.run(*words, **variables)
        assert ended.returncode == 0, f"{words}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"
        return ended.stdout

    def begin(self, *words: Any, log: IO[Any] | int, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on this machine, whose output goes to `log`."""
        environment = self._environment(variables)
        return subprocess.Popen(
            self.command(*words), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

    def is_on(self) -> bool:
        """Return whether it was switched on and has not died."""
        return self._process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks of runs that run on this machine."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if is_here and "gptscale.recipes" in process.cmdline() and "RANK" in process.environ():
                    found.append(process)
        return found

    def die(self) -> None:
        """Switch it off: every process on it ends by SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return own | {"OMP_NUM_THREADS": "1", "PATH": self.path, **variables}


def held(folder: Path, *tails: str) -> dict[str, str]:
    """Return variables with which rank 0 stops itself, once each, before it opens or renames files whose paths end so."""
    path = f"{HELD}:{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "GPTSCALE_TEST_HELD": ":".join([str(folder), *tails])}


def wait_until_held(*machines: Machine) -> psutil.Process:
    """Return the rank on some machines that has stopped itself, once it has."""
    return wait_for(
        lambda: next(filter(_stands, chain(*(m.ranks() for m in machines))), None), "the rank that stops itself"
    )


def suspend(ranks: Sequence[psutil.Process]) -> None:
    """Stop processes, and return when they stand. Until then SIGTERM, whose number is lower, would be taken before SIGSTOP."""
    for rank in ranks:
        rank.suspend()
    wait_for(lambda: all(map(_stands, ranks)), "the ranks to stand")


def _stands(rank: psutil.Process) -> bool:
    """Return whether all threads of a process stand. One that does not yet would take the next signal."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        threads = [path.read_text() for path in Path(f"/proc/{rank.pid}/task").glob("*/stat")]
        # One that has ended has none.
        return bool(threads) and all(") T " in thread for thread in threads)
    return False


@contextmanager
def paused(*machines: Machine) -> Iterator[list[psutil.Process]]:
    """Stop the ranks on some machines while the body runs."""
    ranks = [rank for machine in machines for rank in machine.ranks()]
    assert len(ranks) >= len(machines)
    suspend(ranks)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.resume()


@contextmanager
def standing_still(*machines: Machine) -> Iterator[None]:
    """Stop the ranks on some machines while the body runs, and until each has been sent SIGTERM, which waits for it."""
    with paused(*machines) as ranks:
        yield
        wait_for(lambda: all(map(has_sigterm, ranks)), "SIGTERM to the ranks")


def has_sigterm(process: psutil.Process) -> bool:
    """Return whether SIGTERM waits for a process that stands still."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (pending,) = (line.split()[1] for line in lines if line.startswith("ShdPnd"))
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[dict[str, Machine]]:
    """Switch on machines with these names, which know each other by name. The first is also their switch."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs root and the programs unshare, nsenter and ip")
    hosts = folder / "hosts"
    lines = [f"{NETWORK}{i} {name}" for i, name in enumerate(names, 1)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    made: dict[str, Machine] = {}
    try:
        for i, name in enumerate(names, 1):
            made[name] = Machine(name, i, hosts)
        switch, *others = made.values()
        if switch.run("ip", "link", "add", "bridge", "type", "bridge").returncode:
            pytest.skip("the kernel has no bridge")
        switch.ok("ip", "address", "add", f"{switch.address}/24", "dev", "bridge")
        switch.ok("ip", "link", "set", "bridge", "up")
        for machine in others:
            machine.connect(switch)
        yield made
    finally:
        for machine in made.values():
            if machine.is_on():
                machine.die()


class SlurmCluster:
    """A controller on the machine `login`, and a slurmd on each of the others."""

    def __init__(self, folder: Path, made: dict[str, Machine]) -> None:
        self.folder, self.machines, self.login = folder, made, made["login"]
        self.nodes = [name for name in made if name != "login"]
        (folder / "state").mkdir()
        nodes = [f"NodeName={n} NodeAddr={made[n].address} CPUs=4 RealMemory=1000 State=UNKNOWN" for n in self.nodes]
        words = {"address": self.login.address, "folder": folder, "nodes": "\n".join(nodes)}
        text = Path(__file__).with_name("slurm.conf").read_text().format(**words)
        (folder / "slurm.conf").write_text(text)
        unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n" if unified else "CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{own}={folder}/munge.{own.removesuffix('-file')}" for own in ("socket", "pid-file", "seed-file")]
        self._daemon(self.login, "munged", "--foreground", "--force", f"--key-file={key}", *files)
        wait_for((folder / "munge.socket").exists, "munged")
        self._daemon(self.login, "slurmctld", "-D")
        for name in self.nodes:
            self.start_slurmd(name)
        wait_for(self.is_idle, "the nodes")

    def start_slurmd(self, name: str) -> None:
        """Start the daemon of a node."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._daemon(self.machines[name], "slurmd", "-D", "-N", name)

    def _daemon(self, machine: Machine, *words: str) -> None:
        with (self.folder / f"{words[0]}-{machine.name}.log").open("ab") as log:
            machine.begin(*words, log=log, SLURM_CONF=f"{self.folder}/slurm.conf")

    def programs(self) -> Path:
        """Return a folder of programs that stand for Slurm's, for a process that is not on the login machine."""
        folder = self.folder / "bin"
        folder.mkdir()
        for name in ("sbatch", "squeue", "scontrol", "scancel"):
            words = " ".join(w if "PWD" in w else shlex.quote(w) for w in self.login.command(name, folder='"$PWD"'))
            # Jobs inherit the variables, and must find Slurm's own programs.
            variables = f"PATH={shlex.quote(os.environ['PATH'])} SLURM_CONF={self.folder}/slurm.conf"
            (folder / name).write_text(f'#!/bin/sh\n{variables} exec {words} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    def ok(self, *words: Any, **variables: str) -> str:
        """Run a program on the login machine, which must end well, and return what it printed."""
        return self.login.ok(*words, SLURM_CONF=f"{self.folder}/slurm.conf", **variables)

    def states(self) -> list[str]:
        """Return the state of each node, in their order."""
        ended = self.login.run("sinfo", "-h", "-N", "-o", "%T", SLURM_CONF=f"{self.folder}/slurm.conf")
        return ended.stdout.split()

    def is_idle(self, *nodes: str) -> bool:
        """Return whether these nodes, by default all, are up and have no job."""
        states = dict(zip(self.nodes, self.states(), strict=False))
        return all(states.get(name) == "idle" for name in nodes or self.nodes)

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job, by Slurm's own names of its fields."""
        words = self.ok("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, number: str, limit_s: float = 240.0) -> dict[str, str]:
        """Wait until a job has ended for good, and return what Slurm knows of it."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return wait_for(lambda: (job := self.job(number))["JobState"] in ends and job, f"job {number}", limit_s)


@contextmanager
def slurm_cluster(folder: Path, nodes: Sequence[str] = ("n1", "n2", "n3", "n4")) -> Iterator[SlurmCluster]:
    """Bring up a Slurm cluster in `folder`, and end it with all that runs on it."""
    if lacking := [name for name in SLURM if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge")
    with machines(folder, "login", *nodes) as made:
        yield SlurmCluster(folder, made)
