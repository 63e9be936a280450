"""Byte-level sampling on SmolLM2, against forward passes of transformers alone."""

import math

import pytest
import torch

from lmsmith.methods.byte_sampler.baselines import BeamCover, arms
from lmsmith.methods.byte_sampler.combine import mix
from lmsmith.methods.byte_sampler.reader import ByteReader, normalise
from lmsmith.methods.byte_sampler.scoring import bits_per_byte, score
from lmsmith.models import open_model

pytestmark = pytest.mark.real_model

TEXT = "It's 1234 naïve cafés,  don't\n\n\tif x: 世界🙂 end"


@pytest.fixture(scope="module")
def reader():
    return ByteReader(open_model("smollm2-135m", dtype="float32"))


def logprobs(lm, ids):
    """Next-token log-probabilities from one plain forward pass  # [vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(lm.model(torch.tensor([ids])).logits[0, -1], -1)


def by_first_byte(reader, values, after=b""):
    """Mass by the byte that follows `after` in each ordinary token  # [257], `stop` last."""
    total = torch.zeros(257)
    for token, spelling in enumerate(reader.tokens.spelling):
        if spelling and len(spelling) > len(after) and spelling.startswith(after):
            total[spelling[len(after)]] += values[token].exp()
    return total


def from_scratch(reader, tree):
    """The 257-vector with a forward pass of its own for every branch."""
    total = torch.zeros(257)
    for head in tree.heads():
        if head.added:
            continue
        path, node = [], head.node
        while node is not tree.root:
            path.append(node.token)
            node = node.parent
        ids, c = list(tree.trunk), 0.0
        for token in reversed(path):
            c += float(logprobs(reader.lm, ids)[token])
            ids.append(token)
        values = logprobs(reader.lm, ids)
        total += math.exp(c) * by_first_byte(reader, values, head.walked)
        if head.ends:
            total[256] += math.exp(c) * values[list(reader.tokens.special_ids)].exp().sum()
    return total / total.sum()


def test_cached_equals_transformers_alone_at_every_byte(reader):
    data = TEXT.encode()
    row = reader.open([data[:1]], start=True)
    for end in range(1, len(data)):
        if end > 1:
            reader.push(row, data[end - 1 : end])
        found = normalise(reader.next_bytes([row]))[0].exp()
        if end % 3 == 0:  # the reference runs a forward pass a branch
            expected = from_scratch(reader, reader.tree(row))
            assert float((found - expected).abs().max()) <= 1e-4, data[:end]
    reader.close(row)


def test_baselines_equal_forward_passes_of_their_own(reader):
    lm = reader.lm
    prefixes = ["The capital of Fra", "for i in ran", "one two thr", "x = [1, 2, "]
    rows = [reader.open([prefix.encode()], start=True) for prefix in prefixes]
    found = arms(reader, rows)
    for index, prefix in enumerate(prefixes):
        ids = [reader.start_id, *lm.encode(prefix, add_special=False)]
        plain = by_first_byte(reader, logprobs(lm, ids))
        plain[256] = logprobs(lm, ids)[list(reader.tokens.special_ids)].exp().sum()
        assert float((found["plain"][index].exp() - plain / plain.sum()).abs().max()) <= 1e-4
        before = logprobs(lm, ids[:-1])
        healed = before[ids[-1]].exp() * plain
        healed += by_first_byte(reader, before, reader.tokens.spelling[ids[-1]])
        assert float((found["healing"][index].exp() - healed / healed.sum()).abs().max()) <= 1e-4
    for row in rows:
        reader.close(row)


def test_sixteen_texts_scored_in_one_pass_equal_one_at_a_time(reader):
    texts = [f"Sentence number {n} is about {'x' * n}.".encode() for n in range(16)]
    together = score(reader, texts)
    for number in (0, 7, 15):
        text = texts[number]
        alone = bits_per_byte(score(reader, [text])[0], text)
        assert abs(alone - bits_per_byte(together[number], text)) < 1e-4
    assert mix(torch.stack([together[3], together[3]])).exp().allclose(together[3].exp(), atol=1e-6)


def test_a_wide_beam_agrees_with_the_tree_up_to_invalid_sequences(reader):
    start = [reader.start_id, *reader.lm.encode("The capital of", add_special=False)]
    beam = BeamCover(reader, start, width=64)
    for byte in b" Fra":
        beam.push(byte)
    row = reader.open([b"The capital of Fra"], start=True)
    tree = normalise(reader.next_bytes([row]))[0].exp()
    assert float((beam.next_bytes().exp() - tree).abs().max()) < 0.05
    beam.close()
    reader.close(row)


def test_the_prompt_boundary_problem_is_real_and_solved(reader):
    rows = [reader.open([b"The capital of Fra"], start=True)]
    found = arms(reader, rows)
    byte = ord("n")
    assert found["plain"][0][byte].exp() < 0.5 < found["byte"][0][byte].exp()
    reader.close(rows[0])
