"""Files that users give, damaged in every way: read, or refused in one line, soon, and in little memory.

A few of each kind run as a test. More by hand, with a line of figures for each kind:

    GPTSCALE_FUZZ=1000 pytest -s tests/common/data/test_fuzz.py
"""

import copy
import gzip
import io
import json
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from damage import change, damaged, memory

from gptscale.common.data.loader import Batches, split
from gptscale.common.data.sources import open_source
from gptscale.common.data.tokenizers import get_tokenizer
from gptscale.common.engines.zero.options import merged
from gptscale.common.errors import GptscaleError
from gptscale.lenet.data import idx, sources

N = int(os.environ.get("GPTSCALE_FUZZ", "40"))
MAX_S, MAX_BYTES = 5.0, 2**30


def try_all(kind, attempts):
    """Make each attempt, which may end well or in one of our errors, check what it took, and print the most of it."""
    refused, lines, longest_s, largest, began = 0, 0, 0.0, 0, time.monotonic()
    for attempt in attempts:
        # The peak of memory counts from here.
        Path("/proc/self/clear_refs").write_text("5")
        before, start = memory("VmRSS"), time.process_time()
        try:
            attempt()
        except GptscaleError as error:
            refused += 1
            lines = max(lines, len(str(error).splitlines()))
        longest_s, largest = max(longest_s, time.process_time() - start), max(largest, memory("VmHWM") - before)
    print(f"\n{kind}: {refused} refused, none a traceback, in {time.monotonic() - began:.0f} s, longest "
          f"{longest_s:.2f} processor seconds, most memory {largest / 2**20:.0f} MiB")  # fmt: skip
    assert lines <= 1
    assert longest_s < MAX_S
    assert largest < MAX_BYTES


def files(path, seeds, use, draw):
    """Yield attempts to use a damaged copy of one of the seeds, each in the file `path`."""
    for seed in draw.choices(seeds, k=N):
        path.write_bytes(damaged(seed, draw))
        yield lambda: use(path)


@pytest.mark.promise("S17")
def test_token_files(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, 2000).astype("<u2")
    header = np.array([20240520, 1, 2000], "<i4").tobytes().ljust(1024, b"\0")

    def use(path):
        train, _ = split(open_source(str(path), vocab_size=257), seq_len=16)
        Batches(train, seq_len=16, global_batch_size=2, seed=0).batch(3)

    try_all(".bin", files(tmp_path / "a.bin", [ids.tobytes(), header + ids.tobytes()], use, random.Random(1)))


@pytest.mark.promise("S18")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_idx_files(tmp_path, packed):
    plain = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (40, 28, 28)) + bytes(range(245)) * 128
    draw = random.Random(2)
    path = tmp_path / "train-images-idx3-ubyte"
    if not packed:
        return try_all("idx", files(path, [plain], lambda path: idx.read(path, "images"), draw))
    # Half are damaged before they are packed, and half after.
    seeds = [gzip.compress(damaged(plain, draw)) for _ in range(50)]

    def attempts():
        for i in range(N):
            path.write_bytes(draw.choice(seeds) if i % 2 else damaged(gzip.compress(plain), draw))
            yield lambda: idx.read(path, "images")

    return try_all("idx.gz", attempts())


def test_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 256, (40, 30, 3)).astype(np.uint8)
    picture, seeds = image.fromarray(noise), []
    kinds = [
        *((form, "RGB") for form in ("PNG", "JPEG", "BMP", "WEBP")),
        *(("PNG", m) for m in ("P", "L", "RGBA", "I;16")),
    ]
    for form, mode in kinds:
        file = io.BytesIO()
        (picture.convert("L").convert("I;16") if mode == "I;16" else picture.convert(mode)).save(file, form)
        seeds.append(file.getvalue())
    try_all("images", files(tmp_path / "a.png", seeds, lambda path: sources._image(path, 32), random.Random(3)))


def test_tokenizer_folders(tmp_path, bpe_folder):
    draw, folder = random.Random(4), tmp_path / "bpe"
    texts = {path.name: path.read_text() for path in Path(bpe_folder).iterdir()}
    texts |= {"tokenizer_config.json": '{"model_max_length": 1024, "eos_token": "<|endoftext|>"}',
              "special_tokens_map.json": '{"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}}',
              "added_tokens.json": "{}"}  # fmt: skip

    def attempts():
        for _ in range(N):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            harmed = draw.choice([*texts, "vocab.json", "merges.txt"])
            for name in ["vocab.json", "merges.txt", harmed]:
                text = texts[name].encode()
                if name == harmed and name.endswith("json") and json.loads(text) and draw.random() < 0.7:
                    tree = json.loads(text)
                    change(tree, draw)
                    text = json.dumps(tree).encode()
                elif name == harmed:
                    text = damaged(text, draw)
                (folder / name).write_bytes(text)
            yield use

    def use():
        tokenizer = get_tokenizer(str(folder))
        tokenizer.decode(tokenizer.encode("def hello(world):\n\treturn  \U0001f600 1 <|endoftext|>"))

    try_all("tokenizers", attempts())


def test_deepspeeds_configurations(tmp_path):
    zero = {"stage": 2, "reduce_bucket_size": 9}
    ours = {"train_batch_size": 8, "zero_optimization": zero, "bf16": {"enabled": True}}
    draw, file = random.Random(5), tmp_path / "ds.json"

    def attempts():
        for i in range(N):
            tree = copy.deepcopy(ours)
            change(tree, draw)
            text = json.dumps(tree).encode()
            file.write_bytes(damaged(text, draw) if i % 3 == 0 else text)
            yield lambda: merged(ours, file)

    try_all("--ds-config", attempts())


def gz_bomb(path):
    path.write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\0\0\0\x01" * 3 + bytes(2**26), compresslevel=1))
    return idx.read(path, "images")


def false_header(path):
    path.write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\xff\xff\xff\xff" * 3 + bytes(2**10)))
    return idx.read(path, "images")


def large_picture(path):
    from PIL import Image

    Image.new("1", (12_000, 8_000)).save(path, "PNG")
    return sources._image(path, 32)


def postscript(path):
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    return sources._image(path, 32)


def fifo(use):
    return lambda path: os.mkfifo(path) or use(path)


def pipe_in_a_tokenizer(path):
    path.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (path / name).write_text("{}")
    os.mkfifo(path / "tokenizer.json")
    return get_tokenizer(str(path))


# Other pipes, and what else is no --ds-config: test_sources.py and tests/launchers/test_user_files.py.
BOMBS = {
    "a gzip bomb": (gz_bomb, "more than 17 bytes, expected 17 for 1 x 1 x 1 images"),
    "a false header": (false_header, "4294967295 x 4294967295 x 4294967295 images are more than 1073741824 bytes"),
    "a large picture": (large_picture, "has 12000 x 8000 pixels, at most 67,108,864 are read"),
    "a program as a picture": (postscript, "is no whole image (cannot identify image file"),
    "a pipe as a picture": (fifo(lambda path: sources._image(path, 32)), "is no file"),
    "a pipe as idx": (fifo(lambda path: idx.read(path, "images")), "is no file"),
    "a pipe in a tokenizer": (pipe_in_a_tokenizer, "tokenizer.json is no file"),
    "a pipe as --ds-config": (fifo(lambda path: merged({}, path)), "it is no file, in --ds-config"),
}


# A reader that hangs fails here.
@pytest.mark.promise("X4")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", BOMBS)
def test_bombs_and_pipes(tmp_path, case):
    use, message = BOMBS[case]
    errors = []

    def attempt():
        try:
            use(tmp_path / "a.bin")
        except GptscaleError as error:
            errors.append(str(error))

    try_all(case, [attempt])
    assert message in errors[0]
