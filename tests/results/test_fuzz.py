"""Random damage in what runs leave: `compare` and a resumed run end in one line or go on, and never in a traceback.

GPTSCALE_FUZZ=5000 tries that many files in place of the few of a usual run, and GPTSCALE_FUZZ_FROM=1000 begins at that seed.
"""

import csv
import io
import math
import os
import random
import time

import pytest
from compared_runs import add_run
from damage import damaged, memory
from rich.console import Console

from gptscale.common.errors import ConfigError, StorageError
from gptscale.results.columns import STEP_COLUMNS, SUMMARY
from gptscale.results.comparison.groups import compare
from gptscale.results.comparison.page import page
from gptscale.results.comparison.picture import Drawing, steps_of
from gptscale.results.comparison.read import load
from gptscale.results.comparison.tables import as_csv, as_text, show
from gptscale.results.record.step_log import StepLog, totals
from gptscale.results.render import markdown, picture_bytes

N_FILES = int(os.environ.get("GPTSCALE_FUZZ", "60"))
FIRST = int(os.environ.get("GPTSCALE_FUZZ_FROM", "0"))
WORDS = [
    *(b"nan inf -inf 1e400 -1 1e18 99999999999999999999 0x10 1_0 true null {} [] $\\frac$ =1+1 ../../x ok oom".split()),
    *("\u202e \x1b[31m \u0663 é \U0001f600 <script> [bold] |".split()),
    b"",
    b"9" * 5000,
    b"[" * 5000,
    b"x" * 200_000,
]


def replace_word(rng, data):
    """Replace what stands between two separators."""
    parts = data.split(b",")
    word = rng.choice(WORDS)
    parts[rng.randrange(len(parts))] = word if isinstance(word, bytes) else word.encode()
    return b",".join(parts)


def harmed(rng, data):
    for _ in range(rng.choice((1, 1, 2, 5))):
        data = replace_word(rng, data) if rng.random() < 0.5 else damaged(data, rng)
    return data


def made(out):
    """Leave three runs, and return the files to damage."""
    figures = dict.fromkeys(SUMMARY.of_type(float), 1.0)
    works = {"single": {}, "ddp": {}, "fsdp": {"steps": 30}}
    names = [add_run(out, recipe, work=work, **figures) for recipe, work in works.items()]
    return [out / "summary.csv", *(out / "runs" / name / file for name in names for file in ("run.json", "steps.csv"))]


def compare_all(out, *, draw):
    comparison = compare(load([out]))
    for group in comparison.ranked:
        steps_of(group)
    if draw:
        picture_bytes(Drawing(comparison).figure())
    printed = io.StringIO()
    show(comparison, Console(width=100, file=printed, force_terminal=False))
    texts = [printed.getvalue(), as_csv(comparison).decode(), as_text(comparison, markdown), page(comparison, {})]
    assert all(c.isprintable() or c == "\n" for text in texts for c in text)
    assert "<script>" not in texts[2] + texts[3]


def resume_from(path):
    log = StepLog(path, after_step=10)
    log.append(dict.fromkeys(STEP_COLUMNS, 0.25) | {"step": 11})
    log.close()
    assert math.isfinite(totals(path)[2])
    header, *rows = csv.reader(io.StringIO(path.read_text()))
    assert header == list(STEP_COLUMNS)
    assert all(len(row) == len(header) and int(row[0]) <= 11 for row in rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.timeout(3600)
def test_random_damage_is_never_a_traceback(tmp_path):
    files = made(tmp_path)
    whole = {file: file.read_bytes() for file in files}
    slowest_s, before = 0.0, memory("VmHWM")
    for seed in range(FIRST, FIRST + N_FILES):
        rng = random.Random(seed)
        file = rng.choice(files)
        content = harmed(rng, whole[file])
        file.write_bytes(content)
        began = time.process_time()
        try:
            compare_all(tmp_path, draw=seed % 25 == 0)
        except ConfigError:
            # The header of the summary is damaged, so that nothing says what its columns are, or it is all that is left.
            assert file == files[0], seed
            header, _, rest = content.partition(b"\n")
            assert header != whole[file].partition(b"\n")[0] or b"\n" not in rest, seed
        except Exception as error:
            raise AssertionError(f"seed {seed}, {file.name}") from error
        if file.name == "steps.csv":
            try:
                resume_from(file)
            except StorageError:
                # The header is damaged, and may be that of a file with other columns.
                assert content.partition(b"\n")[0] != whole[file].partition(b"\n")[0], seed
            except Exception as error:
                raise AssertionError(f"seed {seed}, resumed") from error
        slowest_s = max(slowest_s, time.process_time() - began)
        file.write_bytes(whole[file])
    assert slowest_s < 5
    assert memory("VmHWM") - before < 2**30
