"""A user's model, in the ways in which users write them."""

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
        """Return the stream with what the block adds."""
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
        """Return the loss, or logits."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build():
    """Return a model."""
    return Net()


def batch(size):
    """Return random tokens."""
    ids = torch.randint(0, 64, (size, 9))
    return {"ids": ids[:, :-1], "targets": ids[:, 1:]}


def meta():
    """Return a model without memory."""
    with torch.device("meta"):
        return Net()


def tied():
    """Return a model whose head is its table."""
    return Net(tied=True)


def exact():
    """Return a model without dropout, whose head is its table: a stage draws other random numbers than one process."""
    return Net(tied=True, dropout=0.0)


class Skipping(Net):
    """A model whose blocks take more than the one before gave."""

    def forward(self, ids, targets):
        """Return the loss."""
        x = first = self.table(ids)
        for block in self.blocks:
            x = block(x + first)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def logits_batch(size, number):
    """Return a batch that depends on its number alone."""
    return torch.arange(size * 8).reshape(size, 8) * (number + 1) % 64


def loss(logits, ids):
    """Return the loss of saying each token again."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Logits(Net):
    """A model that gives logits alone."""

    def forward(self, ids):
        """Return logits."""
        return super().forward(ids)


def pair_batch(size):
    """Return a batch whose last value is for the loss."""
    ids = torch.randint(0, 64, (size, 9))
    return ids[:, :-1], ids[:, 1:]


def pair_loss(logits, batch):
    """Return the loss of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), batch[-1].flatten())


class Both(Net):
    """A model that gives logits and its loss."""

    def forward(self, ids, targets):
        """Return both."""
        logits = super().forward(ids)
        return logits, pair_loss(logits, [targets])


def failing():
    """Fail."""
    raise ValueError("no such width")


def of_cuda():
    """Need a GPU."""
    return Net().to("cuda")


def number():
    """Return no module."""
    return 3


def wide(size):
    """Return a batch that the model refuses."""
    return {"ids": torch.randn(size, 8), "targets": torch.zeros(size, 8)}
