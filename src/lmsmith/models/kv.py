"""The key-value store behind a Session: where keys lie, and which of them each token sees.

The only file that touches transformers' cache interface, as `lmsmith.models.attention` is the only
one that touches its attention interface. Not for: what a row or a node is (`lmsmith.models.rows`).

All layers' keys and values are one tensor `[layers, 2, lanes, kv_heads, capacity, head_dim]`. A
`Lane` is one physical row of it: the keys of one sequence under one adapter strength. Lanes that
run together are brought into one contiguous range when the set of them changes, so that a steady
decode hands attention views and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from lmsmith.errors import CapabilityError
from lmsmith.models.attention import FOLD_LIMIT
from lmsmith.models.limits import context_of, key_width

# Slots that may be lost to dropped nodes in a lane before its live slots are moved together.
HOLE_LIMIT = 16


class Spot(NamedTuple):
    """Where a live node's key lies, and its position in the sequence."""

    slot: int
    depth: int


@dataclass(eq=False)
class Lane:
    """Where the keys of one sequence lie.

    Attributes:
        index: Physical row of the store.
        dense: Trunk tokens whose slot is their position.
        tail: Slots of the trunk tokens after those (nodes that were kept).
        nodes: Spot of each live node, by node id.
        end: First slot that nothing live lies at or after; new tokens go here.
    """

    index: int
    dense: int = 0
    tail: list[int] = field(default_factory=list)
    nodes: dict[int, Spot] = field(default_factory=dict)
    end: int = 0

    @property
    def computed(self) -> int:
        """Trunk tokens whose keys are here."""
        return self.dense + len(self.tail)

    @property
    def holes(self) -> int:
        """Slots before `end` that nothing live lies at."""
        return self.end - self.computed - len(self.nodes)

    def settle(self) -> None:
        """Take up the start of the tail that is in place already, and lower `end` if possible."""
        taken = 0
        while taken < len(self.tail) and self.tail[taken] == self.dense:
            self.dense += 1
            taken += 1
        del self.tail[:taken]
        self.end = max([self.dense - 1, *self.tail, *(s.slot for s in self.nodes.values())]) + 1

    def copy(self, index: int) -> Lane:
        """The same bookkeeping at another physical row."""
        return Lane(index, self.dense, list(self.tail), dict(self.nodes), self.end)


@dataclass
class Block:
    """The tokens that one lane computes in a forward.

    Attributes:
        lane: Where their keys go, from `lane.end` on.
        ids: Token ids.
        linear: How many of `ids`, from the first, extend the trunk; the rest are nodes. A lane
            that extends its trunk is dense (`Lane.end == Lane.dense`).
        depths: Position of each node.
        seen: Slots each node attends to besides the dense prefix and itself.
    """

    lane: Lane
    ids: list[int]
    linear: int
    depths: list[int] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)


@dataclass
class Layout:
    """What the model is called with: a padded batch over a range of lanes.

    Attributes:
        input_ids: `[lanes, new]`.
        positions: `[lanes or 1, new]`.
        mask: What the model takes as `attention_mask`; see `KVStore.layout`.
        first: Physical row of the batch's first lane.
    """

    input_ids: Tensor
    positions: Tensor
    mask: Any
    first: int


class KVStore(Cache):
    """Keys and values of every lane of a session."""

    def __init__(
        self, config: Any, dtype: torch.dtype, device: torch.device, capacity: int
    ) -> None:
        super().__init__(layers=[])
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.group = heads // kv_heads
        self.context = context_of(config)
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise CapabilityError(
                "a Session", "a plain attention decoder", f"layers of kind {sorted(kinds)}"
            )
        window = getattr(config, "sliding_window", None)
        # A model that names no layer kinds but has a window slides in every layer (Mistral).
        self.window = window if window and (not kinds or "sliding_attention" in kinds) else None
        self.mixed = "sliding_attention" in kinds
        self.device = device
        self.lanes: list[Lane] = []
        self._capacity = min(max(capacity, 64), self.context)  # never less than this
        shape = (config.num_hidden_layers, 2, 0, kv_heads, self._capacity, key_width(config))
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._views: list[tuple[Tensor, Tensor]] = []
        self._range = (0, 0)
        self._used = 0
        self._write: int | tuple[Tensor, Tensor] = 0

    def __len__(self) -> int:
        return self._buffer.shape[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots that the forward under way attends to (transformers' name)."""
        return self._used

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; views of all that the batch may attend to.

        Called by the model's attention modules with `[lanes, kv_heads, new, head_dim]`.

        Raises:
            CapabilityError: This layer's heads are not like those that the configuration names.
        """
        keys, values = self._views[layer_idx]
        for states in (key_states, value_states):
            if states.shape[1::2] != keys.shape[1::2]:
                raise CapabilityError(
                    "a Session",
                    "{} heads of width {} in every layer".format(*keys.shape[1::2]),
                    "{} of width {} in layer {}".format(*states.shape[1::2], layer_idx),
                )
        if isinstance(self._write, int):
            new = key_states.shape[2]
            keys.narrow(2, self._write, new).copy_(key_states)
            values.narrow(2, self._write, new).copy_(value_states)
        else:
            lanes, slots = self._write
            keys[lanes, :, slots] = key_states.transpose(1, 2)
            values[lanes, :, slots] = value_states.transpose(1, 2)
        return keys.narrow(2, 0, self._used), values.narrow(2, 0, self._used)

    # ----------------------------------------------------------------- lanes

    def open(self) -> Lane:
        """A new, empty lane."""
        lane = Lane(len(self.lanes))
        self._grow(lanes=lane.index + 1)
        self.lanes.append(lane)
        return lane

    def close(self, lane: Lane) -> None:
        """Free a lane; the last one moves into its place, so that the store has no gaps."""
        last = self.lanes.pop()
        if last is not lane:
            self._copy(last.index, lane.index, last.end)
            last.index = lane.index
            self.lanes[last.index] = last

    def duplicate(self, lane: Lane) -> Lane:
        """A new lane with the same keys."""
        opened = self.open()
        self._copy(lane.index, opened.index, lane.end)
        twin = self.lanes[opened.index] = lane.copy(opened.index)
        return twin

    @torch.inference_mode()
    def compact(self, lane: Lane) -> None:
        """Move a lane's live slots together: kept tokens into place, then the live nodes."""
        lane.settle()
        if not lane.holes:
            return
        live = lane.tail + [spot.slot for spot in lane.nodes.values()]
        moved = self._buffer[:, :, lane.index].index_select(
            3, torch.tensor(live, device=self.device)
        )
        self._buffer[:, :, lane.index].narrow(3, lane.dense, len(live)).copy_(moved)
        lane.dense += len(lane.tail)
        lane.tail = []
        lane.nodes = {
            node: Spot(lane.dense + i, spot.depth)
            for i, (node, spot) in enumerate(lane.nodes.items())
        }
        lane.end = lane.dense + len(lane.nodes)

    @torch.inference_mode()
    def _copy(self, source: int, target: int, slots: int) -> None:
        rows = self._buffer[..., :slots, :]
        rows[:, :, target].copy_(rows[:, :, source])

    @torch.inference_mode()
    def _swap(self, one: Lane, other: Lane) -> None:
        rows = self._buffer[..., : max(one.end, other.end), :]
        kept = rows[:, :, one.index].clone()
        rows[:, :, one.index].copy_(rows[:, :, other.index])
        rows[:, :, other.index].copy_(kept)
        one.index, other.index = other.index, one.index
        self.lanes[one.index], self.lanes[other.index] = one, other

    def _grow(self, lanes: int = 0, capacity: int = 0) -> None:
        """Make room, doubling what is too small, but not past the context unless there is need."""
        had_lanes, had = self._buffer.shape[2], self._buffer.shape[4]
        if lanes <= had_lanes and capacity <= had:
            return
        if lanes > had_lanes:
            had_lanes = max(lanes, 2 * had_lanes)
        if capacity > had:
            # Past the context lie padding and branches beside each other only.
            ample = min(2 * had, self.context) if capacity <= self.context else had + had // 4
            had = max(capacity, ample)
        self._resize(had_lanes, had)

    def _shrink(self) -> None:
        """Give back room that is more than four times what is in use."""
        lanes, capacity = self._buffer.shape[2], self._buffer.shape[4]
        used = max(lane.end for lane in self.lanes)
        fewer = max(8, 2 * len(self.lanes)) if lanes > max(8, 4 * len(self.lanes)) else lanes
        least = max(self._capacity, 2 * used)
        shorter = least if capacity > max(self._capacity, 4 * used) else capacity
        if (fewer, shorter) != (lanes, capacity):
            self._resize(fewer, shorter)

    @torch.inference_mode()
    def _resize(self, lanes: int, capacity: int) -> None:
        old = self._buffer
        shape = (*old.shape[:2], lanes, old.shape[3], capacity, old.shape[5])
        # Zeros, not empty: a masked slot still takes part in attention as 0 * value.
        self._buffer = torch.zeros(shape, dtype=old.dtype, device=old.device)
        used = max((lane.end for lane in self.lanes), default=0)
        kept = len(self.lanes)
        self._buffer[:, :, :kept, :, :used].copy_(old[:, :, :kept, :, :used])
        self._range = (0, 0)

    def _arrange(self, members: Sequence[Lane]) -> tuple[int, int]:
        """Bring the lanes of a batch into one range of rows; its first row and its size.

        A few idle lanes may stay between them (at most one in four): to compute a padding token
        is cheaper than to move caches to and fro when the set of lanes changes at every step.
        """
        size = len(members)
        indices = [lane.index for lane in members]
        first, span = min(indices), max(indices) - min(indices) + 1
        if span - size <= size // 4:
            return first, span
        inside = np.zeros(len(self.lanes) + 1, dtype=np.int64)
        inside[np.array(indices) + 1] = 1
        overlap = np.cumsum(inside)
        first = int(np.argmax(overlap[size:] - overlap[:-size]))
        fed = set(indices)
        strangers = [self.lanes[i] for i in range(first, first + size) if i not in fed]
        outside = [lane for lane in members if not first <= lane.index < first + size]
        for stranger, lane in zip(strangers, outside, strict=True):
            self._swap(stranger, lane)
        return first, size

    # ---------------------------------------------------------------- layout

    @torch.inference_mode()
    def layout(self, blocks: Sequence[Block]) -> Layout:
        """Prepare the store for one forward over `blocks`.

        The mask is `None` where the model's own order is enough (one new token a lane and all
        lanes alike: everything is visible; several from empty: causal), else an additive
        `[lanes or 1, 1, new * folded, used]`. Models with two kinds of layer get a dict.
        """
        self._shrink()
        first, size = self._arrange([block.lane for block in blocks])
        new = max(len(block.ids) for block in blocks)
        ids = np.zeros((size, new), dtype=np.int64)
        for block in blocks:
            ids[block.lane.index - first, : len(block.ids)] = block.ids
        ends = [lane.end for lane in self.lanes[first : first + size]]
        self._grow(capacity=max(ends) + new)
        if self._range != (first, size):
            rows = self._buffer[:, :, first : first + size]
            self._views = [(rows[layer, 0], rows[layer, 1]) for layer in range(len(self))]
            self._range = (first, size)
        self._used = max(block.lane.end + len(block.ids) for block in blocks)

        start = ends[0]
        alike = all(end == start for end in ends) and all(
            block.linear == len(block.ids) for block in blocks
        )
        if alike:
            positions, mask = self._plain(start, new)
            self._write = start
        else:
            slots = np.array(ends)[:, None] + np.arange(new)
            positions, mask = self._general(blocks, first, slots)
            self._write = (self._tensor(np.arange(size)[:, None]), self._tensor(slots))
        return Layout(self._tensor(ids), self._tensor(positions), mask, first)

    def _plain(self, start: int, new: int) -> tuple[np.ndarray, Any]:
        """Positions and mask when every lane extends a trunk of `start` tokens."""
        positions = np.arange(start, start + new)[None]
        slots = np.arange(self._used)
        causal = new > 1 and start > 0
        window = self.window
        slides = window is not None and start + new > window
        if not (causal or slides):
            return self._clipped(positions), self._mask(None, None)
        visible = slots <= positions[:, :, None]
        near = visible
        if window is not None and slides:
            near = visible & (positions[:, :, None] - slots < window)
        return self._clipped(positions), self._mask(visible if causal else None, near)

    def _general(
        self, blocks: Sequence[Block], first: int, slots: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        """Positions and mask for lanes of unequal length, holes and trees.

        A padding token sees its lane's slots up to its own: never used, but finite.
        """
        size = len(slots)
        columns = np.arange(self._used)
        limits, positions = slots.copy(), slots.copy()
        keyed = np.broadcast_to(columns, (size, self._used)).copy()
        lanes, queries, keys = [], [], []
        for block in blocks:
            lane, row = block.lane, block.lane.index - first
            nodes = range(block.linear, len(block.ids))
            if not nodes:
                continue
            for spot in lane.nodes.values():
                keyed[row, spot.slot] = spot.depth
            keyed[row, lane.tail] = range(lane.dense, lane.computed)
            limits[row, block.linear : len(block.ids)] = lane.dense + block.linear - 1
            positions[row, block.linear : len(block.ids)] = block.depths
            keyed[row, slots[row, nodes.start : nodes.stop]] = block.depths
            for i, seen in zip(nodes, block.seen, strict=True):
                for slot in (*seen, slots[row, i]):
                    lanes.append(row)
                    queries.append(i)
                    keys.append(slot)
        visible = columns <= limits[:, :, None]
        visible[lanes, queries, keys] = True
        near = visible
        if self.window is not None and positions.max() >= self.window:
            near = visible & (positions[:, :, None] - keyed[:, None, :] < self.window)
            # Padding only; some attention kernels give NaN where nothing is seen.
            near[~near.any(-1), 0] = True
        return self._clipped(positions), self._mask(visible, near)

    def _clipped(self, positions: np.ndarray) -> np.ndarray:
        # Only padding can lie past the context, where a table of learned positions ends.
        return np.minimum(positions, self.context - 1)

    def _mask(self, full: np.ndarray | None, near: np.ndarray | None) -> Any:
        if not self.mixed:
            return self._additive(full if self.window is None else near)
        whole = self._additive(full)
        return {
            "full_attention": whole,
            "sliding_attention": whole if near is full else self._additive(near),
        }

    def _additive(self, visible: np.ndarray | None) -> Tensor | None:
        if visible is None:
            return None
        mask = torch.zeros(visible.shape, dtype=self._buffer.dtype, device=self.device)
        mask.masked_fill_(~self._tensor(visible), float("-inf"))
        mask = mask[:, None]  # [lanes or 1, 1, new, used]
        if self.group == 1 or visible.shape[1] > FOLD_LIMIT:
            return mask
        return mask.repeat(1, 1, self.group, 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
