"""The token side on the real tokenizers: every pair, every law, the time it takes."""

import random
import time
from functools import cache
from itertools import pairwise

import pytest
from laws import AMBIGUOUS, CONTINUATIONS, Covered, check_text
from test_tree import PIECES

from lmsmith.methods.byte_sampler.tree import CoveringTree
from lmsmith.methods.byte_sampler.vocabulary import ByteTokens

pytestmark = pytest.mark.real_model
NAMES = ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"]


@cache
def real(name):
    from lmsmith.models import load_tokenizer

    tokenizer = load_tokenizer(name).backend_tokenizer
    return ByteTokens.from_tokenizer(tokenizer), tokenizer


def encoder(name):
    tokenizer = real(name)[1]
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def pairs_are_right(name, count):
    tokens, wrong, seen = real(name)[0], 0, 0
    for seed in range(10):
        wrong += tokens.self_test(count // 10, seed)
    # Neighbours in real text, and those neighbours with one side replaced by a near one.
    draw, model = random.Random(0), real(name)[1].model
    for text in AMBIGUOUS.values():
        for left, right in pairwise(encoder(name)(text)):
            for a, b in ((left, right), (left, near(tokens, right, draw))):
                spelled = tokens.spelling[a], tokens.spelling[b]
                if None in spelled or tokens._encoded(b"".join(spelled)) is None:
                    continue
                if not (tokens.reachable(a) and tokens.reachable(b)):
                    continue
                if tokens.kind == "sentencepiece" and not tokens._byte_set.isdisjoint((a, b)):
                    continue
                seen += 1
                wrong += tokens.valid(a, b) != (tokens._encoded(b"".join(spelled)) == [a, b])
    assert wrong == 0 and seen > 100 and model is not None


def near(tokens, token, draw):
    """A token whose spelling is close in order."""
    at = tokens.range(tokens.spelling[token] or b"a")[0] + draw.randint(-3, 3)
    return int(tokens.sorted_ids[max(0, min(at, len(tokens.sorted_ids) - 1))])


@pytest.mark.parametrize("name", NAMES)
def test_no_wrong_pair(name):
    pairs_are_right(name, 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_wrong_pair_of_100_000(name):
    pairs_are_right(name, 100_000)


@pytest.mark.parametrize("kind", AMBIGUOUS)
@pytest.mark.parametrize("name", NAMES)
def test_laws_on_ambiguous_texts(name, kind):
    check_text(real(name)[0], encoder(name), AMBIGUOUS[kind], CONTINUATIONS[len(kind) % 4 :: 4])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_laws_on_random_texts(name):
    draw = random.Random(0)
    for _ in range(1000):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 10)))
        more = ["".join(draw.choices(PIECES, k=draw.randint(1, 4))) for _ in range(6)]
        check_text(real(name)[0], encoder(name), text, more)


@pytest.mark.parametrize("name", NAMES)
def test_filtered_leaves_keep_what_the_tokenizer_does(name):
    tokens, encode = real(name)[0], encoder(name)
    for text in ("The tokeni", "don'", "  ", "a\n"):
        tree = CoveringTree(tokens)
        tree.push(text.encode())
        covered = Covered(tree, text.encode())
        heads = [head for head in tree.heads() if head.walked]
        for more in ("zer reads", "t", "x", "  y", "!", "9", "\n", "ll"):
            missing = covered.missing(encode(text + more))
            assert missing is None, missing
        for head in heads:
            every = tree.leaves(head, False, True)
            kept = tree.leaves(head, True, True)
            assert set(kept.tolist()) <= set(every.tolist())
            if not head.fresh:
                assert all(tokens.valid(head.node.token, token) for token in kept.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_is_pushed_in_much_less_than_a_forward(name):
    text = ("def area(width, height):\n    return width * height  # don't round\n" * 8).encode()
    tree = CoveringTree(real(name)[0])
    tree.push(text)  # the pre-tokenizer's answers are remembered
    tree, start = CoveringTree(real(name)[0]), time.process_time()
    for byte in text:
        tree.push(bytes([byte]))
        tree.heads()
        tree.live_nodes()
    per_byte = (time.process_time() - start) / len(text)
    assert per_byte < 0.5e-3, f"{per_byte * 1e6:.0f} microseconds of CPU a byte"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_is_read_in_seconds(name):
    tokenizer = real(name)[1]
    start = time.process_time()
    ByteTokens.from_tokenizer(tokenizer)
    assert time.process_time() - start < 5
