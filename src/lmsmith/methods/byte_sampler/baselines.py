"""What byte-level sampling is measured against: plain tokenization, healing, a beam of covers.

Plain tokenization and healing need the model exactly where the covering tree of a prefix has its
canonical path, so they are read from the same forward pass as the tree; a test compares them with
forward passes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmsmith.methods.byte_sampler.buckets import STOP
from lmsmith.methods.byte_sampler.reader import ByteReader, normalise
from lmsmith.models.session import Tree


def arms(reader: ByteReader, rows: Sequence[int]) -> dict[str, Tensor]:
    """Next-byte distributions of the covering tree and of two baselines, from one forward call.

    Args:
        reader: Holds the rows.
        rows: Open rows of the reader.

    Returns:
        `plain`: the tokens of the prefix are given, and the next byte is the first of the next
        token. `healing`: the last token is taken back and a token that begins with its bytes is
        drawn instead (one token of back-up). `byte`: the covering tree. Each `[rows, 257]`, log-
        probabilities in nats.
    """
    covering = normalise(reader.next_bytes(rows))
    plain = torch.stack([reader.end_of_text(row)[1] for row in rows]).log()
    healing = torch.stack([_heal(reader, row) for row in rows]).log()
    return {
        "plain": normalise(plain.cpu()),
        "healing": normalise(healing.cpu()),
        "byte": covering,
    }


def _heal(reader: ByteReader, row: int) -> Tensor:
    """Probability mass by next byte when the last token is drawn again  # [257]."""
    _, plain = reader.end_of_text(row)
    before = reader.before_last(row)
    if before is None:  # no longer token begins with the last one: only the last one fits
        return plain
    spelling, values = before
    ids, following = reader.buckets.after(spelling)
    again = values[reader.last_token(row)].exp()
    return (again * plain).index_add(0, following, values[ids].exp())


@dataclass
class _State:
    node: int  # index into the row's nodes; 0 is the start
    walked: bytes


@dataclass
class BeamCover:
    """A beam over all token sequences that cover a prefix, valid or not (Vieira et al.).

    The general method for any tokenizer: keep the `width` likeliest (sequence, partial token)
    pairs, extend each by every byte. One row; one forward call a byte, for the sequences that
    completed a token and stayed in the beam.

    Args:
        reader: Lends the model, the Session and the tables.
        start: Token ids before the bytes.
        width: Pairs kept.
    """

    reader: ByteReader
    start: Sequence[int]
    width: int = 5
    states: list[_State] = field(default_factory=list)
    forward_calls: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self._row = self.reader.session.add(self.start)
        self._session_ids: dict[int, int] = {0: -1}
        self._logprob: dict[int, float] = {0: 0.0}
        self._values: dict[int, Tensor] = {}
        self._masses: dict[int, Tensor] = {}
        self._count = 1
        step = self.reader.session.feed({self._row: []})
        self._remember([0], step.logits)
        self.states = [_State(0, b"")]

    def push(self, byte: int) -> None:
        """Extend the prefix by one byte."""
        grown: list[tuple[float, _State, int | None]] = []  # mass, state, token completed
        for state in self.states:
            walked = state.walked + bytes([byte])
            ids, _ = self.reader.buckets.after(walked)
            base = self._logprob[state.node]
            if len(ids):
                mass = float(torch.logsumexp(self._values[state.node][ids], 0))
                grown.append((base + mass, _State(state.node, walked), None))
            for token in self.reader.buckets.spelled(walked):
                value = base + float(self._values[state.node][token])
                grown.append((value, _State(state.node, b""), token))
        grown.sort(key=lambda entry: -entry[0])
        self.states, new = [], []
        for mass, state, completed in grown[: self.width]:
            if completed is None:
                self.states.append(state)
            else:
                self._logprob[self._count] = mass
                new.append((self._count, completed, self._session_ids[state.node]))
                self.states.append(_State(self._count, b""))
                self._count += 1
        if new:
            step = self.reader.session.feed(
                {self._row: Tree([token for _, token, _ in new], [up for _, _, up in new])}
            )
            self.forward_calls += 1
            self.tokens += len(new)
            self._session_ids.update(
                zip((node for node, _, _ in new), step.nodes[self._row], strict=True)
            )
            places = [(self._row, index) for index in range(len(new))]
            self._remember([node for node, _, _ in new], step.logits_at(places))

    def next_bytes(self) -> Tensor:
        """The next-byte distribution  # [257], log-probabilities in nats."""
        top = max(self._logprob[state.node] for state in self.states)
        total = self._masses[0].new_zeros(STOP + 1)
        for state in self.states:
            weight = math.exp(self._logprob[state.node] - top)
            if state.walked:
                ids, following = self.reader.buckets.after(state.walked)
                probs = self._values[state.node][ids].exp()
                total.index_add_(0, following, weight * probs)
            else:
                ending = self.reader.buckets.ending(self._values[state.node])
                total += weight * (self._masses[state.node] + ending)
        return normalise(total.log().cpu())

    def close(self) -> None:
        """Free the cache."""
        self.reader.session.free(self._row)

    def _remember(self, nodes: Sequence[int], logits: Tensor) -> None:
        values = torch.log_softmax(logits.float(), dim=-1)
        masses = self.reader.buckets.masses(values)
        for index, node in enumerate(nodes):
            self._values[node], self._masses[node] = values[index], masses[index]
