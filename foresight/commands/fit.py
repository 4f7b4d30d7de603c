"""`gptscale fit`: which split of a model of one's own fits and is fastest, the proof, and the program."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.foresight.fit.options import FitOptions

ABOUT = "A model of your own: which split of it fits and is fastest, the proof that it is right, and its program."


def main(argv: Sequence[str]) -> int:
    """Try each split, print the table, and write the program. Return 1 if nothing fits."""
    options = parse(FitOptions, argv, prog="gptscale fit", about=ABOUT)
    # After the options are parsed, because they import torch.
    from gptscale.foresight.fit import answer, trials
    from gptscale.foresight.fit.splits import splits
    from gptscale.foresight.fit.subject import subject_of
    from gptscale.foresight.fit.write import program
    from gptscale.foresight.plan.question import gpu_cluster
    from gptscale.foresight.simulate.interpreters import prepare_mock
    from gptscale.results.render import console

    cluster = gpu_cluster(options.device_kind, options.nodes, options.gpus // options.nodes, options.link)
    known = splits(options.gpus, cluster.per_node)
    if options.splits != "all":
        known = {name: known[name] for name in parse_names(options.splits, known, "split", "--splits")}
    with tempfile.TemporaryDirectory(prefix="gptscale-fit-") as name, console(stderr=True).status("building") as status:
        folder = Path(name)
        subject = subject_of(options.model, options.batch, options.loss, options.seq_len, folder, options.small)
        # Where the user's modules are.
        named = (spec.partition(":")[0] for spec in (options.model, options.batch, options.loss, options.small))
        where = dict.fromkeys(str(Path(name).parent.absolute()) for name in named if name.endswith(".py"))
        path = ":".join(filter(None, (*where, os.getcwd(), os.environ.get("PYTHONPATH"))))
        prepare_mock()
        with patch.dict(os.environ, PYTHONPATH=path):
            rows = trials.try_all(trials.Trials(subject, cluster, folder, status.update), options, known)
    fitting = answer.show(subject, cluster, options, rows)
    if not fitting:
        return 1
    if options.row > len(fitting):
        raise ConfigError(f"the table has no row {options.row}", "in --row", f"use 1 to {len(fitting)}")
    if options.write is not None:
        row = fitting[options.row - 1]
        options.write.write_text(program(subject, row.split, row.choice, options.write.name))
        beside = {str(options.write.parent.absolute())}
        needs = f", with PYTHONPATH={':'.join(where)}" * bool({*where} - beside)
        print(f"file     {options.write}: {row.name}; start it as it says on top{needs}")
    return 0
