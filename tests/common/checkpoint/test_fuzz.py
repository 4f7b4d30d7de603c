"""Damage of every kind: a checkpoint that was changed is refused in a line, or gives the tensors that were saved.

A few hundred changes run as a test. More by hand, with a line of figures for each kind of change:

    GPTSCALE_MUTATIONS=10000 pytest -s tests/common/checkpoint/test_fuzz.py
"""

import hashlib
import json
import os
import random
import shutil
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from damage import change, damaged, memory
from holder import FACTS, Holder, make_version_1, reseal

from gptscale.common.checkpoint import writer as checkpoint_writer
from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import save
from gptscale.common.errors import CheckpointError

N = int(os.environ.get("GPTSCALE_MUTATIONS", "300"))
MAX_S, MAX_BYTES = 1.0, 200e6


def manifest_bytes(checkpoint, random):
    file = checkpoint / "manifest.json"
    file.write_bytes(damaged(file.read_bytes(), random))


def data_bytes(checkpoint, random):
    file = random.choice(sorted(checkpoint.glob("rank-*")))
    file.write_bytes(damaged(file.read_bytes(), random))


def manifest_values(checkpoint, random):
    file = checkpoint / "manifest.json"
    content = json.loads(file.read_bytes())
    change(content, random)
    file.write_text(json.dumps(content))


def data_header(checkpoint, random):
    """Change a data file's header, or its length, and let the manifest agree with the new file."""
    path = random.choice(sorted(checkpoint.glob("rank-*")))
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    change(header, random)
    text = json.dumps(header).encode()
    n = random.choice([len(text)] * 5 + [0, len(text) - 1, 2**20, 2**40, 2**64 - 1])
    path.write_bytes(n.to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])
    content = json.loads((checkpoint / "manifest.json").read_bytes())
    (entry,) = [e for e in content["files"] if e["file"] == path.name]
    entry["size"], entry["sha256"] = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    reseal(checkpoint, content)


def files(checkpoint, random):
    a, b = random.sample(sorted(checkpoint.iterdir()), 2)
    match random.randrange(5):
        case 0:
            a.unlink()
        case 1:
            shutil.copy(a, b)
        case 2:
            shutil.copy(a, checkpoint / "rank-00007-0000.safetensors")
        case 3:
            a.unlink()
            a.mkdir()
        case _:
            a.unlink()
            os.mkfifo(a)


def large_manifest(checkpoint, random):
    """Make the manifest as large as it may be, of what takes a reader most memory, or larger."""
    unit = random.choice(["[]", "{}", '""', "0", "[[]]", '{"":{}}', "1e9", '{"a":0}'])
    n_bytes = random.choice([2**20, 3 * 2**20, 2**22, 2**24])
    text = f'{{"format_version": 1, "files": [{",".join([unit] * (n_bytes // (len(unit) + 1) - 40))}]}}'
    (checkpoint / "manifest.json").write_text(text)


def deep_manifest(checkpoint, random):
    n = random.choice([100, 900, 1000, 2000, 10**5, 10**6])
    (checkpoint / "manifest.json").write_text(
        f'{{"format_version": 1, "files": {random.choice(["[", chr(123) + chr(34) * 2 + ":"]) * n}'
    )


KINDS = [manifest_bytes, data_bytes, *[manifest_values] * 2, data_header, files, large_manifest, deep_manifest]


def outcome(checkpoint):
    """Return what reading all of the checkpoint gave: the error's line, or the tensors, counters and step."""
    target = Holder(fill=0.0)
    try:
        reader = Reader(checkpoint).verify()
        reader.load_into(target)
    except CheckpointError as error:
        return str(error)
    return target.tensors, target.steps, reader.step


@pytest.mark.promise("S8 X4")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is read from Linux's /proc")
def test_a_changed_checkpoint_is_refused_or_gives_what_was_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "FILE_BYTES", 150)
    originals = [save(Holder(), tmp_path / str(version), 4, FACTS) for version in (1, 2)]
    make_version_1(originals[0])
    assert len(list(originals[0].glob("rank-*"))) > 1
    expected, checkpoint = Holder(), tmp_path / "step-4"
    longest_s, most_bytes, endings = defaultdict(float), defaultdict(int), Counter()
    for seed in range(N):
        draw = random.Random(seed)
        # In the first version nothing protects the counters, so that half as many changes of it are enough.
        original = originals[draw.randrange(3) > 0]
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(original, checkpoint)
        kind = draw.choice(KINDS)
        kind(checkpoint, draw)
        Path("/proc/self/clear_refs").write_text("5")
        before, began = memory("VmHWM"), time.process_time()
        result = outcome(checkpoint)
        name = kind.__name__
        longest_s[name] = max(longest_s[name], time.process_time() - began)
        most_bytes[name] = max(most_bytes[name], memory("VmHWM") - before)
        endings[name, "refused" if isinstance(result, str) else "identical"] += 1
        if isinstance(result, str):
            assert "\n" not in result
            assert len(result) < 1000, (seed, kind)
            continue
        tensors, steps, step = result
        assert all(torch.equal(t, tensors[n]) for n, t in expected.tensors.items()), (seed, kind)
        assert step == 4, (seed, kind)
        assert original == originals[0] or steps == expected.steps, (seed, kind)
    for (name, ending), n in sorted(endings.items()):
        print(f"{name:16} {n:6} {ending:9} at most {longest_s[name]:.3f} s, {most_bytes[name] / 1e6:.1f} MB")
    assert max(longest_s.values()) < MAX_S, longest_s
    assert max(most_bytes.values()) < MAX_BYTES, most_bytes
