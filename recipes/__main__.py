"""Start any recipe by its name: `python -m gptscale.recipes NAME [options]`, or the same behind `torchrun ... -m`."""

import sys

if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    name, *options = sys.argv[1:] or [""]
    run_recipe(name, options)
