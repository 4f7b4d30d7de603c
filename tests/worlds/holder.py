"""The part of an engine that checkpoints need, with a few small tensors."""

import hashlib
import json

import torch

from gptscale.common.checkpoint.manifest import sealed
from gptscale.common.state import Shard

FACTS = {"recipe": "single", "world_size": 1, "workload": {}}


class Holder:
    """The part of an engine that checkpoints need: named boxes and counters."""

    def __init__(self, fill=None):
        generator = torch.Generator().manual_seed(0)

        def tensor(*shape):
            value = torch.randn(*shape, generator=generator)
            return value if fill is None else torch.full_like(value, fill)

        a, b, average = tensor(6, 4), tensor(5), tensor(6, 4)
        self.tensors = {"model/a.weight": a, "model/b.bias": b, "adamw.exp_avg/a.weight": average}
        self.steps = 3.0 if fill is None else 0.0

    def state(self):
        for name, t in self.tensors.items():
            yield Shard(name, t, tuple(t.shape), (0,) * t.ndim)

    def counters(self):
        return {"optimizer_steps": self.steps}

    def load_counters(self, counters):
        self.steps = counters["optimizer_steps"]


def reseal(checkpoint, content):
    """Write another manifest, with the hash of what it says."""
    content = {key: value for key, value in content.items() if key != "manifest_sha256"}
    (checkpoint / "manifest.json").write_bytes(sealed(content))


def poison(checkpoint, name):
    """Replace the first number of a tensor in the first file by a NaN, with hashes that agree."""
    file = checkpoint / "rank-00000-0000.safetensors"
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    (tensor,) = (facts for key, facts in header.items() if key.split("@")[0] == name)
    at = begin + tensor["data_offsets"][0]
    data[at : at + 4] = b"\x00\x00\xc0\x7f"
    file.write_bytes(data)
    content = json.loads((checkpoint / "manifest.json").read_bytes())
    content["files"][0]["sha256"] = hashlib.sha256(data).hexdigest()
    reseal(checkpoint, content)


def make_version_1(checkpoint):
    """Rewrite the manifest as the first version of the format had it: without its hash and the types of tensors."""
    content = json.loads((checkpoint / "manifest.json").read_bytes()) | {"format_version": 1}
    del content["manifest_sha256"]
    for box in (box for entry in content["files"] for box in entry["boxes"]):
        del box["dtype"]
    (checkpoint / "manifest.json").write_text(json.dumps(content, indent=1))
