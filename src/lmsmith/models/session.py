"""A batch of token sequences on one model: fed, cropped, forked and branched without recomputation.

The law: after any sequence of feeds, crops, forks, keeps and strength changes, logits equal those
of a from-scratch forward of the kept tokens under the row's current adapter strength.

Not for: where keys lie and how attention reads them (`lmsmith.models.kv`), or which token comes
next (`lmsmith.decoding`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lmsmith.errors import CapabilityError, UsageError
from lmsmith.models.attention import session_attention
from lmsmith.models.head import head_logits
from lmsmith.models.kv import HOLE_LIMIT, KVStore
from lmsmith.models.limits import need_plain_decoder, turning_points
from lmsmith.models.rows import Feed, Plan, Row
from lmsmith.models.sites import Sites
from lmsmith.models.step import Step, Tree

__all__ = ["Session", "Step", "Tree"]

# A second forward call costs about as much as this many padding tokens, for most models.
CALL_COST = 64


class Session:
    """Rows of tokens on one model, their caches, and the model's knobs.

    Several sessions may share a model, each in a thread of its own: their forward passes take
    turns. One session belongs to one thread at a time.

    Attributes:
        forward_calls: Forward passes of the model so far.
        forward_seconds: Wall time inside them and inside the head.
        tokens_computed: Tokens that went through the model, padding not counted.
    """

    def __init__(self, lm: Any, capacity: int = 0) -> None:
        """A session without rows.

        Args:
            lm: An `LM`.
            capacity: Tokens a row to make room for at once; the store grows when it is too small.

        Raises:
            CapabilityError: The model is not a decoder with plain attention.
        """
        self.lm = lm
        need_plain_decoder(lm.model)
        self._decoder = lm.model.get_decoder()
        self._config = self._decoder.config
        parameter = next(lm.model.parameters())
        self._store = KVStore(self._config, parameter.dtype, parameter.device, capacity)
        self._device = parameter.device
        self._vocabulary = lm.model.get_input_embeddings().num_embeddings
        self._sites = Sites(lm.model)
        self._rows: dict[int, Row] = {}
        self._next_row = 0
        self._keyed_by = self._adapter
        self.forward_calls = 0
        self.forward_seconds = 0.0
        self.tokens_computed = 0

    # ------------------------------------------------------------------ rows

    def add(self, tokens: Sequence[int] = (), strength: float | None = None) -> int:
        """A new row; its tokens are computed with its first feed.

        Args:
            tokens: The row's first tokens.
            strength: Adapter strength; by default 1 if the model has an adapter, else 0.

        Returns:
            The row's id, never used twice.

        Raises:
            UsageError: A token id outside the vocabulary, or more tokens than the context.
            CapabilityError: A strength without an adapter.
        """
        ids = self._checked(tokens)
        self._fits(len(ids))
        if strength is None:
            strength = 0.0 if self._adapter is None else 1.0
        row = self._next_row
        self._rows[row] = Row(row, ids, self._usable(strength))
        self._next_row += 1
        return row

    def free(self, row: int) -> None:
        """Drop a row and all its caches."""
        for lane in self._row(row).lanes.values():
            self._store.close(lane)
        del self._rows[row]

    def fork(self, row: int) -> int:
        """A new row equal to `row`, its caches and live nodes included; node ids are the same."""
        twin = self._row(row).fork(self._next_row, self._store.duplicate)
        self._rows[twin.id] = twin
        self._next_row += 1
        return twin.id

    @property
    def rows(self) -> list[int]:
        """Ids of all rows."""
        return list(self._rows)

    def length(self, row: int) -> int:
        """Tokens of a row's trunk."""
        return len(self._row(row).tokens)

    def tokens(self, row: int) -> list[int]:
        """A row's trunk."""
        return list(self._row(row).tokens)

    def live(self, row: int) -> list[int]:
        """Ids of a row's live nodes, parents before children."""
        return list(self._row(row).nodes)

    def strength(self, row: int) -> float:
        """A row's adapter strength."""
        return self._row(row).strength

    def set_strength(self, row: int, strength: float) -> None:
        """Change a row's adapter strength (0 = base model, 1 = as trained) from its next feed on.

        Keys made under another strength are other keys, so the row keeps one cache a strength;
        the one it enters is extended by the tokens it lacks at the next feed.

        Raises:
            UsageError: Not a finite number.
            CapabilityError: A strength without an adapter.
        """
        self._row(row).strength = self._usable(strength)

    def cached_slots(self, row: int) -> int:
        """Cache slots a row takes up over all its strengths, dropped nodes not yet moved over."""
        return sum(lane.end for lane in self._row(row).lanes.values())

    # -------------------------------------------------------- undo and branch

    def crop(self, row: int, length: int) -> None:
        """Drop a row's live nodes and its tokens from `length` on.

        Raises:
            UsageError: The row has fewer tokens.
        """
        self._row(row).crop(length)

    def keep(self, row: int, path: Sequence[int], nodes: Sequence[int] = ()) -> None:
        """Make a path of nodes part of the trunk and drop all nodes but those named.

        Args:
            row: The row.
            path: Node ids from the end of the trunk, each the parent of the next; may be empty.
            nodes: Other nodes that stay alive: descendants of the path's end, each with its
                parent among them or at the path's end.

        Raises:
            UsageError: A node that is not alive, or is not where it is said to be.
        """
        self._row(row).keep(path, nodes)

    # ------------------------------------------------------------------ feed

    def feed(self, work: Mapping[int, Sequence[int] | Tree]) -> Step:
        """Compute new tokens of any rows together.

        A list of ids extends the row's trunk, which must have no live nodes; an empty list is
        allowed while the row has tokens not yet computed. A `Tree` adds nodes. Tokens that the
        row lacks (from `add`, or under its current strength) are computed in the same call.
        Rows of very unequal work are run in separate forward calls where padding would cost more.

        Args:
            work: For each row, a list of token ids or a `Tree`.

        Returns:
            The step; its `logits` follow the last token of each row.

        Raises:
            UsageError: An unknown row, nothing to compute, more tokens than the context, ids
                outside the vocabulary, a bad parent, or a list for a row with live nodes. Nothing
                has changed then, nor if the forward itself fails.
        """
        if not work:
            raise UsageError("nothing to feed: name at least one row")
        if self._adapter is not self._keyed_by:
            self._forget()
        feeds = [self._asked(row, what) for row, what in work.items()]
        plans = []
        for feed in feeds:
            row = self._rows[feed.row]
            lane = row.lanes.get(row.strength)
            if lane is None:
                lane = row.lanes[row.strength] = self._store.open()
            if feed.parents is None or row.lacks() or lane.holes > HOLE_LIMIT:
                self._store.compact(lane)
            plans.append(row.plan(feed))
        step = Step(self._head, list(work))
        done: list[Plan] = []
        try:
            for group in [plans] if self._sites.wanted else _grouped(plans):
                self._run(group, step)
                # Before the next group: its layout may move or grow what this one has written.
                for plan in group:
                    self._rows[plan.feed.row].commit(plan)
                    done.append(plan)
        except BaseException:
            for plan in done:
                self._rows[plan.feed.row].undo(plan)
            raise
        return step

    def _asked(self, row: int, what: Sequence[int] | Tree) -> Feed:
        """Check what is asked of a row; changes nothing."""
        state = self._row(row)
        if isinstance(what, Tree):
            feed = state.ask(self._checked(what.ids), what.parents)
            self._fits(max(feed.depths) + 1)
        else:
            feed = state.ask(self._checked(what), None)
            self._fits(len(state.tokens) + len(feed.ids))
        return feed

    def _forget(self) -> None:
        """Drop the keys that an adapter made which has been replaced; rows make them again."""
        for row in self._rows.values():
            self._usable(row.strength)
            for strength in [strength for strength in row.lanes if strength]:
                self._store.close(row.lanes.pop(strength))
        self._keyed_by = self._adapter

    def _run(self, plans: Sequence[Plan], step: Step) -> None:
        """One forward pass; its hidden states and captures go into the step."""
        layout = self._store.layout([plan.block for plan in plans])
        lanes = [plan.block.lane.index - layout.first for plan in plans]
        strengths = [self._rows[plan.feed.row].strength for plan in plans]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            # First of all: what follows is set on the model, which is this session's from here on.
            stack.enter_context(session_attention(self.lm.model, self._config))
            stack.enter_context(self._timed())
            if any(strengths):
                by_lane = torch.zeros(layout.input_ids.shape[0])
                by_lane[lanes] = torch.tensor(strengths)
                stack.enter_context(self._adapter.at(by_lane.to(self._device)))
            captured: dict[str, Tensor] = {}
            if self._sites.wanted:
                captured = stack.enter_context(self._sites.watched(lanes))
            hidden = self._decoder(
                input_ids=layout.input_ids,
                position_ids=layout.positions,
                attention_mask=layout.mask,
                cache=self._store,
                use_cache=True,
            ).last_hidden_state
        self.forward_calls += 1
        # Copies made outside inference mode can be trained on.
        step.sites = {site: activation.clone() for site, activation in captured.items()}
        step.put(hidden, {plan.feed.row: lane for plan, lane in zip(plans, lanes, strict=True)})
        for plan in plans:
            size = len(plan.block.ids)
            self.tokens_computed += size
            step.new_tokens[plan.feed.row] = size
            step.caught_up[plan.feed.row] = size - len(plan.feed.ids)
            if plan.feed.parents is not None:
                step.nodes[plan.feed.row] = plan.nodes[-len(plan.feed.ids) :]

    def _head(self, hidden: Tensor) -> Tensor:
        """The model's own head on final hidden states: `[..., width]` -> `[..., vocab]`."""
        # Not inference mode: a caller may change these in place.
        with torch.no_grad(), self._timed():
            return head_logits(self.lm.model, hidden)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = self._now()
        yield
        self.forward_seconds += self._now() - began

    def _now(self) -> float:
        if self._device.type == "cuda":  # which returns before its work is done
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    # ----------------------------------------------------------------- knobs

    @contextmanager
    def capture(self, sites: Sequence[str]) -> Iterator[None]:
        """Within the context, feeds also give the activations at these sites (`Step.sites`).

        Raises:
            UnknownNameError: The model has no such site.
        """
        with self._sites.capturing(sites):
            yield

    @contextmanager
    def edit(self, edits: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
        """Within the context, feeds put each site's activation through a function.

        The function takes and gives `[rows, new tokens (padded), width]`, in the order of the
        rows fed. Keys computed meanwhile are kept as they are.

        Raises:
            UnknownNameError: The model has no such site.
            UsageError: On leaving, an edit that no feed has reached.
        """
        with self._sites.editing(edits):
            yield

    @property
    def _adapter(self) -> Any:
        return getattr(self.lm, "adapter", None)

    # ---------------------------------------------------------------- checks

    def _row(self, row: int) -> Row:
        if row not in self._rows:
            raise UsageError(f"there is no row {row}; rows: {list(self._rows) or 'none'}")
        return self._rows[row]

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        ids = [int(token) for token in tokens]
        if ids and (min(ids) < 0 or max(ids) >= self._vocabulary):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise UsageError(
                f"token id {wrong} is outside the vocabulary of {self._vocabulary} tokens"
            )
        return ids

    def _fits(self, length: int) -> None:
        if length > self._store.context:
            turns = self._store.context in turning_points(self._config)
            why = "; past it longrope positions change, those of cached keys too" if turns else ""
            raise UsageError(
                f"{length} tokens do not fit into the model's context of {self._store.context}{why}"
            )

    def _usable(self, strength: float) -> float:
        if strength != strength or abs(strength) == float("inf"):
            raise UsageError(f"strength must be a finite number, not {strength}")
        if strength and self._adapter is None:
            raise CapabilityError(
                f"strength {strength:g}", "an adapter", "none", "load one with lm.load_adapter"
            )
        return float(strength)


def _grouped(plans: list[Plan]) -> list[list[Plan]]:
    """Split rows into forward calls where padding to the longest would cost more than a call."""
    sizes = [len(plan.block.ids) for plan in plans]
    if len(sizes) * max(sizes) - sum(sizes) <= CALL_COST:
        return [plans]
    order = sorted(range(len(plans)), key=sizes.__getitem__)
    count, longest = len(order), max(sizes)

    def area(split: int) -> int:
        return split * sizes[order[split - 1]] + (count - split) * longest

    split = min(range(1, count), key=area)
    if area(split) + CALL_COST >= count * longest:
        return [plans]
    parts = [plans[i] for i in order[:split]], [plans[i] for i in order[split:]]
    return _grouped(parts[0]) + _grouped(parts[1])
