"""The process of a warm parent, which forks a child for each request and reports how the child ended.

It imports what its children need and does nothing else: no thread, no tensor, no CUDA call. So a child finds the memory of
a process that has just imported its modules, and nothing that an earlier child did. The other side is warm_parent.py.

A request is a file in memory with JSON, because an environment may be larger than a message, with file descriptors. Three kinds:
  {"target", "words", "env", "cwd", "umask"} and stdin, stdout, stderr, report: run a program; the answer is its pid, and
      its exit status is written to `report` when it ends.
  {"imports"} and a socket: fork another server that imports these modules and listens on that socket. No answer.
  {"ready"}: answer with 0. Requests wait until all modules are imported, and so does the answer.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

from gptscale.common.process.environments import name_user

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15

TO_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_is_fresh = False
# How many folders Python itself put first on sys.path: that of the script, or the current one after -m.
_n_first = 0 if sys.flags.safe_path else 1


def declare_fresh() -> None:
    """Say that this process runs one program of ours, so that nothing has used torch before the program began."""
    global _is_fresh
    _is_fresh = True


def is_fresh() -> bool:
    """Return whether nothing has used torch in this process before its program began."""
    return _is_fresh


def leave_current_folder(target: str = "gptscale.") -> None:
    """Put first on sys.path what belongs there for a program: its own folder for a file, the current one for a module.

    For a module of ours it is the folder of the environment's scripts, as in the command itself: what happens to lie in the
    current folder must not be imported.
    """
    global _n_first
    folder = os.getcwd() if not target.startswith("gptscale.") else os.path.dirname(sys.executable)
    sys.path[:_n_first] = [os.path.dirname(os.path.abspath(target)) if target.endswith(".py") else folder]
    _n_first = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def import_without_collection(names: Iterable[str]) -> None:
    """Import the modules while the garbage collector pauses, and take what they made out of its reach.

    Imports leave next to no garbage, and collections walk all that was imported so far: a tenth and more of the time. A child's
    collections then do not touch, and so do not copy, the pages of what is imported here.
    """
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def serve(connection: socket.socket, imports: Iterable[str]) -> NoReturn:
    """Import the modules, then answer requests until the other side closes the connection."""
    # A terminal's Ctrl-C and its end, and a scheduler's SIGTERM, go to the whole group. The children act on them. The server goes
    # on, because its end would kill them.
    signal.pthread_sigmask(signal.SIG_BLOCK, TO_THE_GROUP)
    leave_current_folder()
    name_user()
    import_without_collection(imports)
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    reports: dict[int, int] = {}
    servers: list[int] = []
    own = [connection.fileno(), awake, wake]
    while True:
        readable, _, _ = select.select([connection.fileno(), awake], [], [])
        if awake in readable:
            os.read(awake, 4096)
            _report_ended(reports)
        if connection.fileno() not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(connection, 1, 5)
        if not message:
            _end(reports, servers)
        with os.fdopen(descriptors.pop(0), "rb") as file:
            file.seek(0)
            request = json.load(file)
        if "ready" in request:
            connection.send(b"0")
            continue
        try:
            pid = _fork(request, descriptors, [*own, *reports.values()])
        except BlockingIOError:
            # The system allows no more processes. No child has this number.
            pid = 0
        *others, last = descriptors
        for descriptor in others:
            os.close(descriptor)
        if "target" in request:
            reports[pid] = last
            connection.send(json.dumps(pid).encode())
            if not pid:
                os.close(reports.pop(pid))
        else:
            servers.append(pid)
            os.close(last)


def _end(reports: dict[int, int], servers: list[int]) -> NoReturn:
    """End this server: programs that still run are killed by its end, and servers forked from it end by themselves."""
    for pid in [] if reports else servers:
        # Wait for it, so that its processor time counts as that of this process's children.
        with contextlib.suppress(ChildProcessError):
            # It may have ended long ago.
            os.waitpid(pid, 0)
    os._exit(0)


def _report_ended(reports: dict[int, int]) -> None:
    """Write the exit status of each child that has ended to its pipe."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in reports:
            # This is a program, and not a server that was forked here.
            report = reports.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                # Nobody may wait for it any more.
                os.write(report, json.dumps(os.waitstatus_to_exitcode(status)).encode())
            os.close(report)


def _fork(request: dict[str, Any], descriptors: list[int], close: list[int]) -> int:
    """Fork a child that carries out the request, and return its process id."""
    parent = os.getpid()
    # Signals of the group are blocked: one that comes before the child has its own handlers waits until it has.
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent()
        if os.getppid() != parent:
            # The parent ended before the kernel knew that this process dies with it.
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for descriptor in close:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if "imports" in request:
            serve(socket.socket(fileno=descriptors[0]), request["imports"])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_THE_GROUP)
        os.close(descriptors.pop())
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        status = run_program(request)
    except KeyboardInterrupt:
        # The process ends as one that the signal has killed, whenever the signal comes.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_program(request: dict[str, Any]) -> int:
    """Run the program as the interpreter would run it, and return its exit status."""
    declare_fresh()
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    now = os.environ.get("OMP_NUM_THREADS")
    if now != threads and "torch" in sys.modules:
        # As many as torch would read there if it were loaded now.
        sys.modules["torch"].set_num_threads(int(now) if now else len(os.sched_getaffinity(0)))
    target = request["target"]
    # ps shows the command line of the parent for all its children, so each has a name: its rank, or its program.
    rank = request["env"].get("RANK")
    name = f"rank {rank}" if rank else target.rpartition(".")[2]
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
    sys.argv = [target, *request["words"]]
    leave_current_folder(target)
    status: object = 0
    try:
        if target.endswith(".py"):
            runpy.run_path(target, run_name="__main__")
        else:
            if not hasattr(sys.modules.get(target), "__path__"):
                # It is no module yet, but the __main__ of a package. It runs under that name, as after python -m.
                sys.modules.pop(target, None)
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc()
        status = 1
    # As the interpreter does: wait for threads that are no daemons, then call what was registered.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status or 0) & 0xFF


if __name__ == "__main__":
    # Under the module's own name, so that a program which imports it finds that it is fresh.
    from gptscale.common.process import fork_server

    fork_server.die_with_parent()
    fork_server.serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
