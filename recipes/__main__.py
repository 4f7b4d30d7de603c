"""Start any recipe by its name: `python -m gptscale.recipes NAME [options]`, or the same behind `torchrun ... -m`."""

import sys

from gptscale.common.process.fork_server import import_without_collection, leave_current_folder

if __name__ == "__main__":
    leave_current_folder()
    import_without_collection(["gptscale.launchers.run.worker"])
    from gptscale.launchers.run.worker import run_recipe

    name, *options = sys.argv[1:] or [""]
    run_recipe(name, options)
