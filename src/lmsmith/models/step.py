"""What goes into a feed besides plain lists, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmsmith.errors import UsageError


@dataclass(frozen=True)
class Tree:
    """New tokens that branch off the end of a row's trunk.

    Attributes:
        ids: Token ids.
        parents: For each, a live node's id, -1 for the end of the trunk, or -2-j for the j-th
            token of this same tree.
    """

    ids: Sequence[int]
    parents: Sequence[int]


class Step:
    """What one feed computed.

    Attributes:
        rows: Rows fed, in the order asked for.
        new_tokens: Tokens computed for each row, those it lacked included. The indices that
            `logits_at` takes run over these; the tokens asked for are the last of them.
        caught_up: How many of a row's new tokens it lacked before those asked for.
        nodes: Ids of the new nodes of each row fed with a tree, in the tree's order.
        sites: Captured activations by site, `[rows, new tokens, width]`; a row with fewer new
            tokens than the longest has meaningless values after them.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], rows: list[int]) -> None:
        self.rows = rows
        self.new_tokens: dict[int, int] = {}
        self.caught_up: dict[int, int] = {}
        self.nodes: dict[int, list[int]] = {}
        self.sites: dict[str, Tensor] = {}
        self._head = head
        self._parts: list[Tensor] = []  # final hidden states, [lanes, new, width] a forward call
        self._places: dict[int, tuple[int, int]] = {}  # row -> its forward call, its lane there
        self._logits: Tensor | None = None

    def put(self, hidden: Tensor, lanes: dict[int, int]) -> None:
        """Take one forward call's final hidden states, `[lanes, new, width]`, and who is where."""
        for row, lane in lanes.items():
            self._places[row] = (len(self._parts), lane)
        self._parts.append(hidden)

    @property
    def logits(self) -> Tensor:
        """Logits after the last token of each row, `[rows, vocab]` in the order of `rows`."""
        if self._logits is None:
            self._logits = self.logits_at([(row, -1) for row in self.rows])
        return self._logits

    def all_logits(self, row: int) -> Tensor:
        """Logits after every new token of a row, `[new_tokens[row], vocab]`.

        Raises:
            UsageError: The row was not fed.
        """
        part, lane = self._place(row)
        return self._head(self._parts[part][lane, : self.new_tokens[row]])

    def logits_at(self, places: Sequence[tuple[int, int]]) -> Tensor:
        """Logits after chosen tokens, one call of the model's head for all.

        Args:
            places: Pairs of row and index into its new tokens; a negative index counts from the
                last.

        Returns:
            `[len(places), vocab]`.

        Raises:
            UsageError: A row that was not fed, or an index outside its new tokens.
        """
        found: list[tuple[int, int, int]] = []
        for row, index in places:
            part, lane = self._place(row)
            count = self.new_tokens[row]
            if not -count <= index < count:
                raise UsageError(
                    f"row {row} has {count} new tokens in this step; {index} is not one of them"
                )
            found.append((part, lane, index % count))
        if len(self._parts) == 1 or not found:
            _, lanes, indices = zip(*found, strict=True) if found else ((), (), ())
            return self._head(self._parts[0][list(lanes), list(indices)])
        return self._head(torch.stack([self._parts[p][lane, i] for p, lane, i in found]))

    def _place(self, row: int) -> tuple[int, int]:
        if row not in self._places:
            raise UsageError(f"row {row} was not fed in this step; fed: {self.rows}")
        return self._places[row]
