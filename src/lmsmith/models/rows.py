"""The bookkeeping of one row of a Session: its trunk, its live nodes, a cache lane a strength.

Pure: no tensors. Not for: running the model (`lmsmith.models.session`) or moving keys
(`lmsmith.models.kv`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lmsmith.errors import UsageError
from lmsmith.models.kv import Block, Lane, Spot


class Node(NamedTuple):
    """A token that branches off the trunk; `parent` is a node id or -1 for the trunk's end."""

    token: int
    parent: int
    depth: int


@dataclass
class Feed:
    """What is asked of a row, checked: trunk tokens, or nodes where `parents` is a list."""

    row: int
    ids: list[int]
    parents: list[int] | None
    depths: list[int] = field(default_factory=list)


class Plan(NamedTuple):
    """What it takes: the block to compute and the node ids of its tokens after `block.linear`."""

    feed: Feed
    block: Block
    nodes: list[int]


@dataclass
class Row:
    """One sequence.

    Attributes:
        id: The row's id in the session.
        tokens: The trunk.
        strength: Current adapter strength.
        nodes: Live nodes by id, parents before children.
        next_node: Id of the next new node.
        lanes: The cache under each strength visited; each may lack tokens at its end.
    """

    id: int
    tokens: list[int]
    strength: float
    nodes: dict[int, Node] = field(default_factory=dict)
    next_node: int = 0
    lanes: dict[float, Lane] = field(default_factory=dict)

    def ask(self, ids: list[int], parents: Sequence[int] | None) -> Feed:
        """Check a feed against the row as it is; changes nothing.

        Args:
            ids: Token ids.
            parents: `Tree.parents`, or `None` for tokens that extend the trunk.

        Raises:
            UsageError: Nothing to compute, a bad parent, or a linear feed beside live nodes.
        """
        if parents is None:
            if self.nodes:
                raise UsageError(
                    f"row {self.id} has {len(self.nodes)} live nodes; keep some or crop before "
                    "feeding a list"
                )
            lane = self.lanes.get(self.strength)
            if not ids and len(self.tokens) == (lane.computed if lane else 0):
                raise UsageError(f"row {self.id} was fed no tokens and lacks none")
            return Feed(self.id, ids, None)
        if not ids or len(ids) != len(parents):
            raise UsageError(
                f"a tree needs at least one token and one parent a token; row {self.id} was given "
                f"{len(ids)} tokens and {len(parents)} parents"
            )
        feed = Feed(self.id, ids, [])
        resolved: list[int] = []
        for i, named in enumerate(parents):
            parent = named
            if named >= 0:
                depth = self.alive(named).depth + 1
            elif named == -1:
                depth = len(self.tokens)
            elif -2 - named < i:
                depth = feed.depths[-2 - named] + 1
                parent = self.next_node - 2 - named
            else:
                raise UsageError(
                    f"token {i} of row {self.id}'s tree names token {-2 - named} as its parent, "
                    "which does not come before it"
                )
            resolved.append(parent)
            feed.depths.append(depth)
        feed.parents = resolved
        return feed

    def plan(self, feed: Feed) -> Plan:
        """What the row's current lane must compute: what it lacks, then what is asked.

        The lane is there, and dense if it is to get trunk tokens.
        """
        lane = self.lanes[self.strength]
        trunk = self.lacks()
        if feed.parents is None:
            trunk = trunk + feed.ids
            return Plan(feed, Block(lane, trunk, len(trunk)), [])
        lacking = [node for node in self.nodes if node not in lane.nodes]
        nodes = lacking + list(range(self.next_node, self.next_node + len(feed.ids)))
        parents = [self.nodes[node].parent for node in lacking] + feed.parents
        ids = trunk + [self.nodes[node].token for node in lacking] + feed.ids
        depths = [self.nodes[node].depth for node in lacking] + feed.depths
        block = Block(lane, ids, len(trunk), depths)
        paths: dict[int, list[int]] = {-1: lane.tail}  # node -> slots of the tail and the path
        slots = range(lane.end + len(trunk), lane.end + len(ids))
        for node, parent, slot in zip(nodes, parents, slots, strict=True):
            if parent not in paths:
                paths[parent] = lane.tail + [lane.nodes[a].slot for a in self.ancestors(parent)]
            block.seen.append(paths[parent])
            paths[node] = [*paths[parent], slot]
        return Plan(feed, block, nodes)

    def lacks(self) -> list[int]:
        """Trunk tokens that the current lane lacks."""
        lane = self.lanes.get(self.strength)
        return self.tokens[lane.computed if lane else 0 :]

    def commit(self, plan: Plan) -> None:
        """Take up what was computed."""
        feed, block = plan.feed, plan.block
        lane = block.lane
        for i, node in enumerate(plan.nodes):
            lane.nodes[node] = Spot(lane.end + block.linear + i, block.depths[i])
        lane.dense += block.linear
        lane.end += len(block.ids)
        if feed.parents is None:
            self.tokens.extend(feed.ids)
            return
        for token, parent, depth in zip(feed.ids, feed.parents, feed.depths, strict=True):
            self.nodes[self.next_node] = Node(token, parent, depth)
            self.next_node += 1

    def undo(self, plan: Plan) -> None:
        """Take back what `commit` took up, as if it had not been asked for."""
        feed = plan.feed
        if feed.parents is None:
            self.crop(len(self.tokens) - len(feed.ids))
            return
        for node in plan.nodes[-len(feed.ids) :]:
            del self.nodes[node], plan.block.lane.nodes[node]
        plan.block.lane.settle()

    def crop(self, length: int) -> None:
        """Drop the live nodes and the tokens from `length` on.

        Raises:
            UsageError: The row has fewer tokens.
        """
        if not 0 <= length <= len(self.tokens):
            raise UsageError(
                f"row {self.id} has {len(self.tokens)} tokens; it cannot be cropped to {length}"
            )
        del self.tokens[length:]
        self.nodes.clear()
        for lane in self.lanes.values():
            del lane.tail[max(length - lane.dense, 0) :]
            lane.dense = min(lane.dense, length)
            lane.nodes.clear()
            lane.settle()

    def keep(self, path: Sequence[int], nodes: Sequence[int]) -> None:
        """Make a path of nodes part of the trunk; see `Session.keep`."""
        end = -1
        for node in path:
            if self.alive(node).parent != end:
                raise UsageError(
                    f"node {node} of row {self.id} does not follow "
                    f"{'the trunk' if end < 0 else f'node {end}'}; a path is given from the end "
                    "of the trunk, parent before child"
                )
            end = node
        stay = set(nodes)
        for node in stay:
            if self.alive(node).parent not in stay | {end} or node in path:
                raise UsageError(
                    f"node {node} of row {self.id} cannot stay: its parent is neither the end of "
                    "the path nor a node that stays"
                )
        for lane in self.lanes.values():
            for node in path:
                if node not in lane.nodes:
                    break
                lane.tail.append(lane.nodes[node].slot)
            lane.nodes = {node: spot for node, spot in lane.nodes.items() if node in stay}
            lane.settle()
        self.tokens.extend(self.nodes[node].token for node in path)
        self.nodes = {
            node: kept._replace(parent=-1) if kept.parent == end else kept
            for node, kept in self.nodes.items()
            if node in stay
        }

    def ancestors(self, node: int) -> list[int]:
        """Node ids from `node` up to the trunk, `node` first."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.nodes[node].parent
        return path

    def alive(self, node: int) -> Node:
        """A live node.

        Raises:
            UsageError: It is not alive.
        """
        if node not in self.nodes:
            raise UsageError(
                f"row {self.id} has no live node {node}; live: {list(self.nodes) or 'none'}"
            )
        return self.nodes[node]

    def fork(self, row: int, duplicate: Callable[[Lane], Lane]) -> Row:
        """The same row under another id, its lanes copied by `duplicate`."""
        lanes = {strength: duplicate(lane) for strength, lane in self.lanes.items()}
        return Row(row, list(self.tokens), self.strength, dict(self.nodes), self.next_node, lanes)
