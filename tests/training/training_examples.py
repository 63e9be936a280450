"""Examples and models that the training tests share."""

from __future__ import annotations

import random

import torch
from torch import nn

from lmsmith.training import Batch

SUMS = [
    {"prompt": f"What is {i} plus {j}? ", "completion": "so " * (j % 4) + f"it is {i + j}."}
    for i in range(6)
    for j in range(6)
]


def ids_of(lengths, vocabulary=60, seed=0):
    """Examples of given lengths with random ids, the first half of each not counted."""
    draw = random.Random(seed)
    return [
        {
            "input_ids": [draw.randrange(vocabulary) for _ in range(n)],
            "loss_mask": [place >= n // 2 for place in range(n)],
        }
        for n in lengths
    ]


def batch_of(examples):
    """A batch of examples with `input_ids` and `loss_mask`."""
    ids = torch.tensor([i for e in examples for i in e["input_ids"]])
    counted = [c and p > 0 for e in examples for p, c in enumerate(e["loss_mask"])]
    lengths = tuple(len(e["input_ids"]) for e in examples)
    return Batch(ids, torch.tensor(counted), lengths, tuple(range(len(examples))))


class Recurrent(nn.Module):
    """A causal module that is no transformer: ids `[rows, length]` to logits."""

    def __init__(self, vocabulary=60, width=16, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocabulary, width)
            self.body = nn.GRU(width, width, batch_first=True)
            self.head = nn.Linear(width, vocabulary)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        self.calls += self.training
        return self.head(self.body(self.embed(ids))[0])


def weights(module):
    """A copy of all weights, by name."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one, other):
    """Whether two dictionaries of weights are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def sgd(groups):
    """Plain gradient descent, under which weights show the gradient as it is."""
    return torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups], lr=1.0)
