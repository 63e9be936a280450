"""Pair validity against re-encoding: every pair of small vocabularies, of any merge list."""

import json
import random
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers

from lmsmith.methods.byte_sampler.merges import Merges


class Toy:
    """A merge list over characters, and the tokenizers library's own BPE of it."""

    def __init__(self, vocabulary, merges):
        self.vocabulary, self.text = vocabulary, {i: t for t, i in vocabulary.items()}
        self.model = models.BPE(vocab=vocabulary, merges=merges)
        rows = [(vocabulary[a], vocabulary[b], vocabulary[a + b]) for a, b in merges]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self.merges = Merges(
            table[:, 0],
            table[:, 1],
            table[:, 2],
            len(vocabulary),
            lambda token: [vocabulary[c] for c in self.text[token]],
        )

    def encode(self, text):
        return [token.id for token in self.model.tokenize(text)]

    def wrong_pairs(self):
        return [
            (self.text[a], self.text[b])
            for a, b in product(self.text, repeat=2)
            if self.merges.valid(a, b) != (self.encode(self.text[a] + self.text[b]) == [a, b])
        ]


def trained(seed):
    draw = random.Random(seed)
    letters = "ab" if seed % 3 == 0 else "abcd" if seed % 3 == 1 else "aabcdefgh"
    words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(60)]
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=12 + 8 * seed, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words), *words], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return Toy(model["vocab"], [tuple(merge) for merge in model["merges"]])


def made_up(seed, merges=24, unreachable=6):
    """A proper list with several ways to build a token, and tokens that only spoil others."""
    draw = random.Random(seed)
    tokens = list("abc")
    chosen = []
    while len(chosen) < merges:
        a, b = draw.choice(tokens), draw.choice(tokens)
        if len(a + b) <= 7 and (a, b) not in chosen:
            chosen.append((a, b))
            if a + b not in tokens:
                tokens.append(a + b)
    for _ in range(unreachable):
        extra = "".join(draw.choices("abc", k=draw.randint(2, 6)))
        if extra not in tokens:
            tokens.append(extra)
    return {token: i for i, token in enumerate(tokens)}, chosen


@pytest.mark.parametrize("seed", range(6))
def test_all_pairs_of_trained_vocabularies(seed):
    toy = trained(seed)
    assert toy.merges.proper
    assert toy.wrong_pairs() == []


@pytest.mark.parametrize("seed", range(8))
def test_all_pairs_of_made_up_proper_lists(seed):
    toy = Toy(*made_up(seed))
    assert toy.merges.proper
    assert toy.wrong_pairs() == []
    assert any(not toy.merges.reachable(token) for token in toy.text)


@pytest.mark.parametrize("seed", range(12))
def test_all_pairs_of_shuffled_lists(seed):
    vocabulary, merges = made_up(seed, merges=30)
    random.Random(seed).shuffle(merges)
    toy = Toy(vocabulary, merges)
    assert not toy.merges.proper
    assert toy.wrong_pairs() == []


pieces = st.lists(st.sampled_from(["a", "b", "ab", "ba", "aa", "c", "abc", "bc"]), max_size=12)


@settings(deadline=None)
@given(seed=st.integers(0, 30), shuffle=st.booleans(), pieces=pieces)
def test_run_is_what_the_tokenizers_library_does(seed, shuffle, pieces):
    vocabulary, merges = made_up(seed)
    if shuffle:
        random.Random(seed).shuffle(merges)
    toy = Toy(vocabulary, merges)
    text = "".join(pieces)
    assert toy.merges.run([vocabulary[c] for c in text])[0] == toy.encode(text)


@settings(deadline=None)
@given(seed=st.integers(0, 30), shuffle=st.booleans(), data=st.data())
def test_a_sequence_is_valid_iff_its_pairs_are(seed, shuffle, data):
    vocabulary, merges = made_up(seed)
    if shuffle:
        random.Random(seed).shuffle(merges)
    toy = Toy(vocabulary, merges)
    # Near-valid: the encoding of a text, with at most one token replaced.
    ids = toy.encode("".join(data.draw(pieces)))
    if ids and data.draw(st.booleans()):
        ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.sampled_from([*toy.text]))
    if len(ids) < 2:
        return
    whole = toy.encode("".join(toy.text[token] for token in ids)) == ids
    assert all(toy.merges.valid(a, b) for a, b in pairwise(ids)) == whole


def test_on_equal_ranks_the_left_merge_comes_first():
    toy = Toy({"a": 0, "aa": 1}, [("a", "a")])
    assert toy.merges.valid(1, 0)
    assert not toy.merges.valid(0, 1)
    assert not toy.merges.valid(0, 0)
    assert toy.merges.valid(1, 1)


def test_proper_needs_each_operand_built_before_it_is_used():
    vocabulary = {"a": 0, "b": 1, "ab": 2, "abb": 3}
    assert Toy(vocabulary, [("a", "b"), ("ab", "b")]).merges.proper
    assert not Toy(vocabulary, [("ab", "b"), ("a", "b")]).merges.proper
    # Built both before and after.
    assert Toy({**vocabulary, "abbb": 4}, [("a", "b"), ("ab", "b"), ("abb", "b")]).merges.proper


def test_no_merges_at_all():
    toy = Toy({"a": 0, "b": 1}, [])
    assert toy.merges.proper and toy.wrong_pairs() == []
