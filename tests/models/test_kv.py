"""Keys stay with their lane through moves, growth, copies and compaction."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsmith.errors import CapabilityError
from lmsmith.models.kv import Block, KVStore, Lane, Spot

CONFIG = SimpleNamespace(
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=8,
    num_hidden_layers=2,
    max_position_embeddings=1000,
)


def store():
    return KVStore(CONFIG, torch.float32, torch.device("cpu"), 0)


@torch.inference_mode()
def write(kv, lanes, new):
    """Give every lane `new[i]` trunk tokens whose keys are their token ids."""
    blocks = [Block(lane, list(ids), len(ids)) for lane, ids in zip(lanes, new, strict=True)]
    layout = kv.layout(blocks)
    tokens = layout.input_ids.float()
    for layer in range(2):
        states = (tokens + 1000 * layer)[:, None, :, None].expand(-1, 2, -1, 2)
        kv.update(states, -states, layer)
    for block in blocks:
        block.lane.dense += len(block.ids)
        block.lane.end += len(block.ids)
    return layout


def held(kv, lane, slots):
    keys, values = kv._buffer[1, 0, lane.index], kv._buffer[1, 1, lane.index]
    assert torch.equal(keys, -values)
    assert torch.equal(keys[0, :, 0], keys[1, :, 1])
    return [round(keys[0, slot, 0].item()) - 1000 for slot in slots]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_keys_stay_with_their_lane(data):
    kv, expected, serial = store(), {}, 0
    for _ in range(data.draw(st.integers(5, 40))):
        what = data.draw(st.sampled_from(("open", "write", "write", "write", "close", "duplicate")))
        lanes = list(expected)
        if what == "open" or not lanes:
            expected[kv.open()] = []
        elif what == "close":
            lane = data.draw(st.sampled_from(lanes))
            kv.close(lane)
            del expected[lane]
        elif what == "duplicate":
            lane = data.draw(st.sampled_from(lanes))
            expected[kv.duplicate(lane)] = list(expected[lane])
        else:
            chosen = data.draw(st.lists(st.sampled_from(lanes), min_size=1, unique=True))
            new = []
            for lane in chosen:
                count = data.draw(st.integers(1, 30))
                new.append(range(serial, serial + count))
                expected[lane] += new[-1]
                serial += count
            write(kv, chosen, new)
        assert [lane.index for lane in kv.lanes] == list(range(len(kv.lanes)))
        assert set(kv.lanes) == set(expected)
        for lane, tokens in expected.items():
            assert held(kv, lane, range(lane.end)) == tokens


def test_a_changed_membership_moves_lanes_once():
    kv = store()
    lanes = [kv.open() for _ in range(8)]
    write(kv, lanes, [[i] for i in range(8)])
    chosen = [lanes[i] for i in (0, 3, 5, 7)]
    for turn in range(3):
        layout = write(kv, chosen, [[10 * turn]] * 4)
        assert layout.input_ids.shape[0] == 4
        if turn == 0:
            places = [lane.index for lane in chosen]
            assert max(places) - min(places) == 3
        assert [lane.index for lane in chosen] == places
    for i, lane in enumerate(lanes):
        assert held(kv, lane, range(lane.end)) == [i] + [0, 10, 20] * (lane in chosen)


def test_one_idle_lane_in_four_is_padded_over():
    kv = store()
    lanes = [kv.open() for _ in range(6)]
    write(kv, lanes, [[i, i] for i in range(6)])
    fed = [lanes[i] for i in (0, 1, 3, 4)]
    layout = write(kv, fed, [[9]] * 4)
    assert layout.input_ids.shape[0] == 5
    assert [lane.index for lane in lanes] == list(range(6))
    assert held(kv, lanes[2], range(2)) == [2, 2]


def test_room_doubles_and_keeps_what_it_holds():
    kv = store()
    lane = kv.open()
    sizes = set()
    for start in range(0, 400, 10):
        write(kv, [lane], [range(start, start + 10)])
        sizes.add(kv._buffer.shape[4])
    assert sizes == {64, 128, 256, 512}
    assert held(kv, lane, range(400)) == list(range(400))


def test_room_ends_at_the_context_unless_there_is_need():
    config = SimpleNamespace(**{**vars(CONFIG), "max_position_embeddings": 150})
    kv = KVStore(config, torch.float32, torch.device("cpu"), 10**9)
    assert kv._buffer.shape[4] == 150
    kv = KVStore(config, torch.float32, torch.device("cpu"), 0)
    lane, sizes = kv.open(), []
    for start in range(0, 170, 10):  # the last ones as branches beside each other
        write(kv, [lane], [range(start, start + 10)])
        sizes.append(kv._buffer.shape[4])
    assert list(dict.fromkeys(sizes)) == [64, 128, 150, 187]
    assert held(kv, lane, range(170)) == list(range(170))


def test_room_that_few_short_lanes_leave_is_given_back():
    kv = store()
    lanes = [kv.open() for _ in range(40)]
    write(kv, lanes, [range(700)] * 40)
    assert kv._buffer.shape[2:5] == (64, 2, 700)
    for lane in lanes[2:]:
        kv.close(lane)
    write(kv, lanes[:2], [[700], [700]])
    assert kv._buffer.shape[2:5] == (8, 2, 1000)
    for lane in lanes[:2]:  # a crop
        lane.dense = lane.end = 30
    write(kv, lanes[:2], [[30], [30]])
    assert kv._buffer.shape[2:5] == (8, 2, 64)
    for lane in lanes[:2]:
        assert held(kv, lane, range(31)) == list(range(31))


def test_room_asked_for_is_kept():
    kv = KVStore(CONFIG, torch.float32, torch.device("cpu"), 500)
    lane = kv.open()
    write(kv, [lane], [range(900)])
    lane.dense = lane.end = 3
    write(kv, [lane], [[3]])
    assert kv._buffer.shape[4] == 500
    assert held(kv, lane, range(4)) == [0, 1, 2, 3]


def test_compaction_moves_kept_tokens_into_place_then_the_nodes():
    kv = store()
    lane = kv.open()
    write(kv, [lane], [range(12)])
    lane.dense, lane.tail = 4, [6, 9]
    lane.nodes = {5: Spot(8, 6), 7: Spot(11, 7)}
    assert lane.holes == 4
    kv.compact(lane)
    assert (lane.dense, lane.tail, lane.end, lane.holes) == (6, [], 8, 0)
    assert lane.nodes == {5: Spot(6, 6), 7: Spot(7, 7)}
    assert held(kv, lane, range(8)) == [0, 1, 2, 3, 6, 9, 8, 11]


def test_a_tail_already_in_place_is_taken_up_without_a_move():
    lane = Lane(0, dense=4, tail=[4, 5, 9], nodes={1: Spot(7, 7)}, end=20)
    lane.settle()
    assert (lane.dense, lane.tail, lane.end) == (6, [9], 10)
    assert lane.computed == 7


def test_no_mask_where_order_is_enough():
    kv = store()
    lanes = [kv.open() for _ in range(3)]
    assert write(kv, lanes, [[1, 2], [1, 2, 3], [1]]).mask is None  # causal, from empty
    lanes = [kv.open() for _ in range(3)]
    write(kv, lanes, [[1, 2]] * 3)
    layout = write(kv, lanes, [[3]] * 3)
    assert layout.mask is None and layout.positions.tolist() == [[2]]


def test_masks_are_the_ancestors():
    """Slots a node sees, against a drawing: trunk 0-2, node a after it, b under a, c beside a."""
    kv = store()
    lane, other = kv.open(), kv.open()
    write(kv, [lane, other], [[1, 2, 3], [1]])
    tree = Block(lane, [7, 8, 9], 0, depths=[3, 4, 3], seen=[[], [3], []])
    layout = kv.layout([tree, Block(other, [5, 6], 2)])
    group = 2
    mask = layout.mask
    assert mask.shape == (2, 1, group * 3, 6)
    assert torch.equal(mask[:, :, :3], mask[:, :, 3:])
    seen = [[slot for slot in range(6) if query[slot] == 0] for query in mask[0, 0, :3]]
    assert seen == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 5]]
    seen = [[slot for slot in range(6) if query[slot] == 0] for query in mask[1, 0, :2]]
    assert seen == [[0, 1], [0, 1, 2]]
    assert layout.positions[0].tolist() == [3, 4, 3]
    assert layout.positions[1, :2].tolist() == [1, 2]


def test_layers_without_keys_are_refused():
    config = SimpleNamespace(**vars(CONFIG), layer_types=["linear_attention", "full_attention"])
    with pytest.raises(CapabilityError, match="linear_attention"):
        KVStore(config, torch.float32, torch.device("cpu"), 0)


@torch.inference_mode()
def test_a_layer_whose_heads_are_unlike_the_others_is_refused():
    kv = store()
    kv.layout([Block(kv.open(), [1, 2], 2)])
    like, wide = torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 4)
    for keys, values in ((like, wide), (wide, wide), (like[:, :1], like[:, :1])):
        with pytest.raises(CapabilityError, match="2 heads of width 2 in every layer"):
            kv.update(keys, values, 1)
    kv.update(like, like, 1)
