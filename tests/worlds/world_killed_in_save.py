"""Run as ranks: a checkpoint at step 2, then one rank is killed while all save at step 4.

usage: world_killed_in_save.py OUT writing|committing|committed [behind]

writing: rank 1 before its file is flushed, when rank 0 has written its own. committing: rank 0 before the folder has its name,
when rank 1 is done. committed: rank 0 right after it. behind: the save goes on behind the training.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from holder import FACTS, Holder

from gptscale.common.checkpoint.background import BackgroundSave
from gptscale.common.checkpoint.writer import save
from gptscale.common.process.world import World, process_group


def main(folder: Path, moment: str, behind: bool) -> None:
    torch.set_num_threads(1)
    world = World.from_environment("cpu", 60.0)
    rename = os.rename

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed_in_fsync(descriptor: int) -> None:
        deadline = time.monotonic() + 60
        while not list(folder.glob(".tmp-step-4-*/rank-00000-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        die()

    def killed_in_rename(source: Path, target: Path) -> None:
        if moment == "committed":
            rename(source, target)
        die()

    with process_group(world):
        save(Holder(), folder, 2, FACTS)
        if moment == "writing" and world.rank == 1:
            os.fsync = killed_in_fsync
        if moment != "writing" and world.rank == 0:
            os.rename = killed_in_rename
        if behind:
            background = BackgroundSave()
            background.begin(Holder(), folder, 4, FACTS, keep=2)
            background.finish()
        else:
            save(Holder(), folder, 4, FACTS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "behind" in sys.argv)
    os._exit(0)
