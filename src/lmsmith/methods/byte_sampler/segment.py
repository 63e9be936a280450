"""The covering tree of one stretch of text between added tokens, grown a character at a time.

A node is the last token of the canonical tokenization of the text up to some byte. A *place* is a
node and the bytes of the text after it, kept while some token starts with those bytes: there the
model may be asked for the next token. While the splits of the open end are not known, every
hypothesis about them has its own *strand* of places; nodes are shared between strands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lmsmith.errors import LmsmithError, UsageError
from lmsmith.methods.byte_sampler.pretokens import Splits
from lmsmith.methods.byte_sampler.vocabulary import SPACE, ByteTokens


class Node:
    """A token in a row's tree, known by identity.

    Attributes:
        token: Token id; -1 for the empty start.
        parent: The token before it.
        end: Bytes of text up to and with this token.
        depth: Tokens up to and with this one.
        order: Rises with creation within a tree.
    """

    __slots__ = ("depth", "end", "order", "parent", "token")

    def __init__(self, token: int, parent: Node | None, end: int, order: int) -> None:
        self.token, self.parent, self.end, self.order = token, parent, end, order
        self.depth: int = 0 if parent is None else parent.depth + 1

    def __repr__(self) -> str:
        return f"Node({self.token}, end={self.end})"


Intern = Callable[[Node, int, int], Node]
"""(parent, token, bytes of the token) -> the node, the same one each time."""


class Place(NamedTuple):
    """Where a token may be read: after `node`, with `walked` of its bytes known."""

    node: Node
    walked: bytes
    fresh: bool  # the token starts a pre-token, so it need not be valid after `node`


class Strand(NamedTuple):
    """One hypothesis about the splits of the open end."""

    places: tuple[Place, ...]
    end: Node  # the text's last token where its last pre-token goes on
    whole: Node | None = None  # the same where the pre-token ends here and is taken unmerged

    @property
    def finished(self) -> Node:
        """The last token where the last pre-token ends with the text."""
        return self.whole or self.end


class Segment:
    """An immutable state: the tree of a text that began after `anchor`'s segment did.

    Args:
        tokens: The vocabulary.
        anchor: The node where the open end begins: a pre-token surely starts there.
        tail: The open end, or what of it still matters to where it is split.
        strands: Its tree under each hypothesis about the splits.
        complete: The hypothesis that holds where the text ends here.
        before: What of the open end stands before `tail`.
    """

    __slots__ = ("anchor", "before", "complete", "strands", "tail", "tokens")

    def __init__(
        self,
        tokens: ByteTokens,
        anchor: Node,
        tail: str = "",
        strands: dict[Splits, Strand] | None = None,
        complete: Splits = (),
        before: str = "",
    ) -> None:
        self.tokens, self.anchor, self.tail, self.before = tokens, anchor, tail, before
        self.strands = strands or {(): _start(anchor)}
        self.complete = complete

    def push(self, character: str, root: Node, intern: Intern) -> Segment:
        """The state after one more character.

        Args:
            character: What the text continues with.
            root: End of the committed trunk; hypotheses that contradict it are dropped.
            intern: Makes nodes.

        Raises:
            UsageError: The character cannot be tokenized.
        """
        tokens = self.tokens
        if tokens.splitter.never:
            strand = _advance(tokens, self.strands[()], character, intern)
            return Segment(tokens, self.anchor, "", {(): strand})
        here, tail = len(self.tail), self.tail + character
        outcomes = tokens.splitter.outcomes(tail)
        strands: dict[Splits, Strand] = {}
        for splits in outcomes.hypotheses:
            split = bool(splits) and splits[-1] == here
            before = self.strands.get(splits[:-1] if split else splits)
            if before is None:
                before = self._replay(splits[:-1] if split else splits, root, intern)
                if before is None:
                    continue
            if split:
                before = _start(before.finished)
            strands[splits] = _advance(tokens, before, character, intern)
        if outcomes.complete not in strands:
            raise LmsmithError(
                f"the tokenizer splits {tail!r} in a way that was not foreseen; "
                "this text cannot be read byte by byte"
            )
        grown = Segment(tokens, self.anchor, tail, strands, outcomes.complete, self.before)
        return grown._cut()._shortened()

    def half(self, pending: bytes, intern: Intern) -> Segment:
        """The state after the first bytes of a character that is not complete yet."""
        tokens = self.tokens
        strands: dict[Splits, Strand] = {}
        options: tuple[bool, ...] = (False,)
        if self.tail:
            options = tokens.splitter.splits_before(self.tail, pending)
        for splits, strand in self.strands.items():
            for split in options:
                before = _start(strand.finished) if split else strand
                key = (*splits, len(self.tail)) if split else splits
                if tokens.kind == "byte-level":
                    strands[key] = _advance_bytes(tokens, before, pending, intern)
                else:
                    strands[key] = _advance_half(tokens, before, pending, intern)
        complete = self.complete
        if complete not in strands:
            complete = (*complete, len(self.tail))
        return Segment(tokens, self.anchor, self.tail, strands, complete, self.before)

    def follows(self, opening: str | bytes) -> dict[Node, tuple[bool, bool]]:
        """After which last token a token may come that begins in a certain way.

        Args:
            opening: Its first character, or the first bytes of one.

        Returns:
            Last token of the text -> (a pre-token starts between them, they share a pre-token).
        """
        splitter, here = self.tokens.splitter, len(self.tail)
        if splitter.never or not self.tail:
            ends = [place for place in self.strands[()].places if not place.walked]
            return {place.node: (place.fresh, not place.fresh) for place in ends}
        if isinstance(opening, bytes):
            options = splitter.splits_before(self.tail, opening)
            ways = [(strand, split) for strand in self.strands.values() for split in options]
        else:
            ways = []
            for splits in splitter.endings(self.tail, opening):
                split = bool(splits) and splits[-1] == here
                strand = self.strands.get(splits[:-1] if split else splits)
                if strand is not None:
                    ways.append((strand, split))
        found: dict[Node, tuple[bool, bool]] = {}
        for strand, split in ways:
            node = strand.finished if split else strand.end
            fresh, joins = found.get(node, (False, False))
            found[node] = (fresh or split, joins or not split)
        return found

    def finished(self) -> Node:
        """The last token where the text ends here."""
        return self.strands[self.complete].finished

    def _replay(self, splits: Splits, root: Node, intern: Intern) -> Strand | None:
        """A strand that was not kept, from the anchor; None where it contradicts the trunk."""
        trunk, node = {}, root
        while node.parent is not None and node.depth > self.anchor.depth:
            trunk[node.parent, node.token] = node
            node = node.parent

        def again(parent: Node, token: int, length: int) -> Node:
            return trunk.get((parent, token)) or intern(parent, token, length)

        strand, start = _start(self.anchor), 0
        for character in self.before:
            strand = _advance(self.tokens, strand, character, again)
        for stop in (*splits, len(self.tail)):
            for character in self.tail[start:stop]:
                strand = _advance(self.tokens, strand, character, again)
            if stop != len(self.tail):
                strand, start = _start(strand.finished), stop
        if root.depth <= self.anchor.depth:
            return strand
        places = tuple(place for place in strand.places if _descends(place.node, root))
        if not _descends(strand.end, root) or not _descends(strand.finished, root):
            return None
        return Strand(places, strand.end, strand.whole)

    def _cut(self) -> Segment:
        """The same state, its open end cut at the last split that all hypotheses share."""
        hypotheses = list(self.strands)
        if not hypotheses[0]:
            return self
        shared = 0
        for columns in zip(*hypotheses, strict=False):
            if len(set(columns)) > 1:
                break
            shared += 1
        splitter = self.tokens.splitter
        while shared:
            at = hypotheses[0][shared - 1]
            outcomes = splitter.outcomes(self.tail[at:])
            moved = {tuple(p - at for p in splits[shared:]): splits for splits in hypotheses}
            if set(outcomes.hypotheses) == set(moved) and splitter.separable(self.tail, at):
                size = len(self.tail[at:].encode())
                anchor = self.strands[self.complete].finished
                goal = anchor.end - size
                while anchor.end > goal and anchor.parent is not None:
                    anchor = anchor.parent
                strands = {key: self.strands[splits] for key, splits in moved.items()}
                return Segment(self.tokens, anchor, self.tail[at:], strands, outcomes.complete)
            shared -= 1
        return self

    def _shortened(self) -> Segment:
        """The same state without the beginning of a long open end that no longer matters."""
        drop = self.tokens.splitter.forgettable(self.tail)
        if not drop:
            return self
        strands = {
            tuple(p - drop for p in splits): strand for splits, strand in self.strands.items()
        }
        complete = tuple(p - drop for p in self.complete)
        before, tail = self.before + self.tail[:drop], self.tail[drop:]
        return Segment(self.tokens, self.anchor, tail, strands, complete, before)


def _descends(node: Node, ancestor: Node) -> bool:
    while node.depth > ancestor.depth:
        assert node.parent is not None
        node = node.parent
    return node is ancestor


def _start(node: Node) -> Strand:
    return Strand((Place(node, b"", True),), node)


def _advance(tokens: ByteTokens, strand: Strand, character: str, intern: Intern) -> Strand:
    if tokens.kind == "byte-level":
        return _advance_bytes(tokens, strand, character.encode(), intern)
    if character == SPACE and tokens.rewrites_spaces:
        character = " "
    if character in tokens.characters:
        return _grow(tokens, strand, character.encode(), intern)
    node = strand.end
    for byte in character.encode():
        token = tokens.byte_ids[byte]
        if token < 0:
            raise _cannot(character)
        node = intern(node, token, 1)
    return _start(node)


def _advance_bytes(tokens: ByteTokens, strand: Strand, data: bytes, intern: Intern) -> Strand:
    for index in range(len(data)):
        strand = _grow(tokens, strand, data[index : index + 1], intern)
    return strand


def _advance_half(tokens: ByteTokens, strand: Strand, pending: bytes, intern: Intern) -> Strand:
    """Unfinished character in a vocabulary of characters: inside a token, or bytes in a row."""
    places = [
        Place(node, walked + pending, fresh)
        for node, walked, fresh in strand.places
        if tokens.step(walked + pending)[0]
    ]
    node = strand.end
    for byte in pending:
        token = tokens.byte_ids[byte]
        if token < 0:
            break
        node = intern(node, token, 1)
    else:
        places.append(Place(node, b"", True))
    return Strand(tuple(places), node)


def _grow(tokens: ByteTokens, strand: Strand, unit: bytes, intern: Intern) -> Strand:
    """Walk every place over the bytes of one base symbol, adding the node that ends there."""
    places: list[Place] = []
    end = whole = None
    for node, before, fresh in strand.places:
        walked = before + unit
        alive, spelled = tokens.step(walked)
        if not alive:
            continue
        places.append(Place(node, walked, fresh))
        for token in spelled:
            if tokens.reachable(token) if fresh else tokens.valid(node.token, token):
                end = intern(node, token, len(walked))
            elif fresh and tokens.whole_words:
                whole = intern(node, token, len(walked))
    if end is None:
        raise _cannot(unit)
    places.append(Place(end, b"", False))
    return Strand(tuple(places), end, whole)


def _cannot(what: bytes | str) -> UsageError:
    return UsageError(f"the tokenizer has no token for {what!r}; leave it out of the text")
