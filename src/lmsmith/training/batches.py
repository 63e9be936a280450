"""Which examples a step sees, how they are shared out, and what a model is given of them.

Everything here is a function of counts, lengths and a seed; a run that stopped is where it was
once it knows its step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lmsmith.training.data import Tokens


@dataclass(frozen=True)
class Batch:
    """Examples of one forward pass, end to end without padding.

    Attributes:
        ids: `[tokens]`.
        counted: `[tokens]`; whether predicting this token counts. Never the first of an example.
        lengths: Tokens of each example.
        examples: The place of each among the examples given.
    """

    ids: Tensor
    counted: Tensor
    lengths: tuple[int, ...]
    examples: tuple[int, ...]

    @cached_property
    def positions(self) -> Tensor:
        """`[tokens]`; of each token in its example."""
        return torch.cat([torch.arange(n, device=self.ids.device) for n in self.lengths])

    @cached_property
    def targets(self) -> Tensor:
        """`[counted tokens]`; the tokens to predict."""
        return self.ids[self.counted]

    @cached_property
    def predictors(self) -> Tensor:
        """`[counted tokens]`; places in `[tokens]` whose output predicts `targets`."""
        return self.counted.nonzero()[:, 0] - 1

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        if self.ids.device == device:
            return self
        return replace(self, ids=self.ids.to(device), counted=self.counted.to(device))

    def padded(self, fill: int = 0) -> Tensor:
        """The ids as `[examples, longest]`, filled up at the right.

        A causal model's output at a token does not depend on what is to the right of it, so no
        mask is needed as long as the filled places are not read; `unpadded` picks the others.
        """
        if len(set(self.lengths)) == 1:
            return self.ids.view(len(self.lengths), -1)
        rows = torch.full(
            (len(self.lengths), max(self.lengths)), fill, dtype=torch.long, device=self.ids.device
        )
        rows[self._places] = self.ids
        return rows

    def unpadded(self, output: Tensor) -> Tensor:
        """What a model gave for `padded`, `[examples, longest, ...]`, as `[tokens, ...]`."""
        if len(set(self.lengths)) == 1:
            return output.flatten(0, 1)
        return output[self._places]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(self.lengths, device=self.ids.device)
        rows = torch.arange(len(self.lengths), device=self.ids.device).repeat_interleave(lengths)
        return rows, self.positions


def collate(tokens: Tokens, members: Sequence[int], device: torch.device | str = "cpu") -> Batch:
    """Join encoded examples to a batch.

    Without members it is the first example with nothing of it counted: a process that has no
    share of a step still takes part in it.
    """
    if not members:
        batch = collate(tokens, [0], device)
        return Batch(batch.ids, torch.zeros_like(batch.counted), batch.lengths, ())
    rows = [tokens[member] for member in members]
    return Batch(
        torch.from_numpy(np.concatenate([ids for ids, _ in rows]).astype(np.int64)).to(device),
        torch.from_numpy(np.concatenate([counted for _, counted in rows])).to(device),
        tuple(len(ids) for ids, _ in rows),
        tuple(int(tokens.sources[member]) for member in members),
    )


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put pieces into bins of `capacity`: best fit, longest first, ties in their given order.

    Returns:
        The pieces of each bin; every piece is in one.
    """
    bins: list[list[int]] = []
    # Bins that have room, by what they have left, then age.
    room: list[tuple[int, int]] = []
    for piece in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[piece], 0))
        left, target = room.pop(place) if place < len(room) else (capacity, len(bins))
        if target == len(bins):
            bins.append([])
        bins[target].append(piece)
        if left > lengths[piece]:
            insort(room, (left - lengths[piece], target))
    return bins


class Order:
    """The endless order in which units come: one permutation an epoch, each of its own seed."""

    def __init__(self, units: int, seed: int, shuffle: bool = True) -> None:
        self.units, self.seed, self.shuffle = units, seed, shuffle
        self._epoch, self._permutation = -1, np.arange(units)

    def slice(self, start: int, stop: int) -> list[int]:
        """The units from place `start` up to `stop` of the endless order."""
        return [self._at(place) for place in range(start, stop)]

    def _at(self, place: int) -> int:
        epoch, offset = divmod(place, self.units)
        if self.shuffle and epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._epoch, self._permutation = epoch, generator.permutation(self.units)
        return int(self._permutation[offset])


def share_out(
    units: Sequence[int], lengths: Sequence[int], processes: int, micro: int
) -> list[list[list[int]]]:
    """Divide a step's units among processes and forward passes.

    Within a step the order of examples has no effect on the mean over its tokens, so units are
    dealt out by length: processes get equal work, and a forward pass gets units of like length.

    Args:
        units: The units of the step.
        lengths: Length of each of them.
        processes: Processes that share the step.
        micro: Most units a forward pass.

    Returns:
        `[processes][passes][units]`; every process has the same number of passes, some may be
        empty.
    """
    by_length = [units[i] for i in sorted(range(len(units)), key=lambda i: -lengths[i])]
    shares = [by_length[process::processes] for process in range(processes)]
    passes = -(-len(shares[0]) // micro)
    return [[share[micro * i : micro * (i + 1)] for i in range(passes)] for share in shares]
