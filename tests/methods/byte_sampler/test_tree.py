"""The covering tree's laws on small tokenizers of every family, against the tokenizer itself."""

import random

import numpy as np
import pytest
from families import SPLITTERS, byte_level, sentencepiece, tokenizers, whole_words
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import AMBIGUOUS, CONTINUATIONS, Covered, check_leaves, check_text, exact, path, text_of
from tokenizers import Tokenizer, models, pre_tokenizers

from lmsmith.errors import LmsmithError, UsageError
from lmsmith.methods.byte_sampler import pretokens
from lmsmith.methods.byte_sampler.tree import CoveringTree
from lmsmith.methods.byte_sampler.vocabulary import ByteTokens

FAMILIES = [*tokenizers()]
READ = {name: ByteTokens.from_tokenizer(tokenizer) for name, tokenizer in tokenizers().items()}

PIECES = (
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "'", "a", "1", "12", "345", ".", "<", "|", "A", "_"),
    *("ll", "ve", "re", "s", "the", " the", "x", "-", "/", "!!", "<b", "<b>", "<|im_", "im_end|>"),
    *("é", "\u0301", "中", "か", "🙂", "\u200d", "٣", "\u00a0"),
)
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def encoder(name):
    tokenizer = tokenizers()[name]
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def tree_of(name, data):
    tree = CoveringTree(READ[name])
    tree.push(data)
    return tree


@pytest.mark.parametrize("kind", AMBIGUOUS)
@pytest.mark.parametrize("name", FAMILIES)
def test_laws_on_ambiguous_texts(name, kind):
    check_text(READ[name], encoder(name), AMBIGUOUS[kind], CONTINUATIONS[len(kind) % 5 :: 5])


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=30)
@given(text=texts, more=st.lists(texts, max_size=4))
def test_laws_on_any_text(name, text, more):
    check_text(READ[name], encoder(name), text, more)


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=15)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=6), more=st.text(max_size=3))
def test_laws_on_any_unicode(name, text, more):
    if READ[name].kind == "sentencepiece" and "▁" in text + more:
        return
    check_text(READ[name], encoder(name), text, [more])


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=15)
@given(text=texts, more=texts)
def test_filtered_leaves_keep_every_valid_continuation(name, text, more):
    tree, data = tree_of(name, text.encode()), text.encode()
    missing = Covered(tree, data).missing(encoder(name)(text + more), filtered=True)
    assert missing is None, missing


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", ["I'll <b>x", "<|im_ é中 ", "x  12\n\n\n"])
def test_leaves(name, text):
    tree = CoveringTree(READ[name])
    for byte in text.encode():
        tree.push(bytes([byte]))
        check_leaves(tree)


def test_filtered_leaves_are_exactly_the_valid_ones_without_splits():
    name, encode = "whole text", encoder("whole text")
    tokens = READ[name]
    for text in ["the tok", "they'll s", "  ", "a", "12 cats and 34"]:
        tree = tree_of(name, text.encode())
        for head in tree.heads():
            if head.added:
                continue
            ids = tree.trunk + path(head.node, tree.root)
            leaves = set(tree.leaves(head, True, True).tolist())
            for token in tokens.sorted_ids.tolist():
                spelled = b"".join(text_of(tokens, t) for t in [*ids, token])
                if not spelled.startswith(text.encode()) or len(spelled) == len(text.encode()):
                    assert token not in leaves
                    continue
                try:
                    whole = spelled.decode()
                except UnicodeDecodeError:
                    continue
                if any(content in whole for content in tokens.literals):
                    continue
                assert (token in leaves) == (encode(whole) == [*ids, token])


def covers(tokens, encode, prefix):
    """Definition 3.1, by brute force: sequences of ordinary tokens that cover a text minimally."""
    found, stack = set(), [((), b"")]
    while stack:
        ids, data = stack.pop()
        for token in tokens.sorted_ids.tolist():
            spelled = data + tokens.spelling[token]
            if not (spelled.startswith(prefix) or prefix.startswith(spelled)):
                continue
            if encode(spelled.decode()) != [*ids, token]:
                continue
            if len(spelled) >= len(prefix):
                found.add((*ids, token))
            else:
                stack.append(((*ids, token), spelled))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_is_the_set_of_all_valid_coverings(seed):
    draw = random.Random(seed)
    pieces, merges = list("ab "), []
    while len(merges) < 14:
        a, b = draw.choice(pieces), draw.choice(pieces)
        if len(a + b) < 6 and (a, b) not in merges:
            merges.append((a, b))
            pieces += [a + b] if a + b not in pieces else []
    if seed % 2:
        draw.shuffle(merges)
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(pieces)}, merges=merges))
    tokens = ByteTokens.from_tokenizer(tokenizer)

    def encode(text):
        return tokenizer.encode(text).ids

    for _ in range(12):
        prefix = "".join(draw.choices("ab ", k=draw.randint(1, 7))).encode()
        tree = CoveringTree(tokens)
        tree.push(prefix)
        found = [
            (*tree.trunk, *path(head.node, tree.root), leaf)
            for head in tree.heads()
            for leaf in tree.leaves(head, filtered=True, inclusive=False).tolist()
        ]
        assert len(set(found)) == len(found)
        expected = covers(tokens, encode, prefix)
        if tuple(tree.trunk) in expected:  # the exact end is all there is: nothing is open
            found.append(tuple(tree.trunk))
        assert set(found) == expected


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=15)
@given(text=texts, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_chunking_does_not_matter(name, text, cuts):
    data = text.encode()
    whole, chunked = tree_of(name, data), CoveringTree(READ[name])
    at = 0
    for cut in sorted(cut for cut in cuts if cut <= len(data)):
        chunked.push(data[at:cut])
        chunked.heads()  # reading must not change anything either
        at = cut
    chunked.push(data[at:])
    assert picture(whole) == picture(chunked)


def picture(tree):
    heads = {
        (*tree.trunk, *path(h.node, tree.root), h.walked, h.fresh, h.joins, h.added, h.ends)
        for h in tree.heads()
    }
    return tree.trunk, heads, exact(tree), tree.pushed, len(tree.live_nodes())


@pytest.mark.parametrize("name", FAMILIES)
def test_forks_are_independent_and_share_nodes(name):
    text = b"the cats  don't <b" + "中".encode()[:2]
    tree = tree_of(name, text)
    before, nodes = picture(tree), tree.live_nodes()
    copy = tree.fork()
    assert picture(copy) == before and copy.live_nodes() == nodes
    copy.push("中".encode()[2:] + b" and 12345 more <|im_end|> text")
    assert picture(tree) == before
    tree.push("中".encode()[2:])
    assert picture(tree) == picture(tree_of(name, text + "中".encode()[2:]))
    assert picture(copy) == picture(
        tree_of(name, text + "中".encode()[2:] + b" and 12345 more <|im_end|> text")
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_node_stays_the_same_object_while_it_lives(name):
    tree, known = CoveringTree(READ[name]), {}
    for byte in AMBIGUOUS["mixed"].encode():
        tree.push(bytes([byte]))
        live = {}
        for node in tree.live_nodes():
            key = (*tree.trunk, *path(node, tree.root)), node.end
            live[key] = node
            assert known.get(key, node) is node
            assert node.parent is tree.root or node.parent in live.values()
        known = live


@pytest.mark.parametrize("name", FAMILIES)
def test_one_node_a_byte(name):
    """While text grows byte by byte, nodes are made at about the rate of bytes."""
    text = b"The quick brown fox isn't lazy; it jumps over 12 dogs in the tokenizer."
    tree = CoveringTree(READ[name])
    for byte in text:
        tree.push(bytes([byte]))
        tree.live_nodes()
    hypotheses = 1.25 if name in SPLITTERS or name == "sentencepiece" else 1.6
    assert tree._made - 1 <= hypotheses * len(text)


@pytest.mark.parametrize("name", ["gpt-2", "gpt-4o", "digits from the right", "whole words"])
def test_a_hypothesis_that_was_not_kept_is_made_again(name):
    """A witness that is missing costs time, not the text's tokenization."""
    text = AMBIGUOUS["mixed"] + "x" * 90 + "'ll " + "1" * 12
    tree, replayed = CoveringTree(READ[name]), 0
    for end, character in enumerate(text, 1):
        if tree._segment.tail:
            tree._forget()
            segment, replayed = tree._segment, replayed + len(tree._segment.strands) - 1
            segment.strands = {segment.complete: segment.strands[segment.complete]}
        root = tree.root
        tree.push(character.encode())
        path(tree.root, root)  # the root only moves up
        assert exact(tree) == encoder(name)(text[:end])
    assert replayed >= 3


@pytest.mark.parametrize("name", ["gpt-2", "gpt-4o", "digits from the right"])
def test_without_witnesses_a_text_is_read_right_or_refused(name, monkeypatch):
    monkeypatch.setattr(pretokens, "_witnesses", lambda tail: ("",))
    tokens, draw, refused = ByteTokens.from_tokenizer(tokenizers()[name]), random.Random(0), 0
    for _ in range(60):
        text, tree = "".join(draw.choices(PIECES, k=8)), CoveringTree(tokens)
        try:
            tree.push(text.encode())
        except LmsmithError as error:
            assert "not foreseen" in str(error) and "\n" not in str(error)
            refused += 1
        else:
            assert exact(tree) == encoder(name)(text)
    assert refused < 60


def test_the_tree_stays_small():
    for name in FAMILIES:
        tree = CoveringTree(READ[name])
        for byte in ("word and 12 more. " * 30).encode():
            tree.push(bytes([byte]))
            assert len(tree.live_nodes()) < 24
            assert len(tree._nodes) < 256


LONG = {
    "letters": "x" + "abcde" * 40 + "'ll fgh" + "É" * 3,
    "case": "A" * 110 + "b" * 110 + "C9",
    "spaces": "a" + " " * 210 + "\n" + " " * 110 + "b",
    "line ends": "." + "\n" * 110 + " \n" + "\n" * 101 + "  x",
    "marks of all kinds": "-a" + "b" * 110 + "é" + "=" * 110 + "\n\n" + "'" * 110 + "s",
    "cjk": "漢字かな" * 30 + "。",
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_open_end_is_read_as_the_tokenizer_reads_it(name, kind):
    """Also where its beginning is no longer looked at."""
    tree, encode = CoveringTree(READ[name]), encoder(name)
    for end, character in enumerate(LONG[kind], 1):
        tree.push(character.encode())
        if end % 7 == 0 or end == len(LONG[kind]):
            assert exact(tree) == encode(LONG[kind][:end]), LONG[kind][end - 9 : end]


@pytest.mark.parametrize("unit", ["a", " ", "-", "acgtca", "\n"])
def test_the_work_of_unbroken_text_is_linear(unit, monkeypatch):
    splitter, asked = READ["gpt-4"].splitter, []
    plain = splitter.splits
    monkeypatch.setattr(splitter, "splits", lambda text: asked.append(len(text)) or plain(text))
    work = []
    for count in (600, 1200):
        splitter._outcomes.clear()
        asked.clear()
        tree_of("gpt-4", (unit * count)[:count].encode())
        work.append(sum(asked))
    assert work[1] < 2.5 * work[0]


def test_the_empty_tree():
    tree = CoveringTree(READ["gpt-2"])
    assert tree.root.token == -1 and tree.trunk == [] and tree.pushed == 0
    (head,) = tree.heads()
    assert head.node is tree.root is tree.exact()
    assert (head.walked, head.fresh, head.ends, head.added) == (b"", True, True, False)
    assert set(READ["gpt-2"].sorted_ids) < set(tree.leaves(head, False, True).tolist())
    assert tree.leaves(head, False, False).size == 0


def test_special_ids_end_the_text_before_them():
    name = "gpt-2"
    tokens, encode = READ[name], encoder(name)
    start, end = (tokens.literals[s] for s in ("<|im_start|>", "<|im_end|>"))
    tree = CoveringTree(tokens)
    tree.push_id(start)
    assert tree.trunk == [start] and tree.root.token == start
    tree.push(b"user  ")
    tree.push_id(end)
    # Two spaces at the end of a text are one piece; before a word they would not be.
    assert tree.trunk == [start, *encode("user  "), end]
    assert tree.live_nodes() == [] and tree.pushed == len("user  ")
    tree.push(b" x")
    assert exact(tree) == [start, *encode("user  "), end, *encode(" x")]


def test_special_ids_that_cannot_be_used():
    tree = CoveringTree(READ["gpt-2"])
    with pytest.raises(UsageError, match="not in 0"):
        tree.push_id(10**6)
    tree.push("中".encode()[:1])
    with pytest.raises(UsageError, match="half a character"):
        tree.push_id(0)


def test_a_special_token_spelled_out_is_found_but_never_a_leaf():
    name = "gpt-2"
    tokens = READ[name]
    end = tokens.literals["<|im_end|>"]
    tree = CoveringTree(tokens)
    for byte in b"ok<|im_end|>":
        for head in tree.heads():
            assert end not in tree.leaves(head, False, True)
            assert end not in tree.leaves(head, True, False)
        tree.push(bytes([byte]))
    assert tree.trunk == [*encoder(name)("ok"), end]


def test_added_tokens_are_leaves_while_they_are_unfinished():
    tokens = READ["gpt-2"]
    tree = tree_of("gpt-2", b"so <b")
    (head,) = [head for head in tree.heads() if head.added]
    assert head.walked == b"<b" and head.fresh
    bold, longer = tokens.literals["<b>"], tokens.literals["<b>x"]
    assert set(tree.leaves(head, False, True)) == {bold, longer}
    tree.push(b">")
    (head,) = [head for head in tree.heads() if head.added]
    assert tree.leaves(head, False, True).tolist() == [longer]
    assert set(tree.leaves(head, False, False)) == {bold, longer}
    assert tree.exact().token == bold
    tree.push(b"y")
    assert not any(head.added for head in tree.heads())
    assert bold in tree.trunk


@pytest.mark.parametrize("name", ["gpt-2", "sentencepiece"])
@pytest.mark.parametrize(
    ("data", "bad"),
    [
        (b"ok\xff", 2),
        (b"\x80", 0),
        (b"a\xc3a", 2),
        (b"\xed\xa0\x80", 1),  # a surrogate
        (b"\xc0\xaf", 0),  # overlong
        (b"\xf4\x90\x80\x80", 1),  # above U+10FFFF
        ("中".encode()[:2] + b"\n", 2),
    ],
)
def test_bytes_that_are_not_text(name, data, bad):
    tree = CoveringTree(READ[name])
    with pytest.raises(UsageError, match=f"byte 0x{data[bad]:02x} at position {bad} cannot") as e:
        tree.push(data)
    assert "\n" not in str(e.value)
    # What came before stands, and the tree goes on from there.
    assert tree.pushed == bad
    assert not tree.allowed()[data[bad]]
    assert picture(tree) == picture(tree_of(name, data[:bad]))


@pytest.mark.parametrize("name", ["gpt-2", "sentencepiece"])
def test_allowed_bytes_are_those_that_can_be_pushed(name):
    for prefix in (
        b"",
        b"a",
        "é".encode()[:1],
        "中".encode()[:2],
        "🙂".encode()[:3],
        "中".encode(),
    ):
        allowed = tree_of(name, prefix).allowed()
        for byte in range(256):
            tree = tree_of(name, prefix)
            try:
                tree.push(bytes([byte]))
            except UsageError:
                assert not allowed[byte]
            else:
                assert allowed[byte]


def test_text_without_tokens_is_refused_and_leaves_the_tree_as_it_was():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tree = CoveringTree(ByteTokens.from_tokenizer(tokenizer))
    tree.push(b"ab")
    before = picture(tree)
    with pytest.raises(UsageError, match="no token for 'z'"):
        tree.push(b"z")
    assert picture(tree) == before
    tree.push(b"a")
    assert exact(tree) == [2, 0]


def test_single_bytes_reduce_to_the_plain_model():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    tree = CoveringTree(ByteTokens.from_tokenizer(tokenizer))
    for count, byte in enumerate("héllo 中".encode(), 1):
        tree.push(bytes([byte]))
        ends = [head for head in tree.heads() if not head.walked]
        assert len(ends) == 1 and len(exact(tree)) == count
        # The place before the last token is done with: nothing is longer than its one byte.
        for head in tree.heads():
            assert not head.walked or not tree.leaves(head, False, True).size


def test_whole_words_take_the_token_that_no_merge_makes():
    _tokens, encode = READ["whole words"], encoder("whole words")
    word = whole_words().token_to_id("Ġtokenizer")
    tree = tree_of("whole words", b"the tokenizer")
    assert exact(tree) == encode("the tokenizer") and exact(tree)[-1] == word
    ends = [head for head in tree.heads() if not head.walked]
    assert len(ends) == 2  # the word as it is, and merged where it goes on
    assert [head.node.token == word for head in ends if head.ends] == [True]
    tree.push(b"s")
    assert word not in exact(tree) and exact(tree) == encode("the tokenizers")
    tree = tree_of("whole words", b"the tokenizer")
    tree.push(b".")
    assert word in exact(tree)


def test_a_literal_space_mark_is_read_as_a_space():
    tree = tree_of("sentencepiece", "a▁b".encode())
    assert exact(tree) == encoder("sentencepiece")("a▁b") == encoder("sentencepiece")("a b")


def test_leaves_are_integer_arrays():
    tree = tree_of("gpt-2", b"the <b")
    for head in tree.heads():
        for filtered in (False, True):
            for inclusive in (False, True):
                assert np.issubdtype(tree.leaves(head, filtered, inclusive).dtype, np.integer)


def test_byte_level_and_sentencepiece_families_are_both_here():
    assert {READ[name].kind for name in FAMILIES} == {"byte-level", "sentencepiece"}
    assert byte_level("gpt-2") and sentencepiece()
