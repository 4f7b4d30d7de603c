"""The warm parent: what a forked program sees, what it leaves behind, and what becomes of it when others end."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from worlds import Started, gptscale, ok

from gptscale.common.errors import GptscaleError
from gptscale.common.process import warm_parent
from gptscale.common.process.environments import is_inside
from gptscale.common.process.program import Program
from gptscale.common.process.task import run_captured
from gptscale.common.process.warm_parent import WarmParent, start_process, warm_parent_of


def program(folder, code, *words):
    (folder / "program.py").write_text(code)
    return Program(str(folder / "program.py"), words)


def outcome(folder, code, *words, timeout=400, **variables):
    ended = run_captured(program(folder, code, *words), timeout=timeout, environ={**os.environ, **variables})
    return ended.returncode, ended.stdout, ended.stderr


def test_a_program_is_forked_with_torch_its_own_words_and_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = (
        "import os, sys\n"
        "print('torch' in sys.modules, sys.argv[1:], os.getcwd(), os.environ['MINE'], os.environ.get('HOME'), sys.stdin.read())\n"
        "print(__name__, sys.path[0], file=sys.stderr)"
    )
    environ = {k: v for k, v in os.environ.items() if k != "HOME"} | {"MINE": "a b"}
    ended = run_captured(program(tmp_path, code, "x", "y z"), timeout=400, environ=environ)
    assert (ended.returncode, ended.stdout) == (0, f"True ['x', 'y z'] {tmp_path} a b None \n")
    assert ended.stderr == f"__main__ {tmp_path}\n"


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no such thing')", 1, "no such thing\n"),
        ("import atexit, sys; atexit.register(lambda: print('last', file=sys.stderr))", 0, "last\n"),
        ("import os; os._exit(9)", 9, ""),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, ""),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_it_ends_as_under_an_interpreter_of_its_own(tmp_path, code, status, says):
    found, out, err = outcome(tmp_path, code)
    assert (found, out, err.splitlines()[-1:]) == (status, "", says.splitlines())
    command = [sys.executable, str(tmp_path / "program.py")]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert alone.returncode == status
    assert says in alone.stderr


@pytest.mark.promise("C19")
def test_an_environment_larger_than_a_message_reaches_the_program(tmp_path):
    """300 KB, as a cluster's modules make them."""
    big = {f"BIG{i}": "x" * 100_000 for i in range(3)}
    assert outcome(tmp_path, "import os; print(sum(map(len, os.environ.values())) > 300_000)", **big)[1] == "True\n"


def test_variables_that_libraries_read_when_loaded_start_a_program_afresh(tmp_path):
    code = "import sys; print('torch' in sys.modules)"
    assert outcome(tmp_path, code)[1] == "True\n"
    assert outcome(tmp_path, code, KMP_BLOCKTIME="0")[1] == "False\n"
    assert outcome(tmp_path, code, PYTHONWARNINGS="ignore")[1] == "False\n"
    # torch._dynamo sets this one when it is loaded, in this process too.
    assert outcome(tmp_path, code, TORCHINDUCTOR_CACHE_DIR="/tmp/another")[1] == "True\n"


def test_threads_are_those_of_the_programs_environment(tmp_path):
    code = "import torch; print(torch.get_num_threads())"
    for threads in "13":
        assert outcome(tmp_path, code, OMP_NUM_THREADS=threads)[1] == f"{threads}\n"


def test_a_program_that_hangs_is_killed(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired) as hung:
        outcome(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)", timeout=15)
    assert not psutil.pid_exists(int(hung.value.stdout))


def test_nothing_is_left_for_the_next_program(tmp_path):
    code = (
        "import os, sys, torch, logging, warnings\n"
        "state = [torch.initial_seed(), torch.get_default_dtype(), torch.is_grad_enabled(), len(sys.modules), 'LEFT' in os.environ,\n"
        "         logging.getLogger().level, len(warnings.filters), len(os.listdir('/proc/self/fd'))]\n"
        "print(state)\n"
        "torch.manual_seed(5); torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False); import wave\n"
        "os.environ['LEFT'] = '1'; logging.getLogger().setLevel(10); warnings.simplefilter('ignore'); os.open('/dev/null', 0)"
    )
    first, second = outcome(tmp_path, code), outcome(tmp_path, code)
    assert first[0] == 0
    assert first == second


def test_a_signal_reaches_the_program_and_comes_late_to_one_that_has_ended(tmp_path):
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *a: sys.exit(75)); print('up', flush=True); signal.pause()"
    running = Started(program(tmp_path, code))
    assert running.stdout.readline() == "up\n"
    running.process.send_signal(signal.SIGTERM)
    assert running.ended()[0] == 75
    running.process.send_signal(signal.SIGTERM)
    assert running.process.poll() == 75


def test_a_parent_with_more_imports_is_made_at_once_and_can_be_waited_for(tmp_path, capfd):
    """Its imports are out of the garbage collector's reach. One that cannot import says why, and hurts no other."""
    code = "import gc, sys; sys.exit(not ('wave' in sys.modules and gc.isenabled() and gc.get_freeze_count() > 10**5))"
    parent = WarmParent.start()
    other, broken = parent.with_imports(("wave",)), parent.with_imports(("no_such_module",))
    for each in (parent, other, broken):
        each.wait_until_ready()
    assert other.run(program(tmp_path, code), os.environ).wait(400) == 0
    assert parent.run(program(tmp_path, code), os.environ).wait(400) == 1
    with pytest.raises(GptscaleError, match="ended, while it imported their libraries, see its own message above"):
        broken.run(program(tmp_path, code), os.environ)
    assert "No module named 'no_such_module'" in capfd.readouterr().err
    for each in (broken, other, parent):
        each.close()


def test_ctrl_c_of_a_terminal_ends_the_program_and_not_its_parent(tmp_path):
    """The signal may come as soon as the program has a process."""
    # One of its own, forked from the one of all tests, which spares it the import of torch.
    parent = warm_parent_of("", (), os.environ).with_imports(())
    process = parent.run(program(tmp_path, "import time; time.sleep(600)"), os.environ)
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert parent.run(program(tmp_path, "pass"), os.environ).wait(60) == 0
    parent.close()


def test_a_program_of_another_file_descriptor_cannot_hold_a_pipe_open(tmp_path):
    """The second program inherits nothing of the first's output, so the first's end is seen while the second runs."""
    holder = start_process(program(tmp_path, "import time; time.sleep(600)"), os.environ)
    assert outcome(tmp_path, "print('done')")[1] == "done\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)


RUN = "run ddp --nproc 2 --steps 4 --dropout 0.1 --data synthetic --no-tensorboard --device cpu".split()


def test_the_sixth_run_of_a_parent_has_the_bits_of_the_first(tmp_path):
    """Between them runs of other recipes, and one that fails."""
    if is_inside("colossalai"):
        pytest.skip("DDP takes options that its torch does not have")
    words = ["--steps", "2", "--device", "cpu", "--out", tmp_path]
    others = [["run", name, *words] for name in ("single", "zero1", "fsdp")]
    losses = set()
    for number in range(6):
        ok(*RUN, "--out", tmp_path, "--run-name", f"r{number}")
        lines = (tmp_path / "runs" / f"r{number}" / "steps.csv").read_text().splitlines()
        losses.add("\n".join(",".join(line.split(",")[:5]) for line in lines))
        if number < len(others):
            ok(*others[number])
        if number == 4:
            assert gptscale(*RUN, "--out", tmp_path, "--run-name", "r4").returncode == 2
    assert len(losses) == 1
    assert losses.pop().count("\n") == 4


def test_ctrl_c_within_the_import_of_torch_waits_for_its_end(monkeypatch):
    """The import of torch swallows an interrupt, and leaves a numpy that is imported by half."""
    imported = []

    def imports(names):
        signal.raise_signal(signal.SIGINT)
        imported.extend(names)

    monkeypatch.setattr(warm_parent, "import_without_collection", imports)
    monkeypatch.setattr(warm_parent, "is_fresh", lambda: True)
    monkeypatch.setattr(warm_parent, "_parents", {})
    # A shell that starts pytest in the background has it ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            warm_parent.begin_warm_parent("cpu", ["numpy"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert imported == ["torch"]
