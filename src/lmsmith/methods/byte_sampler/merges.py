"""What a BPE merge list does, and which tokens may stand side by side because of it.

BPE applies, again and again, the best-ranked merge that is possible in a text, the leftmost on
ties. Merges of the bytes of a token never depend on its neighbours until one reaches over the
border. So a sequence of tokens is what BPE makes of its own text exactly when every adjacent pair
is: in the run over the pair, each side replays its own merges, in the order of rank,
and at no moment may a merge across the border be the best one. This module replays just that. The
replay compares with the rank that is really next on each side, so it needs no *proper* list (one
where operands are built before they are used); lists derived from SentencePiece scores are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

_NEVER = 1 << 60

Edge = tuple[int, tuple[tuple[int, int], ...]]
"""How one edge of a token grows: the base symbol there, then (rank, symbol) for every change."""


class Merges:
    """A ranked merge list over token ids.

    Args:
        left: Left operand of every merge, in order of rank  # [merges]
        right: Right operand  # [merges]
        product: Token each merge makes  # [merges]
        size: One more than the highest token id.
        symbols: The base symbols of a token before any merge; None where it has none.
    """

    def __init__(
        self,
        left: np.ndarray,
        right: np.ndarray,
        product: np.ndarray,
        size: int,
        symbols: Callable[[int], Sequence[int] | None],
    ) -> None:
        self._left, self._right, self._product, self._size = left, right, product, size
        self._symbols = symbols
        keys = left.astype(np.int64) * size + right
        self._rank: dict[int, int] = dict(zip(keys.tolist(), range(len(keys)), strict=True))
        self._products: list[int] = product.tolist()
        self._edges: dict[int, tuple[Edge, Edge] | None] = {}

    @cached_property
    def proper(self) -> bool:
        """Whether every merge comes after a merge that builds each of its operands."""
        built = np.full(self._size, -1, dtype=np.int64)
        built[self._product[::-1]] = np.arange(len(self._product))[::-1]  # the first one wins
        operands = np.maximum(built[self._left], built[self._right])
        return bool((operands < np.arange(len(self._product))).all())

    def made(self) -> np.ndarray:
        """Which ids some merge makes  # bool [size]."""
        made = np.zeros(self._size, dtype=bool)
        made[self._product] = True
        return made

    def run(self, symbols: Sequence[int]) -> tuple[list[int], list[tuple[int, int, bool, int]]]:
        """Run BPE on base symbols.

        Returns:
            The tokens, and every merge done: (rank, position, was at the last position, token).
        """
        tokens, size, rank = list(symbols), self._size, self._rank
        ranks = [rank.get(a * size + b, _NEVER) for a, b in pairwise(tokens)]
        events = []
        while ranks and (best := min(ranks)) != _NEVER:
            at = ranks.index(best)
            token = self._products[best]
            tokens[at : at + 2] = [token]
            del ranks[at]
            if at:
                ranks[at - 1] = rank.get(tokens[at - 1] * size + token, _NEVER)
            if at < len(ranks):
                ranks[at] = rank.get(token * size + tokens[at + 1], _NEVER)
            events.append((best, at, at == len(tokens) - 1, token))
        return tokens, events

    def reachable(self, token: int) -> bool:
        """Whether BPE makes this token of the token's own text."""
        return self.edges(token) is not None

    def edges(self, token: int) -> tuple[Edge, Edge] | None:
        """How the left and the right edge of a token grow; None where BPE never makes it."""
        try:
            return self._edges[token]
        except KeyError:
            pass
        symbols = self._symbols(token)
        found = None
        if symbols:
            tokens, events = self.run(symbols)
            if tokens == [token]:
                found = (
                    (symbols[0], _timeline(events, symbols[0], left=True)),
                    (symbols[-1], _timeline(events, symbols[-1], left=False)),
                )
        self._edges[token] = found
        return found

    def valid(self, left: int, right: int) -> bool:
        """Whether BPE, given the text of both tokens, gives back just these two."""
        before, after = self.edges(left), self.edges(right)
        if before is None or after is None:
            return False
        a, growth_a = before[1]
        b, growth_b = after[0]
        size, rank = self._size, self._rank
        done_a = done_b = 0
        across = rank.get(a * size + b, _NEVER)
        while True:
            next_a = growth_a[done_a][0] if done_a < len(growth_a) else _NEVER
            next_b = growth_b[done_b][0] if done_b < len(growth_b) else _NEVER
            # On equal ranks BPE goes from left to right: left token, border, right token.
            if across < next_a and across <= next_b:
                return False
            if next_a <= next_b:
                if next_a == _NEVER:
                    return True
                a = growth_a[done_a][1]
                done_a += 1
            else:
                b = growth_b[done_b][1]
                done_b += 1
            across = rank.get(a * size + b, _NEVER)


def _timeline(
    events: list[tuple[int, int, bool, int]], symbol: int, left: bool
) -> tuple[tuple[int, int], ...]:
    """(rank, symbol at the edge after it) of the merges that matter for what happens at an edge.

    Where ranks only rise, a merge inside the token never outlasts the next one at the edge and can
    be left out; otherwise all are kept.
    """
    rising = all(a[0] <= b[0] for a, b in pairwise(events))
    timeline = []
    for rank, position, last, token in events:
        at_edge = position == 0 if left else last
        if at_edge:
            symbol = token
        if at_edge or not rising:
            timeline.append((rank, symbol))
    return tuple(timeline)
