"""Damage to files, drawn at random: to their bytes, and to the values of their JSON."""

import json
from pathlib import Path

NUMBERS = [0, 1, 2, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 20240520]
VALUES = [
    None, True, False, -1, 0, 1, 2, 3, 4, 5, 2**31, 2**63, 2**64, 10**400, -5.5, 1e308, float("nan"), float("inf"), "", "x",
    "\ud800", "\0", "../../etc/passwd", "a" * 10**6, "0" * 64, [], {}, [0], [[]], {"a": 1}, list(range(10**4)),
    "F64", "BF16", "float64", "rank-00000-0000.safetensors", "rank-99999-9999.safetensors",
]  # fmt: skip


def damaged(data, draw):
    """Return the bytes with some of them flipped, cut, repeated, filled, or replaced by another number."""
    content = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        # The first bytes say what the others are.
        place = draw.randrange(min(len(content), draw.choice([16, 64, 2**30])) + 1)
        length = draw.choice([1, 2, 4, 100, len(content)])
        match draw.randrange(6):
            case 0:
                content[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del content[place:]
            case 2:
                del content[place : place + length]
            case 3:
                content[place:place] = content[: draw.randrange(len(content) + 1)]
            case 4:
                content[place : place + length] = bytes([draw.choice([0, 255, 32])]) * min(length, 100)
            case 5:
                content[place : place + 4] = draw.choice(NUMBERS).to_bytes(4, draw.choice(["big", "little"]))
    return bytes(content)


def any_place(tree, draw):
    """Return a random (parent, key) of a JSON tree."""
    places, stack = [], [tree]
    while stack:
        node = stack.pop()
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(child, dict | list):
                stack.append(child)
    return draw.choice(places)


def change(tree, draw):
    """Change one value of a JSON tree, delete it, repeat it, rename its key, swap it with another, or put it into lists."""
    parent, key = any_place(tree, draw)
    match draw.randrange(7):
        case 0 | 1:
            parent[key] = draw.choice(VALUES)
        case 2:
            del parent[key]
        case 3 if isinstance(parent, list):
            parent.append(parent[key])
        case 3:
            parent[f"{key} "] = parent.pop(key)
        case 4:
            other, its_key = any_place(tree, draw)
            parent[key], other[its_key] = json.loads(json.dumps([other[its_key], parent[key]]))
        case 5:
            for _ in range(draw.choice([5, 900])):
                parent[key] = [parent[key]]
        case _ if type(parent[key]) is int:
            parent[key] += draw.choice([-1, 1, 2**32])


def memory(field):
    """Return what Linux says of this process's memory, in bytes: VmRSS is what it has, VmHWM the most that it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])
