"""Which examples a step sees: laws of order, sharing and packing."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_examples import ids_of

from lmsmith.training import TrainSettings, collate, encode
from lmsmith.training.batches import Order, pack, share_out
from lmsmith.training.run import _Plan

lengths_of_examples = st.lists(st.integers(2, 20), min_size=1, max_size=40)


@given(lengths_of_examples, st.integers(20, 50))
def test_packing_loses_nothing_and_overfills_nothing(lengths, capacity):
    bins = pack(lengths, capacity)
    assert sorted(piece for found in bins for piece in found) == list(range(len(lengths)))
    loads = [sum(lengths[piece] for piece in found) for found in bins]
    assert all(0 < load <= capacity for load in loads)
    # Best fit never leaves two bins that would go into one.
    assert all(a + b > capacity for i, a in enumerate(loads) for b in loads[:i])


@given(st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_every_epoch_sees_every_unit_once(units, seed, shuffle):
    order = Order(units, seed, shuffle)
    for epoch in range(3):
        seen = order.slice(epoch * units, (epoch + 1) * units)
        assert sorted(seen) == list(range(units))
        assert shuffle or seen == list(range(units))


@given(st.integers(1, 30), st.integers(0, 90), st.integers(0, 20), st.integers(0, 20))
def test_the_order_is_the_same_from_any_place(units, start, middle, rest):
    stop = start + middle + rest
    whole = Order(units, 3).slice(start, stop)
    order = Order(units, 3)
    later = order.slice(start + middle, stop)
    assert whole == order.slice(start, start + middle) + later


def test_orders_differ_between_epochs_and_seeds():
    order = Order(50, 0)
    assert order.slice(0, 50) != order.slice(50, 100)
    assert order.slice(0, 50) != Order(50, 1).slice(0, 50)


@given(lengths_of_examples, st.integers(1, 4), st.integers(1, 6))
def test_a_step_is_shared_out_whole_and_in_equal_passes(lengths, processes, micro):
    units = list(range(100, 100 + len(lengths)))
    shares = share_out(units, lengths, processes, micro)
    assert len(shares) == processes
    assert len({len(share) for share in shares}) == 1
    assert sorted(u for share in shares for passes in share for u in passes) == units
    assert all(len(passes) <= micro for share in shares for passes in share)


@given(lengths_of_examples, st.integers(1, 7), st.integers(1, 3), st.booleans(), st.integers(1, 3))
def test_a_plan_sees_every_example_once_an_epoch(lengths, batch, processes, packing, epochs):
    tokens = encode(ids_of(lengths), TrainSettings())
    settings = TrainSettings(batch_size=batch, packing=packing, epochs=float(epochs))
    plan = _Plan(tokens, settings)
    seen = [
        member
        for step in range(plan.steps)
        for process in range(processes)
        for members in plan.members(step, process, processes)
        for member in members
    ]
    assert sorted(seen) == sorted(list(range(len(lengths))) * epochs)


@given(lengths_of_examples)
def test_padding_and_taking_it_off_again_is_nothing(lengths):
    tokens = encode(ids_of(lengths), TrainSettings())
    batch = collate(tokens, range(len(tokens)))
    rows = batch.padded(fill=-1)
    assert rows.shape == (len(lengths), max(lengths))
    assert torch.equal(batch.unpadded(rows), batch.ids)
    assert torch.equal(batch.positions, torch.cat([torch.arange(n) for n in lengths]))
    # The place before a token that counts is of the same example, and predicts it.
    assert torch.equal(batch.positions[batch.predictors] + 1, batch.positions[batch.counted])
    assert torch.equal(batch.ids[batch.predictors + 1], batch.targets)


def test_a_process_without_a_share_counts_nothing():
    tokens = encode(ids_of([4, 6]), TrainSettings())
    batch = collate(tokens, [])
    assert len(batch.ids) == 4 and not batch.counted.any() and batch.examples == ()
    assert np.array_equal(tokens.lengths, [4, 6])
