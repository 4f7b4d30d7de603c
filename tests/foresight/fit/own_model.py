"""A user's model, in the ways in which users write them."""

import os

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A block with dropout."""

    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A chain of blocks, whose output is the loss."""

    def __init__(self, n=4, width=32, tied=False, dropout=0.1):
        super().__init__()
        self.table, self.head = nn.Embedding(64, width), nn.Linear(width, 64, bias=False)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(n)])
        if n:
            self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids, targets=None):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build():
    return Net()


def batch(size):
    ids = torch.randint(0, 64, (size, 9))
    return {"ids": ids[:, :-1], "targets": ids[:, 1:]}


def meta():
    with torch.device("meta"):
        return Net()


def exact():
    return Net(tied=True, dropout=0.0)


def broad():
    return Net(width=1024)


class Skipping(Net):
    """A model whose blocks take more than the one before gave."""

    def forward(self, ids, targets):
        x = first = self.table(ids)
        for block in self.blocks:
            x = block(x + first)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Towers(nn.Module):
    """Two towers, whose gradients are small rests of large terms: fp32 rounds them by more than a proof allows."""

    def __init__(self):
        super().__init__()
        self.users, self.items = (
            nn.Sequential(nn.Embedding(999, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.temperature = nn.Parameter(torch.tensor(0.07))

    def forward(self, ids, others):
        logits = F.normalize(self.users(ids)) @ F.normalize(self.items(others)).T / self.temperature
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def towers_batch(size):
    return {name: torch.randint(0, 999, (size,)) for name in ("ids", "others")}


def logits_batch(size, number):
    return torch.arange(size * 8).reshape(size, 8) * (number + 1) % 64


def loss(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Logits(Net):
    """A model that gives logits alone, and has an option."""

    def forward(self, ids, wants_more=False):
        return super().forward(ids) if not wants_more else None


def pair_batch(size):
    ids = torch.randint(0, 64, (size, 9))
    return ids[:, :-1], ids[:, 1:]


def pair_loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch[-1].flatten())


def renewing():
    net = Logits()
    nn.utils.parametrizations.spectral_norm(net.head)
    return net


class Both(Net):
    """A model that gives logits and its loss."""

    def forward(self, ids, targets):
        logits = super().forward(ids)
        return logits, pair_loss(logits, [targets])


def failing():
    raise ValueError("no such width")


def number():
    return 3


def wide(size):
    return {"ids": torch.randn(size, 8), "targets": torch.zeros(size, 8)}


def alike(size):
    return logits_batch(2, 0)


def unlike(size):
    return torch.tensor([[*os.urandom(8)] for _ in range(size)]) % 64


def losses(logits, ids):
    return logits.mean((1, 2))


class Routed(nn.Module):
    """A block whose experts may get no token."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x, ids):
        for i, expert in enumerate(self.experts):
            if len(rows := torch.where(ids[:, 0] % 3 == i)[0]):
                x = x.index_add(0, rows, expert(x[rows]).to(x.dtype))
        return x


class Mixed(nn.Module):
    """Two stacks of blocks, a recurrent layer, a scalar, a norm of at least two samples, and heads of which a batch takes one."""

    def __init__(self, width=32):
        super().__init__()
        self.table, self.lstm = nn.Embedding(64, width), nn.LSTM(width, width)
        self.first = nn.ModuleList([Block(width) for _ in range(3)])
        self.second = nn.ModuleList([Routed(width) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm, self.heads = nn.BatchNorm1d(width), nn.ModuleList([nn.Linear(width, 64) for _ in range(2)])

    def forward(self, ids, power=1):
        x = self.lstm(self.table(ids))[0]
        x = x + self.norm(x[:, 0])[:, None]
        for block in self.first:
            x = block(x)
        for block in self.second:
            x = block(x, ids)
        return self.heads[int(ids[0, 0]) % 2](x) * self.scale**power


def mixed_batch(size):
    ids = torch.randint(0, 64, (size, 9))
    return {"ids": ids[:, :-1], "power": 2, "targets": {"next": ids[:, 1:]}}


def mixed_loss(logits, batch):
    return pair_loss(logits, [batch["targets"]["next"]])
