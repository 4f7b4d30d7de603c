"""A process under the mock of CUDA that forks one process for each simulation, so that torch is imported once.

It reads a line for each (folder, environment, words) and answers with the exit status. The output is in the folder's `log`.
"""

import json
import os
import sys

from gptscale.launchers.run import simulated

for line in sys.stdin:
    folder, environment, words = json.loads(line)
    if not (pid := os.fork()):
        os.environ.update(environment)
        log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            status = simulated.main([folder, *words])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
