"""Log-probability of given texts, a byte at a time, for batches of texts in few forward calls.

The covering trees of all prefixes of a text share their nodes: about one node a byte. So a text is
scored like a tree with one node a byte, not with a forward call a byte.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lmsmith.methods.byte_sampler.buckets import STOP
from lmsmith.methods.byte_sampler.reader import ByteReader
from lmsmith.methods.byte_sampler.tree import CoveringTree, Head, Node
from lmsmith.models.session import Tree

_LOGITS_AT_ONCE = 64  # nodes whose full next-token distributions are in memory together


@dataclass
class _Text:
    """One text's trees, known in full before the model is asked."""

    row: int
    created: list[list[Node]]  # nodes that appear with each prefix
    roots: list[Node]  # end of the trunk at each prefix
    live: list[list[Node]]  # live nodes at each prefix
    uses: dict[Node, list[tuple[int, Head, np.ndarray | None]]]  # prefixes where it is a head
    masses: Tensor  # log-mass by next byte  # [bytes + 1, 257]
    logprob: dict[Node, float] = field(default_factory=dict)
    children: dict[Node, list[Node]] = field(default_factory=lambda: defaultdict(list))
    ids: dict[Node, int] = field(default_factory=dict)


def score(
    reader: ByteReader,
    texts: Sequence[bytes],
    contexts: Sequence[bytes] | None = None,
    chunk: int = 64,
) -> list[Tensor]:
    """Next-byte distributions at every prefix of every text.

    Args:
        reader: The model as bytes.
        texts: UTF-8 texts, all in one batch.
        contexts: What stands before each text and is not scored; nothing by default.
        chunk: Bytes of each text that one forward call covers.

    Returns:
        For each text `logprobs  # [bytes + 1, 257]` in nats, normalised, on the CPU: row i is the
        distribution after the first i bytes; entry 256 is `stop`.

    Raises:
        UsageError: A text is not UTF-8 or is longer than the model's context.
    """
    contexts = contexts or [b""] * len(texts)
    plans = [_plan(reader, text, before) for text, before in zip(texts, contexts, strict=True)]
    longest = max(len(plan.created) for plan in plans)
    for begin in range(0, longest, chunk):
        _advance(reader, plans, begin, begin + chunk)
    for plan in plans:
        reader.session.free(plan.row)
    return [torch.log_softmax(plan.masses, dim=-1).cpu() for plan in plans]


def byte_logprobs(distributions: Tensor, text: bytes) -> Tensor:
    """Log-probability in nats of each byte of `text`  # [bytes]."""
    index = torch.tensor(list(text), dtype=torch.long)
    return distributions[: len(text)].gather(1, index[:, None])[:, 0]


def bits_per_byte(distributions: Tensor, text: bytes) -> float:
    """Mean of -log2 of the bytes' probabilities."""
    return float(-byte_logprobs(distributions, text).mean() / math.log(2))


def _plan(reader: ByteReader, text: bytes, context: bytes) -> _Text:
    tree = CoveringTree(reader.tokens)
    tree.push_id(reader.start_id)
    tree.push(context)
    row = reader.session.add(tree.trunk)
    first = [tree.root, *sorted(tree.live_nodes(), key=lambda node: node.end)]
    plan = _Text(row, [first], [tree.root], [tree.live_nodes()], defaultdict(list), torch.empty(0))
    plan.logprob[tree.root] = 0.0
    known = set(first)
    _note_heads(reader, tree, plan, 0)
    for index in range(len(text)):
        tree.push(text[index : index + 1])
        alive = tree.live_nodes()
        new = sorted({tree.root, *alive} - known, key=lambda node: node.end)
        known.update(new)
        plan.created.append(new)
        plan.roots.append(tree.root)
        plan.live.append(alive)
        _note_heads(reader, tree, plan, index + 1)
    for node in known:
        if node.parent in known:
            plan.children[node.parent].append(node)
    dtype = torch.float64 if reader.lm.dtype == torch.float64 else torch.float32
    plan.masses = torch.full((len(text) + 1, STOP + 1), -math.inf, dtype=dtype)
    return plan


def _note_heads(reader: ByteReader, tree: CoveringTree, plan: _Text, index: int) -> None:
    for head in tree.heads():
        leaves = reader.leaves_at(tree, head, reader.filtered)
        plan.uses[head.node].append((index, head, leaves))


def _advance(reader: ByteReader, plans: Sequence[_Text], begin: int, end: int) -> None:
    """Feed the nodes of prefixes `begin..end` of every text and sum what they say."""
    feeds: dict[int, Tree | list[int]] = {}
    nodes_of: dict[int, list[Node]] = {}
    for plan in plans:
        nodes = [node for new in plan.created[begin:end] for node in new]
        if begin == 0:
            nodes = nodes[1:]  # the trunk's end: computed with the trunk itself
        if not nodes and begin:
            continue
        nodes_of[plan.row] = nodes
        if nodes:
            root = plan.roots[max(begin - 1, 0)]
            place = {node: -2 - index for index, node in enumerate(nodes)}
            place[root] = -1
            feeds[plan.row] = Tree(
                [node.token for node in nodes],
                [
                    place[node.parent] if node.parent in place else plan.ids[node.parent]  # type: ignore[index]
                    for node in nodes
                ],
            )
        else:
            feeds[plan.row] = []  # nothing but the trunk
    if not feeds:
        return
    step = reader.session.feed(feeds)
    places: list[tuple[int, int]] = []
    wanted: list[tuple[_Text, Node]] = []
    for plan in plans:
        if plan.row not in nodes_of:
            continue
        nodes = nodes_of[plan.row]
        plan.ids.update(zip(nodes, step.nodes.get(plan.row, []), strict=True))
        before = step.new_tokens[plan.row] - len(nodes)
        if begin == 0:
            wanted.append((plan, plan.roots[0]))
            places.append((plan.row, before - 1))
        for index, node in enumerate(nodes):
            wanted.append((plan, node))
            places.append((plan.row, before + index))
    for first in range(0, len(places), _LOGITS_AT_ONCE):
        part = slice(first, first + _LOGITS_AT_ONCE)
        logits = step.logits_at(places[part])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        values = torch.log_softmax(logits, dim=-1)
        masses = reader.buckets.masses(values)
        for (plan, node), value, mass in zip(wanted[part], values, masses, strict=True):
            _spread(reader, plan, node, value, mass)
    for plan in plans:
        if plan.row in nodes_of:
            _settle(reader, plan, begin, end)


def _spread(reader: ByteReader, plan: _Text, node: Node, value: Tensor, mass: Tensor) -> None:
    """Add one node's next-token distribution to every prefix at which the node is a head."""
    for child in plan.children.get(node, ()):
        plan.logprob[child] = plan.logprob[node] + float(value[child.token])
    for index, head, leaves in plan.uses.get(node, ()):
        probs = reader.bytes_at(head, value, mass, leaves).log().to(plan.masses)
        plan.masses[index] = torch.logaddexp(plan.masses[index], probs + plan.logprob[node])


def _settle(reader: ByteReader, plan: _Text, begin: int, end: int) -> None:
    """Commit the trunk and drop the branches that no later prefix can reach."""
    last = min(end, len(plan.roots)) - 1
    node, path = plan.roots[last], []
    while node is not plan.roots[max(begin - 1, 0)]:
        path.append(plan.ids[node])
        assert node.parent is not None
        node = node.parent
    live = plan.live[last]
    reader.session.keep(plan.row, path[::-1], [plan.ids[node] for node in live])
