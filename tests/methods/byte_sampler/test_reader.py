"""The next-byte distribution against enumeration, and cached against fresh."""

import math

import pytest
import torch
from toys import Enumeration, toy_lm

from lmsmith.methods.byte_sampler.reader import ByteReader, normalise
from lmsmith.methods.byte_sampler.scoring import byte_logprobs, score
from lmsmith.models.session import Session

PREFIXES = ["the cat", "that that", "aaa", "a", "th", "abab", "at the at", "mat, th", "aaaab ab"]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of two normalised vectors of probabilities."""
    return float((normalise(found).exp() - expected / expected.sum()).abs().max())


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_next_byte_equals_enumeration(family, filtered):
    lm = toy_lm(family=family)
    oracle, reader = Enumeration(lm), ByteReader(lm, filtered=filtered)
    for prefix in PREFIXES:
        row = reader.open([prefix.encode()], start=True)
        found = reader.next_bytes([row])[0]
        assert difference(found, oracle.next_bytes(prefix.encode(), filtered)) <= 1e-9, prefix


def test_streaming_a_byte_at_a_time_equals_enumeration():
    lm = toy_lm()
    oracle, reader = Enumeration(lm), ByteReader(lm)
    text = b"the hat at aaab"
    row = reader.open([text[:1]], start=True)
    for end in range(1, len(text)):
        if end > 1:
            reader.push(row, text[end - 1 : end])
        assert difference(reader.next_bytes([row])[0], oracle.next_bytes(text[:end], False)) <= 1e-9


def test_scoring_in_one_pass_equals_streaming():
    lm = toy_lm()
    texts = [b"the cat sat on the mat", b"aaaabab", b"hat"]
    together = score(ByteReader(lm), texts, chunk=5)
    for text, found in zip(texts, together, strict=True):
        reader = ByteReader(lm)
        row = reader.open([], start=True)
        for index in range(len(text) + 1):
            if index:
                reader.push(row, text[index - 1 : index])
            one = normalise(reader.next_bytes([row]))[0]
            assert float((one.exp() - found[index].exp()).abs().max()) <= 1e-9
        assert byte_logprobs(found, text).shape == (len(text),)


def test_batch_of_ragged_rows_equals_single_rows():
    lm = toy_lm()
    reader = ByteReader(lm)
    rows = [reader.open([prefix.encode()], start=True) for prefix in PREFIXES]
    together = normalise(reader.next_bytes(rows))
    for prefix, found in zip(PREFIXES, together, strict=True):
        alone = ByteReader(lm)
        expected = normalise(alone.next_bytes([alone.open([prefix.encode()], start=True)]))[0]
        assert float((found.exp() - expected.exp()).abs().max()) <= 1e-9


def test_cover_sums_to_the_enumerated_probability_and_is_valid():
    lm = toy_lm()
    oracle, reader = Enumeration(lm), ByteReader(lm)
    for prefix in PREFIXES:
        row = reader.open([prefix.encode()], start=True)
        leaves = reader.cover(row)
        expected = {}
        for ids in oracle.covers(prefix.encode()):
            data = b"".join(oracle.spelling[token] for token in ids)
            c = sum(float(oracle.logprobs(ids[:i])[ids[i]]) for i in range(len(ids)))
            for token, spelling in oracle.spelling.items():
                whole = data + spelling
                fits = len(data) < len(prefix) and whole.startswith(prefix.encode())
                if fits and oracle.valid((*ids, token)):
                    expected[(*ids, token)] = c + float(oracle.logprobs(ids)[token])
        trunk = tuple(reader.tree(row).trunk[1:])
        found = {}
        for leaf, token, logprob in leaves:
            path, node = [], leaf
            while node is not reader.tree(row).root:
                path.append(node.token)
                node = node.parent
            found[(*trunk, *reversed(path), token)] = logprob
        assert found.keys() == expected.keys(), prefix
        shift = next(iter(expected.values())) - found[next(iter(expected))]
        for key, value in expected.items():
            assert math.isclose(found[key] + shift, value, abs_tol=1e-9)


def test_chain_rule_is_exact_when_invalid_pairs_have_no_mass():
    """Sum over b of P(Pb) + P(stop) = P(P), in probabilities that are not normalised."""
    lm = toy_lm()
    oracle = Enumeration(lm)
    special = oracle.special
    plain = oracle.logprobs

    def masked(ids):
        row = plain(ids).clone()
        for token in oracle.spelling:
            if ids and not oracle.valid((ids[-1], token)):
                row[token] = -math.inf
        return torch.log_softmax(row, -1)

    oracle.logprobs = masked

    def mass(prefix: bytes) -> float:
        """P(prefix): the mass of the valid covers, the exact end going on with anything."""
        total = float(oracle.next_bytes(prefix, True).sum())
        return total

    for prefix in (b"the", b"aaa", b"at "):
        vector = oracle.next_bytes(prefix, True)
        chained = sum(mass(prefix + bytes([b])) for b in range(256) if vector[b] > 0)
        assert math.isclose(chained + float(vector[256]), mass(prefix), rel_tol=1e-9)
    assert special


def test_filtered_and_unfiltered_differ_by_the_invalid_mass():
    lm = toy_lm()
    oracle = Enumeration(lm)
    for prefix in PREFIXES:
        whole = oracle.next_bytes(prefix.encode(), False)
        valid = oracle.next_bytes(prefix.encode(), True)
        reader = ByteReader(lm, filtered=True)
        row = reader.open([prefix.encode()], start=True)
        reader.next_bytes([row])
        expected = 1 - float(valid.sum() / whole.sum())
        assert math.isclose(reader.invalid(row), expected, abs_tol=1e-9)


def test_cache_holds_trunk_and_live_branches_only():
    lm = toy_lm()
    reader = ByteReader(lm)
    row = reader.open([b"the"], start=True)
    text = b" cat sat on the mat, that that the hat at the attic" * 2
    for byte in text:
        reader.push(row, bytes([byte]))
        reader.next_bytes([row])
        tree = reader.tree(row)
        assert len(reader.session.tokens(row)) == len(tree.trunk)
        assert len(reader.session.live(row)) == len(tree.live_nodes()) <= 16
    assert reader.session.forward_calls == len(text)
    assert reader.session.tokens_computed <= 1.5 * len(text) + 10


def test_closed_rows_free_their_cache():
    reader = ByteReader(toy_lm())
    row = reader.open([b"the cat"], start=True)
    reader.next_bytes([row])
    reader.close(row)
    assert isinstance(reader.session, Session)
    fresh = reader.open([b"the cat"], start=True)
    assert normalise(reader.next_bytes([fresh])).isfinite().any()
