"""The streaming valid covering tree of a byte prefix.

`CoveringTree` takes a prefix byte by byte and keeps every valid token sequence that covers it: a
committed trunk, which all of them share, and above it a handful of live nodes. Layers, from the
outside in: bytes become characters; added tokens are found in the characters, leftmost and
longest first, as the tokenizer does before anything else; the text between them is a `Segment`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmsmith.errors import UsageError
from lmsmith.methods.byte_sampler.pretokens import continuation_bytes
from lmsmith.methods.byte_sampler.segment import Node, Segment
from lmsmith.methods.byte_sampler.vocabulary import ByteTokens

__all__ = ["CoveringTree", "Head", "Node"]

_Move = tuple[int, int, int]
"""From one character of the unsettled region to another, by an added token or (-1) as text."""


@dataclass(slots=True, eq=False)
class Head:
    """A place where the next token may be read.

    Attributes:
        node: The token before it.
        walked: Bytes of the next token that are known; empty at the exact end of the prefix, where
            any ordinary token may follow.
        fresh: The token may start a pre-token, so it need not be valid after `node`.
        joins: The token may continue the pre-token of `node`.
        added: The candidates are added tokens that start with `walked`.
        ends: The prefix, taken as a complete text, ends with `node`: `stop` and added tokens may
            follow.
    """

    node: Node
    walked: bytes
    fresh: bool
    joins: bool = False
    added: bool = False
    ends: bool = False


class CoveringTree:
    """The valid covering tree of a growing byte prefix.

    Args:
        tokens: The vocabulary.

    Attributes:
        tokens: The vocabulary.
        root: End of the committed trunk; token -1 while it is empty.
        trunk: Token ids of the trunk.
        pushed: Bytes taken so far.
    """

    def __init__(self, tokens: ByteTokens) -> None:
        self.tokens = tokens
        self.root = Node(-1, None, 0, 0)
        self.trunk: list[int] = []
        self.pushed = 0
        self._made = 1
        self._nodes: dict[tuple[Node, int], Node] = {}  # so that each node is made once
        self._limit = 64
        self._pending = b""  # first bytes of an unfinished character
        self._half: Segment | None = None  # the last segment with `_pending`, made on demand
        self._heads: list[Head] | None = None
        self._segment = Segment(tokens, self.root)  # at the last whole character
        # The region: characters from the earliest unfinished match of an added token on. `_moves`
        # leads from its start to the end, taking no unfinished match; `_live` says where those are.
        self._region = ""
        self._moves: dict[_Move, Segment] = {}
        self._start = self._segment
        self._live: list[tuple[int, Node]] = []

    # Growing --------------------------------------------------------------------------------

    def push(self, data: bytes) -> None:
        """Extend the prefix; any chunking gives the same tree.

        Raises:
            UsageError: The bytes cannot continue a UTF-8 text, or cannot be tokenized. Bytes
                before the offending one have been taken.
        """
        for byte in data:
            if byte not in continuation_bytes(self._pending):
                raise UsageError(
                    f"byte 0x{byte:02x} at position {self.pushed} cannot continue a UTF-8 text"
                )
            pending = self._pending + bytes((byte,))
            if continuation_bytes(pending) is _ANY:
                self._add(pending.decode())
                pending = b""
            self._pending, self._half, self._heads = pending, None, None
            self.pushed += 1

    def push_id(self, token: int) -> None:
        """Put a token, special or not, after the prefix, which it ends as a complete text.

        Raises:
            UsageError: The id is not in the vocabulary, or the prefix ends inside a character.
        """
        if not 0 <= token < self.tokens.size:
            raise UsageError(f"token id {token} is not in 0..{self.tokens.size - 1}")
        if self._pending:
            raise UsageError("a token id cannot follow half a character; finish the text first")
        spelling = self.tokens.spelling[token] or self.tokens.added.get(token) or b""
        node = self._intern(self._segment.finished(), token, len(spelling))
        self._segment = self._start = Segment(self.tokens, node)
        self._region, self._moves, self._live, self._heads = "", {}, [], None
        self.pushed += len(spelling)
        self._commit()

    def fork(self) -> CoveringTree:
        """An independent copy; the nodes so far are shared."""
        copy = object.__new__(CoveringTree)
        copy.__dict__.update(self.__dict__)
        copy.trunk, copy._nodes, copy._moves = [*self.trunk], {**self._nodes}, {**self._moves}
        return copy

    def _add(self, character: str) -> None:
        if not self._region and character not in self.tokens.literal_starts:
            self._segment = self._start = self._segment.push(character, self.root, self._intern)
        else:
            self._search(self._region + character)
        self._commit()

    def _search(self, region: str) -> None:
        """Find added tokens, finished and unfinished, in the region."""
        tokens, at, segment = self.tokens, 0, self._start
        moves: dict[_Move, Segment] = {}
        live: list[tuple[int, Segment]] = []
        while at < len(region):
            stop, unfinished = tokens.match(region, at)
            if unfinished:
                live.append((at, segment))
            move = (at, stop or at + 1, tokens.literals[region[at:stop]] if stop else -1)
            known = self._moves.get(move)
            if known is None and stop:
                length = len(region[at:stop].encode())
                known = Segment(tokens, self._intern(segment.finished(), move[2], length))
            elif known is None:
                known = segment.push(region[at], self.root, self._intern)
            segment = moves[move] = known
            at = move[1]
        first = live[0][0] if live else len(region)
        self._start = live[0][1] if live else segment
        self._segment = segment
        self._region = region[first:]
        self._live = [(at - first, place.finished()) for at, place in live]
        self._moves = {
            (at - first, stop - first, token): segment
            for (at, stop, token), segment in moves.items()
            if at >= first
        }

    def _intern(self, parent: Node, token: int, length: int) -> Node:
        node = self._nodes.get((parent, token))
        if node is None:
            end = parent.end + length
            node = self._nodes[parent, token] = Node(token, parent, end, self._made)
            self._made += 1
        return node

    def _commit(self) -> None:
        """Make what all heads share the trunk."""
        heads = _nodes_of(self._segment)
        heads.update((node, None) for _, node in self._live)
        nodes = iter(heads)
        shared = next(nodes)
        for node in nodes:
            shared = _shared(shared, node)
        path = []
        while shared is not self.root:
            path.append(shared)
            shared = _parent(shared)
        if path:
            self.root = path[0]
            self.trunk.extend(node.token for node in reversed(path))
        if len(self._nodes) > self._limit:
            self._forget()

    def _forget(self) -> None:
        """Drop nodes from the table that no state above the trunk needs."""
        keep: set[Node] = set()
        for segment in (self._start, self._segment, *self._moves.values()):
            for end in _nodes_of(segment):
                node = end
                while node.depth > self.root.depth and node not in keep:
                    keep.add(node)
                    node = _parent(node)
        self._nodes = {key: node for key, node in self._nodes.items() if node in keep}
        self._limit = 64 + 2 * len(self._nodes)

    # Reading --------------------------------------------------------------------------------

    def heads(self) -> list[Head]:
        """The live places where the next token may be read, without repeats."""
        if self._heads is None:
            self._heads = self._find_heads()
        return self._heads

    def _find_heads(self) -> list[Head]:
        tokens, segment = self.tokens, self._now()
        ends = None if self._pending else segment.finished()
        found: dict[tuple[Node, bytes], Head] = {}
        for strand in segment.strands.values():
            for node, walked, fresh in strand.places:
                head = found.get((node, walked))
                if head is None:
                    head = Head(node, walked, fresh, not fresh, False, node is ends and not walked)
                    found[node, walked] = head
                elif fresh:
                    head.fresh = True
                else:
                    head.joins = True
            if not self._pending:
                node = strand.finished
                head = found.get((node, b""))
                if head is None:
                    head = found[node, b""] = Head(node, b"", True, False, False, node is ends)
                head.fresh = True
        heads = list(found.values())
        for at, node in [*self._live, (len(self._region), self._segment.finished())]:
            walked = self._region[at:].encode() + self._pending
            if walked and tokens.added_after(walked):
                heads.append(Head(node, walked, fresh=True, added=True))
        return heads

    def exact(self) -> Node:
        """The end of the canonical tokenization of the prefix, taken as a complete text.

        Inside a character: of one of the ways to write its first bytes.
        """
        return self._now().finished()

    def live_nodes(self) -> list[Node]:
        """Nodes above the root up to the heads, parents first."""
        live: dict[Node, None] = {}
        for head in self.heads():
            node = head.node
            while node is not self.root and node not in live:
                live[node] = None
                node = _parent(node)
        return sorted(live, key=lambda node: node.order)

    def allowed(self) -> np.ndarray:
        """Which bytes keep the prefix a beginning of UTF-8 text  # bool [256]."""
        allowed = np.zeros(256, dtype=bool)
        allowed[list(continuation_bytes(self._pending))] = True
        return allowed

    def leaves(self, head: Head, filtered: bool, inclusive: bool) -> np.ndarray:
        """Ids of the tokens that may be read at a head.

        Args:
            head: One of `heads()`.
            filtered: Leave out tokens that no valid text has after `head.node`. Otherwise only
                their first bytes are checked.
            inclusive: The head at the exact end has the whole ordinary vocabulary (and added
                tokens), the others tokens longer than `walked`. If not, the exact end has none and
                the others have also those that spell just `walked`: a minimal cover of the prefix.
        """
        tokens, walked = self.tokens, head.walked
        if head.added:
            candidates = tokens.added_after(walked)
            return _ids([t for spelling, t in candidates if not inclusive or spelling != walked])
        if not walked:
            if not inclusive:
                return _ids([])
            ids = self._filtered_end(head) if filtered else tokens.sorted_ids
            added = [t for _, t in tokens.added_after(b"") if not filtered or self._starts_added(t)]
            return np.concatenate([ids, _ids(added)]) if head.ends and added else ids
        low, high = tokens.range(walked)
        if inclusive:
            low += len(tokens.step(walked)[1])
        ids = tokens.sorted_ids[low:high]
        if not filtered:
            return ids
        if head.fresh:
            return _ids([t for t in ids.tolist() if tokens.reachable(t) or tokens.whole_words])
        return _ids([t for t in ids.tolist() if tokens.valid(head.node.token, t)])

    def _filtered_end(self, head: Head) -> np.ndarray:
        """Ordinary tokens that some valid text has right after the prefix."""
        tokens, last, kept = self.tokens, head.node.token, []
        if self._pending:
            following = continuation_bytes(self._pending)
            for token in tokens.sorted_ids.tolist():
                if tokens.first_byte(token) in following and tokens.inside(last, token):
                    kept.append(token)
            return _ids(kept)
        for opening, ids in tokens.by_opening().items():
            fresh, joins = self._segment.follows(opening).get(head.node, (False, False))
            for token in ids if fresh or joins else ():
                if (fresh and (tokens.reachable(token) or tokens.whole_words)) or (
                    joins and tokens.valid(last, token)
                ):
                    kept.append(token)
        return _ids(kept)

    def _starts_added(self, token: int) -> bool:
        """Whether an added token right after the prefix would be found there."""
        content = self.tokens.added_text(token)
        for at, _ in self._live:
            text, place = self._region + content, at
            while place < len(self._region):
                place = self.tokens.match(text, place)[0] or place + 1
            if place != len(self._region):
                return False
        return True

    def _now(self) -> Segment:
        if not self._pending:
            return self._segment
        if self._half is None:
            self._half = self._segment.half(self._pending, self._intern)
        return self._half


_ANY = continuation_bytes(b"")


def _ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent


def _shared(one: Node, other: Node) -> Node:
    """The last token that the paths to two nodes have in common."""
    while one is not other:
        if one.depth >= other.depth:
            one = _parent(one)
        else:
            other = _parent(other)
    return one


def _nodes_of(segment: Segment) -> dict[Node, None]:
    nodes: dict[Node, None] = {}
    for strand in segment.strands.values():
        nodes[strand.end] = None
        nodes[strand.finished] = None
        for place in strand.places:
            nodes[place.node] = None
    return nodes
