"""Start processes by forking them from a warm parent, which has imported torch.

Python and torch take some seconds of a core to start, in every rank of every run. A warm parent pays them once and then
forks each process in milliseconds (fork_server.py). Ranks that use CUDA are started afresh: a CUDA context does not survive
a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gptscale.common.errors import GptscaleError
from gptscale.common.process import environments
from gptscale.common.process.fork_server import die_with_parent, import_without_collection, is_fresh, serve
from gptscale.common.process.program import Program

# Variables that libraries read when they are loaded. A program with other values than the warm parent's is started afresh.
READ_WHEN_LOADED = tuple(
    "PYTHON LD_ GLIBC_ MALLOC_ OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ ONEDNN_ DNNL_ ATEN_ TORCH PYTORCH TRITON CUDA NVIDIA NCCL "
    "DS_ HF_".split()
)
# Variables with such a name that do not matter: they are read later, or the child tells torch, or libraries set them.
READ_LATER = ("OMP_NUM_THREADS", "TORCHELASTIC_", "PYTHONSAFEPATH")
SET_WHEN_LOADED = "TORCHINDUCTOR_CACHE_DIR PYTORCH_NVML_BASED_CUDA_CHECK KMP_INIT_AT_FORK KMP_DUPLICATE_LIB_OK".split()
# Imports of nearly every program of ours. torch.optim imports Dynamo at its first step.
COMMON_IMPORTS = ("torch", "torch.distributed", "torch._dynamo")


class ForkedProcess:
    """A process that a warm parent forked, with the methods of subprocess.Popen."""

    def __init__(self, pid: int, report: int) -> None:
        self.pid, self._report = pid, report
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs. A signal is a negative status."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        status = self._read(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process unless it has ended."""
        if self.poll() is None:
            # Its parent may have waited for it just now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            status = os.read(self._report, 64)
            os.close(self._report)
            # Without a status the parent has died, and its children with it.
            self.returncode = json.loads(status) if status else -signal.SIGKILL
        return self.returncode


# A process that this one started, in either way.
Process = ForkedProcess | subprocess.Popen[bytes]


class WarmParent:
    """A process that imports modules once and forks the programs asked of it. It ends with the process that made it."""

    def __init__(self, connection: socket.socket, environ: Mapping[str, str], wait: Callable[[], object]) -> None:
        self._connection, self._environ, self._wait = connection, dict(environ), wait
        # Threads may ask at once, and each needs its own answer.
        self._lock = threading.Lock()

    @classmethod
    def fork(cls, imports: tuple[str, ...] = ()) -> WarmParent:
        """Fork one from this process, which must have no other thread and must not have used torch yet."""
        connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                connection.close()
                serve(child_end, [*COMMON_IMPORTS, *imports])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        child_end.close()
        return cls(connection, os.environ, lambda: os.waitpid(pid, 0))

    @classmethod
    def start(cls, environment: str = "", more: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> WarmParent:
        """Start one afresh that imports `more` too, with the interpreter of `environment` and the variables `env`."""
        connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = ["-Pm", "gptscale.common.process.fork_server", str(child_end.fileno()), *COMMON_IMPORTS, *more]
        command = [environments.python(environment), *words]
        process = subprocess.Popen(command, env=env, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL)
        child_end.close()
        return cls(connection, env, process.wait)

    def with_imports(self, imports: tuple[str, ...]) -> WarmParent:
        """Fork a warm parent from this one that imports more modules, and do not wait for it."""
        connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._send({"imports": imports}, [child_end.fileno()])
        return WarmParent(connection, self._environ, lambda: None)

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Whether a program with these environment variables may be forked: libraries have read the same ones."""
        changed = {name for name, value in {*environ.items()} ^ {*self._environ.items()}}
        return not any(
            name.startswith(READ_WHEN_LOADED) and not name.startswith((*READ_LATER, *SET_WHEN_LOADED))
            for name in changed
        )

    def run(
        self, program: Program, environ: Mapping[str, str], stdout: int | None = None, stderr: int | None = None
    ) -> ForkedProcess:
        """Fork the program. Its stdin is empty, and its stdout and stderr are this process's unless given."""
        report, its_report = os.pipe()
        with self._lock, open(os.devnull) as empty:
            umask = os.umask(0)
            os.umask(umask)
            request: dict[str, object] = {"target": program.target, "words": program.words, "env": dict(environ)}
            request |= {"cwd": os.getcwd(), "umask": umask}
            streams = [empty.fileno(), 1 if stdout is None else stdout, 2 if stderr is None else stderr]
            try:
                pid = self._ask(request, [*streams, its_report])
            finally:
                os.close(its_report)
        if not pid:
            os.close(report)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return ForkedProcess(pid, report)

    def wait_until_ready(self) -> None:
        """Wait until it has imported everything. One that could not is told when a program is asked of it."""
        with self._lock, contextlib.suppress(GptscaleError):
            self._ask({"ready": True}, [])

    def close(self) -> None:
        """End the warm parent and all that it forked."""
        self._connection.close()
        self._wait()

    def _ask(self, request: dict[str, object], descriptors: list[int]) -> int:
        answer = b""
        with contextlib.suppress(ConnectionError):
            self._send(request, descriptors)
            answer = self._connection.recv(64)
        if not answer:
            what = "the process that would start the ranks ended"
            raise GptscaleError(what, "while it imported their libraries", "see its own message above")
        return int(json.loads(answer))

    def _send(self, request: dict[str, object], descriptors: list[int]) -> None:
        with os.fdopen(os.memfd_create("request"), "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._connection, [b"1"], [file.fileno(), *descriptors])


_parents: dict[tuple[str, tuple[str, ...]], WarmParent] = {}
_making = threading.Lock()


def _end_warm_parents() -> None:
    """End them, those with more imports first, and wait: then their processor time counts as this process's children's."""
    while _parents:
        _parents.popitem()[1].close()
    # Objects that imports froze would still be there at the end, and Triton of torch 2.15 prints 40 lines about them.
    gc.unfreeze()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Act on Ctrl-C and SIGTERM at the end of the block.

    Within the import of torch their exception may be swallowed, and leaves a numpy that is imported by half.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_warm_parent(device: str, imports: Sequence[str], program_imports: tuple[str, ...] = ()) -> None:
    """Import torch and the modules `imports`, and fork this process's warm parent before anything has used them.

    A command that will start ranks on CPUs pays the imports once for them and itself. Where the ranks will use CUDA, or torch may
    have been used already, as in a test or a notebook, it does nothing: the first program to be forked starts a warm parent.

    program_imports: the `imports` of the one program that will be forked, if there is only one.
    """
    if ("torch" in sys.modules and not is_fresh()) or _parents:
        return
    with _signals_wait():
        import_without_collection(["torch"])
    if device != "cpu" and sys.modules["torch"].cuda.is_available():
        return
    with _signals_wait():
        import_without_collection(imports)
    _parents["", program_imports] = WarmParent.fork(program_imports)
    atexit.register(_end_warm_parents)


def make_warm_parents(kinds: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Make the warm parents of the programs that will run one after another: (environment, imports) of each.

    They import side by side while this process goes on. Call `wait_for_warm_parents` before the first program is measured. Does
    nothing where `begin_warm_parent` did nothing.
    """
    if ("", ()) in _parents:
        # An environment beside this one takes longest: it has torch to import, too.
        for environment, imports in sorted(kinds, reverse=True):
            warm_parent_of(environment, imports, os.environ)


def wait_for_warm_parents() -> None:
    """Wait until each has imported all that it will."""
    for parent in _parents.values():
        parent.wait_until_ready()


def warm_parent_of(environment: str, imports: tuple[str, ...], environ: Mapping[str, str]) -> WarmParent | None:
    """Return the warm parent that can fork a program, after making it if there is none. None if no parent can."""
    environment = "" if environments.is_inside(environment) else environment
    # Threads that ask at once get the same one: a second would end the programs of the first.
    with _making:
        if (base := _parents.get((environment, ()))) is None and (environment, imports) not in _parents:
            base = _parents[environment, ()] = WarmParent.start(environment)
            atexit.register(_end_warm_parents)
        if (environment, imports) not in _parents and base is not None and base.fits(environ):
            _parents[environment, imports] = base.with_imports(imports)
        parent = _parents.get((environment, imports))
    return parent if parent is not None and parent.fits(environ) else None


def start_process(
    program: Program,
    environ: Mapping[str, str],
    *,
    fork: bool = True,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Process:
    """Start a program that dies with this process, forked from a warm parent if `fork` allows it."""
    if fork and (parent := warm_parent_of(program.environment, program.imports, environ)) is not None:
        return parent.run(program, environ, stdout, stderr)
    command, stdin = program.command, subprocess.DEVNULL
    return subprocess.Popen(
        command, env=dict(environ), stdin=stdin, stdout=stdout, stderr=stderr, preexec_fn=die_with_parent
    )
