"""Reads a language model one byte at a time: covering trees over Session rows.

Each row is a byte prefix P. Its covering tree (`tree`) says which token sequences cover P; the
Session holds the keys and values of the trunk and the live branches; one forward call a byte feeds
the nodes that the byte created, for all rows together. From the log-probability c(node) of each
branch and the model's next-token distribution there,

    L[b] = log sum over nodes, over tokens t that agree with P and have byte b next, of
           exp(c(node) + log p(t | trunk, branch)),

over the 256 bytes and `stop` (entry 256): a 257-vector a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmsmith.decoding.events import Sampling
from lmsmith.decoding.sampling import filtered_probs
from lmsmith.errors import CapabilityError, UsageError
from lmsmith.methods.byte_sampler.buckets import STOP, ByteBuckets
from lmsmith.methods.byte_sampler.start import start_token
from lmsmith.methods.byte_sampler.tree import CoveringTree, Head, Node
from lmsmith.methods.byte_sampler.vocabulary import ByteTokens
from lmsmith.models.session import Session, Tree

if TYPE_CHECKING:
    from lmsmith.models.lm import LM

LOGITS_AT_ONCE = 64
"""Positions whose full next-token distributions are in memory together."""


class _Law(NamedTuple):
    """What the model says after one node."""

    values: Tensor  # log-probabilities of the next token  # [vocabulary]
    masses: Tensor  # probabilities of ordinary tokens by first byte  # [257]


@dataclass
class _Row:
    tree: CoveringTree
    session_row: int
    root: Node  # end of the trunk as the Session has it
    ids: dict[Node, int] = field(default_factory=dict)  # live nodes in the Session
    logprob: dict[Node, float] = field(default_factory=dict)  # c(node), up to a constant of the row
    laws: dict[Node, _Law] = field(default_factory=dict)
    cut: dict[Node, _Law] = field(default_factory=dict)  # the same, truncated, if anything is
    discarded: int = 0
    invalid: float = 0.0


class ByteReader:
    """Rows of one model that are read byte by byte.

    Args:
        lm: The model; must offer `bpe`.
        filtered: Drop leaves that are not valid after their node (costs a check a candidate).
        token_sampling: Temperature and truncation of every token distribution before bytes are
            summed. Truncation is for tokens still to be drawn: those of the prefix are given, with
            the probability they have. Where it leaves a row nothing to draw, that row's
            distribution is the one without it.
        session: Where the rows live; a Session of the reader's own by default.

    Raises:
        CapabilityError: The tokenizer is not a BPE that can be read as bytes.
    """

    def __init__(
        self,
        lm: LM,
        filtered: bool = False,
        token_sampling: Sampling | None = None,
        session: Session | None = None,
    ) -> None:
        if lm.tokenizer is None:
            raise CapabilityError("byte-sampler", "a BPE tokenizer", "no tokenizer")
        self.lm = lm
        self.tokens = ByteTokens.from_tokenizer(lm.tokenizer)
        self.filtered = filtered
        self.session = Session(lm) if session is None else session
        stop_ids = frozenset(self.tokens.special_ids | lm.eos_ids)
        self.buckets = ByteBuckets(self.tokens, lm.vocabulary, stop_ids, lm.device)
        self._sampling = token_sampling or Sampling()
        self._heat = self._sampling.temperature or 1.0
        self._rows: dict[int, _Row] = {}

    # Rows -----------------------------------------------------------------------------------

    def open(self, parts: Sequence[int | bytes], start: bool = False) -> int:
        """Start a row at a prefix.

        Args:
            parts: The prefix in order: bytes of text, and ids of special tokens.
            start: Put the model's start token in front. Done anyway where the prefix is so short
                that its first token is still open and the model must be asked for it.

        Raises:
            UsageError: The prefix is longer than the model's context, or not UTF-8.
        """
        tree = self._read([self.start_id, *parts] if start else parts)
        if not tree.trunk:
            tree = self._read([self.start_id, *parts])
        if len(tree.trunk) + len(tree.live_nodes()) >= self.lm.context:
            raise self.too_long("the prompt")
        row = self.session.add(tree.trunk)
        self._rows[row] = _Row(tree, row, tree.root, logprob={tree.root: 0.0})
        return row

    def _read(self, parts: Sequence[int | bytes]) -> CoveringTree:
        tree = CoveringTree(self.tokens)
        for part in parts:
            if isinstance(part, bytes):
                self.grow(tree, part, "the prompt")
            else:
                tree.push_id(part)
        return tree

    def grow(self, tree: CoveringTree, text: bytes, what: str) -> None:
        """Push text into a tree, refusing it as soon as it outgrows the context.

        Raises:
            UsageError: It is too long, or not UTF-8.
        """
        for at in range(0, len(text), 1024):
            tree.push(text[at : at + 1024])
            if len(tree.trunk) >= self.lm.context:
                raise self.too_long(what)

    def too_long(self, what: str) -> UsageError:
        """The error for a text that does not fit into the context."""
        return UsageError(
            f"{what} is longer than the {self.lm.context:,} tokens that {self.lm.name} reads; "
            "shorten it"
        )

    @property
    def start_id(self) -> int:
        """The token that stands before a text (see `start_token`)."""
        return start_token(self.lm, self.tokens)

    def close(self, row: int) -> None:
        """Forget a row and free its cache."""
        del self._rows[row]
        self.session.free(row)

    def push(self, row: int, data: bytes) -> None:
        """Extend a row's prefix; the model is asked at the next `next_bytes`.

        Raises:
            UsageError: The bytes cannot continue a UTF-8 text.
        """
        self._rows[row].tree.push(data)

    def tree(self, row: int) -> CoveringTree:
        """The row's covering tree (to read, not to change)."""
        return self._rows[row].tree

    def room(self, row: int) -> int:
        """Nodes that still fit below the row's trunk in the model's context."""
        tree = self._rows[row].tree
        return self.lm.context - len(tree.trunk) - len(tree.live_nodes()) - 1

    def discarded(self, row: int) -> int:
        """Tokens that were computed for branches of the row that have died."""
        return self._rows[row].discarded

    # The model ------------------------------------------------------------------------------

    def next_bytes(self, rows: Sequence[int], allowed: Tensor | None = None) -> Tensor:
        """Log-masses of the next byte of each row; one forward call for all of them.

        Args:
            rows: Open rows.
            allowed: Entries that will be drawn from  # bool [rows, 257]; all by default. Nothing
                is masked: truncated token distributions must leave some of their mass there.

        Returns:
            `[rows, 257]` on the CPU in nats, unnormalised: a constant of the row is left out.
            Entry 256 is `stop`. What is missing from a vector's sum is the mass of continuations
            that are not valid (see `filtered`).
        """
        self.refresh(rows)
        wanted = torch.ones(len(rows), STOP + 1, dtype=torch.bool) if allowed is None else allowed
        return torch.stack(list(map(self._gather, rows, wanted))).log().cpu()

    def refresh(self, rows: Sequence[int]) -> None:
        """Feed every node that the model has not seen yet, in one forward call."""
        feeds: dict[int, list[int] | Tree] = {}
        fresh: dict[int, list[Node]] = {}
        for row in rows:
            state = self._rows[row]
            nodes = self._unfed(state)
            if nodes:
                feeds[row], fresh[row] = self._feed_of(state, nodes), nodes
            elif state.root not in state.laws:
                feeds[row], fresh[row] = [], []  # nothing but the trunk
        if feeds:
            step = self.session.feed(feeds)
            wanted: list[tuple[_Row, Node]] = []
            places: list[tuple[int, int]] = []
            for row, nodes in fresh.items():
                state = self._rows[row]
                state.ids.update(zip(nodes, step.nodes.get(row, []), strict=True))
                before = step.new_tokens[row] - len(nodes)
                if state.root not in state.laws:
                    wanted.append((state, state.root))
                    places.append((row, before - 1))
                keep = set(state.tree.live_nodes()) | {state.tree.root}
                for index, node in enumerate(nodes):
                    if node in keep:
                        wanted.append((state, node))
                        places.append((row, before + index))
            self._store(wanted, step.logits_at(places))
        for row in rows:
            self._settle(self._rows[row])

    def _unfed(self, state: _Row) -> list[Node]:
        """Nodes that the Session lacks, parents first: new trunk tokens, then new branches."""
        nodes, node = [], state.tree.root
        while node is not state.root:
            nodes.append(node)
            assert node.parent is not None
            node = node.parent
        nodes = [*reversed(nodes), *sorted(state.tree.live_nodes(), key=lambda n: n.end)]
        return [node for node in nodes if node not in state.ids]

    def _feed_of(self, state: _Row, nodes: list[Node]) -> Tree:
        place = {node: -2 - index for index, node in enumerate(nodes)}
        place[state.root] = -1
        parents = [
            place[node.parent] if node.parent in place else state.ids[node.parent]  # type: ignore[index]
            for node in nodes
        ]
        return Tree([node.token for node in nodes], parents)

    def _store(self, wanted: list[tuple[_Row, Node]], logits: Tensor) -> None:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        kinds = [torch.log_softmax(logits / self._heat, dim=-1)]
        if self._sampling != Sampling(temperature=self._heat):
            kinds.append(filtered_probs(logits, self._sampling).log())
        for kind, values in enumerate(kinds):
            masses = self.buckets.masses(values)
            for (state, node), *law in zip(wanted, values, masses, strict=True):
                (state.laws, state.cut)[kind][node] = _Law(*law)
        for state, node in wanted:  # parents come first
            if node not in state.logprob:
                parent = node.parent
                known = parent is not None and parent in state.laws and parent in state.logprob
                state.logprob[node] = (
                    state.logprob[parent] + float(state.laws[parent].values[node.token])  # type: ignore[index]
                    if known
                    else 0.0
                )

    def _settle(self, state: _Row) -> None:
        """Make the Session's trunk the tree's trunk and drop dead branches."""
        live = state.tree.live_nodes()
        path, node = [], state.tree.root
        while node is not state.root:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        gone = len(state.ids) - len(live) - len(path)
        if path or gone:
            self.session.keep(
                state.session_row,
                [state.ids[node] for node in reversed(path)],
                [state.ids[node] for node in live],
            )
        state.discarded += gone
        state.root = state.tree.root
        state.ids = {node: state.ids[node] for node in live}
        alive = {*live, state.root}
        tables: tuple[dict[Node, Any], ...] = (state.laws, state.cut, state.logprob)
        for table in tables:
            for node in [node for node in table if node not in alive]:
                del table[node]

    def _gather(self, row: int, allowed: Tensor) -> Tensor:
        state = self._rows[row]
        laws = state.cut or state.laws
        total = self._masses(state, laws, self.filtered)
        if state.cut and not float(total.cpu()[allowed].sum()) > 0:
            laws = state.laws
            total = self._masses(state, laws, self.filtered)
        if self.filtered:
            state.invalid = 1 - float(total.sum() / self._masses(state, laws, False).sum())
        return total

    def _masses(self, state: _Row, laws: dict[Node, _Law], filtered: bool) -> Tensor:
        heads = state.tree.heads()
        top = max(state.logprob[head.node] for head in heads)
        total = laws[heads[0].node].masses.new_zeros(STOP + 1)
        for head in heads:
            weight = math.exp(state.logprob[head.node] - top)
            leaves = self.leaves_at(state.tree, head, filtered)
            total.add_(weight * self.bytes_at(head, *laws[head.node], leaves))
        return total

    def invalid(self, row: int) -> float:
        """Share of the last vector's mass on invalid leaves that `filtered` took out; 0 without."""
        return self._rows[row].invalid

    def leaves_at(self, tree: CoveringTree, head: Head, filtered: bool) -> np.ndarray | None:
        """The candidates at one head where they must be listed; `None` where tables serve."""
        return tree.leaves(head, filtered, True) if filtered or head.added else None

    def bytes_at(
        self, head: Head, values: Tensor, mass: Tensor, leaves: np.ndarray | None = None
    ) -> Tensor:
        """Probability by next byte of the tokens that may follow at one head.

        Args:
            head: A node and the bytes walked since its end.
            values: Log-probabilities of the next token there  # [vocabulary]
            mass: Those of ordinary tokens summed by first byte  # [257]
            leaves: The candidates, from `leaves_at`.

        Returns:
            `[257]`; entry 256 is `stop`, which only the end of a complete text can have.
        """
        if leaves is not None:
            total = self._sum(values, *self.buckets.split(leaves, head.walked))
            return total + self.buckets.stop(values) if head.ends else total
        if head.walked:
            return self._sum(values, *self.buckets.after(head.walked))
        return mass + self.buckets.ending(values) if head.ends else mass

    def _sum(self, values: Tensor, ids: Tensor, following: Tensor) -> Tensor:
        probs = values[ids].exp()
        return probs.new_zeros(STOP + 1).index_add_(0, following, probs)

    def only_end(self, tree: CoveringTree) -> bool:
        """Whether the end of a prefix is the only place where its text can go on.

        Then the byte model and plain tokenization are the same model.
        """
        places = [
            head
            for head in tree.heads()
            if not head.walked or head.added or len(self.buckets.after(head.walked)[0])
        ]
        return len(places) == 1 and not places[0].walked

    def end_of_text(self, row: int) -> tuple[Node, Tensor]:
        """Where the prefix ends as a complete text, and the next byte's masses there  # [257]."""
        state = self._rows[row]
        node = state.tree.exact()
        law = state.laws[node]
        return node, law.masses + self.buckets.ending(law.values)

    def last_token(self, row: int) -> int:
        """The last token of the prefix taken as a complete text."""
        return self._rows[row].tree.exact().token

    def before_last(self, row: int) -> tuple[bytes, Tensor] | None:
        """The last token's bytes and the next-token log-probabilities before it  # [vocabulary].

        `None` where the tree has already committed it: no longer token starts with its bytes.
        """
        state = self._rows[row]
        node = state.tree.exact()
        spelling = self.tokens.spelling[node.token] if node.token >= 0 else None
        if spelling is None or node.parent is None or node.parent not in state.laws:
            return None
        return spelling, state.laws[node.parent].values

    def settle_on(self, row: int, node: Node) -> None:
        """Make the path to a live node the row's trunk; the Session keeps the row, the reader not.

        The caller owns the Session's row from here on.
        """
        state = self._rows.pop(row)
        path: list[int] = []
        at = node
        while at is not state.root:
            path.append(state.ids[at])
            assert at.parent is not None
            at = at.parent
        self.session.keep(state.session_row, path[::-1])

    def cover(self, row: int) -> list[tuple[Node, int, float]]:
        """The minimal cover of a row's prefix: (node, leaf token, log-probability in nats).

        Every valid text that begins with the prefix passes through exactly one leaf (paper,
        definition 3.1). Leaves are filtered by validity. Log-probabilities leave out the same
        constant of the row as `next_bytes`, and know of no truncation. Where no longer token fits
        and all of the prefix is settled, the next token is free: the leaves are the whole
        vocabulary at the end.
        """
        self.refresh([row])
        state = self._rows[row]
        places: dict[tuple[Node, int], None] = {}
        for head in state.tree.heads():
            if head.walked:
                ids = state.tree.leaves(head, True, False).tolist()
                places.update(((head.node, token), None) for token in ids)
            elif head.node is not state.root and head.node.parent is not None:
                # Nearly always a leaf of its parent; not so the bytes of half a character that a
                # vocabulary of characters may not have.
                places[head.node.parent, head.node.token] = None
        if not places:
            node = state.tree.exact()
            places = dict.fromkeys((node, token) for token in range(self.lm.vocabulary))
        values = {node: state.laws[node].values.tolist() for node in {node for node, _ in places}}
        return [(node, token, state.logprob[node] + values[node][token]) for node, token in places]

    def prefix_logprob(self, row: int) -> float:
        """Log-probability of a row's prefix in nats: of all valid texts that begin with it.

        That of the trunk and, given the trunk, of the cover. The row's first token is taken as
        given: open it with `start` for that of the whole text. Runs the model over the trunk once
        more, since streaming does not ask it about tokens that a long push settles.
        """
        cover = torch.tensor([logprob for _, _, logprob in self.cover(row)], dtype=torch.float64)
        state = self._rows[row]
        total = float(cover.logsumexp(0)) - state.logprob[state.root]
        again, trunk = self.session.add(state.tree.trunk), state.tree.trunk
        try:
            step = self.session.feed({again: []})
            for first in range(1, len(trunk), LOGITS_AT_ONCE):
                ids = trunk[first : first + LOGITS_AT_ONCE]
                places = [(again, at) for at in range(first - 1, first - 1 + len(ids))]
                values = (step.logits_at(places).double() / self._heat).log_softmax(-1)
                total += float(values[range(len(ids)), ids].sum())
        finally:
            self.session.free(again)
        return total


def normalise(masses: Tensor) -> Tensor:
    """Log-masses as log-probabilities: each vector sums to one  # [..., 257]."""
    return torch.log_softmax(masses, dim=-1)
