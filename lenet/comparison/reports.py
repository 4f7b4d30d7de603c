"""Figures of the reports as they gave them (reports.json), beside which the studies print their own.

docs/lenet/README.md says what the exercise and the reports A to D are. Their hardware differs (2080 Ti, A100, H100), so that
seconds show the shape of a result and accuracies its level. Report D's MB are taken as MiB, and its 10 layers are one convolution
that is applied ten times. With two GPUs its accuracy is that of rank 0. The average memory of report C was typed in by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_reports = json.loads(Path(__file__).with_name("reports.json").read_text())
# Lines for the table of each study, by its columns' titles.
ROWS: dict[str, list[dict[str, str]]] = _reports["rows"]
# LeNet-5 on MNIST, 10 epochs: losses by epoch, accuracies in percent by class. adam: rate 0.001, losses of each 200 batches.
# The others: RandomAffine(15, .1, .8-1.2), batch 32. ddp: 8 processes with 4 workers each. dataparallel: on 8 GPUs.
RUNS: dict[str, dict[str, Any]] = _reports["runs"]
