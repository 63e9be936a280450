"""The next-byte distribution against enumeration, and cached against fresh."""

import math
from itertools import pairwise

import pytest
import torch
from families import byte_level
from oracle import family_lm
from toys import Enumeration, toy_lm

from lmsmith.decoding.events import Sampling
from lmsmith.errors import UsageError
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


def test_prefix_logprob_is_the_enumerated_probability():
    lm = toy_lm()
    oracle, reader = Enumeration(lm), ByteReader(lm)
    for prefix in PREFIXES:
        row = reader.open([prefix.encode()], start=True)
        expected = math.log(oracle.prefix_probability(prefix.encode()))
        assert math.isclose(reader.prefix_logprob(row), expected, abs_tol=1e-9), prefix
    # In one push and byte by byte alike; more text is less likely; nothing is left behind.
    row, values = reader.open([b"t"], start=True), []
    for byte in b"he cat sat on the mat":
        reader.push(row, bytes([byte]))
        reader.next_bytes([row])
        values.append(reader.prefix_logprob(row))
    again = reader.prefix_logprob(reader.open([b"the cat sat on the mat"], start=True))
    assert math.isclose(values[-1], again, abs_tol=1e-9)
    assert all(later < earlier for earlier, later in pairwise(values))
    assert len(reader.session.rows) == len(PREFIXES) + 2


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("top_k", "temperature"), [(1, 1.0), (2, 1.0), (3, 0.7), (0, 0.7)])
def test_token_sampling_truncates_leaves_and_not_what_is_given(filtered, top_k, temperature):
    lm = toy_lm()
    sampling = Sampling(top_k=top_k, temperature=temperature)
    oracle, reader = Enumeration(lm), ByteReader(lm, filtered, sampling)
    fallen_back = 0
    for prefix in map(str.encode, PREFIXES):
        row = reader.open([prefix], start=True)
        found = reader.next_bytes([row])[0]
        expected = oracle.next_bytes(prefix, filtered, top_k, temperature)
        if not expected.sum():
            fallen_back += 1
            expected = oracle.next_bytes(prefix, filtered, 0, temperature)
        assert difference(found, expected) <= 1e-9, prefix
    assert not fallen_back or top_k


def test_a_row_that_truncation_leaves_nothing_of_is_read_without_it():
    lm = toy_lm()
    oracle = Enumeration(lm)
    reader = ByteReader(lm, filtered=True, token_sampling=Sampling(top_k=1))
    prefixes = [f"{a}{b}{c}".encode() for a in "theab" for b in "theab" for c in "theab "]
    lost = [one for one in prefixes if not oracle.next_bytes(one, True, 1).sum()]
    kept = [one for one in prefixes if one not in lost]
    rows = [reader.open([one], start=True) for one in (lost[0], kept[0])]
    found = reader.next_bytes(rows)
    assert difference(found[0], oracle.next_bytes(lost[0], True)) <= 1e-9
    assert difference(found[1], oracle.next_bytes(kept[0], True, 1)) <= 1e-9


def test_scoring_after_a_context_is_the_rest_of_scoring_both():
    reader = ByteReader(toy_lm())
    [after] = score(reader, [b"at the mat"], [b"the cat s"])
    [both] = score(reader, [b"the cat sat the mat"])
    assert torch.allclose(after.exp(), both[len(b"the cat s") :].exp(), atol=1e-9)


def test_scoring_filters_as_streaming_does():
    lm, text = toy_lm(), b"aaab abab"
    [found] = score(ByteReader(lm, filtered=True), [text])
    oracle = Enumeration(lm)
    for end in range(1, len(text) + 1):
        expected = oracle.next_bytes(text[:end], True)
        assert float((found[end].exp() - expected / expected.sum()).abs().max()) <= 1e-9


def test_scoring_gives_its_rows_back_and_says_which_text_is_too_long():
    reader = ByteReader(toy_lm())
    assert score(reader, []) == []
    for texts, contexts, part in [
        ([b"the", b"a b" * 4000], None, "text 2 of 2 is longer than"),
        ([b"the"], [b"a b" * 4000], "the text is longer than"),
        ([b"the", b"\xff"], None, "0xff"),
    ]:
        with pytest.raises(UsageError, match=part) as caught:
            score(reader, texts, contexts)
        assert "\n" not in str(caught.value)
        assert reader.session.rows == []


def test_scoring_up_to_the_last_token_of_the_context():
    lm = toy_lm()
    reader, text = ByteReader(lm), b"a b" * 4000
    most = len(text)
    while most > 1:  # the longest text that is taken
        most -= max(1, most // 20)
        try:
            [found] = score(reader, [text[:most]])
            break
        except UsageError:
            continue
    assert found.isfinite().any(-1).all()
    assert len(lm.encode(text[:most].decode())) > 0.9 * lm.context


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


def test_the_start_token_is_bos_where_it_is_used_and_else_the_document_separator():
    assert ByteReader(toy_lm()).start_id == toy_lm().bos_id
    lm = family_lm(byte_level("gpt-2"))
    names = lm.tokenizer.convert_tokens_to_ids
    lm.tokenizer.bos_token = "<|im_start|>"  # named, but not put before text
    assert lm.bos_id == names("<|im_start|>")
    assert ByteReader(lm).start_id == names("<|endoftext|>")
