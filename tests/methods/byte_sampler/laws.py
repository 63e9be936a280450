"""The laws of a covering tree, with the tokenizer itself as the only judge."""

from __future__ import annotations

from collections.abc import Iterable

from lmsmith.methods.byte_sampler.tree import CoveringTree, Head, Node
from lmsmith.methods.byte_sampler.vocabulary import ByteTokens

AMBIGUOUS = {
    "trailing spaces": "a  b   c    \n   d     ",
    "line ends": "x\r\n\r\ny\r\n z\n \n \nw \n\n  \n\t\n v\r\r\n",
    "contractions": "I'll we'LL they'Ll it'S don't d'ye rock'n'roll 'tis 've've I'd'v''s I'm'",
    "digits": "1 12 123 1234 12345 123456 1234567 8x9 10:30 3.14159 ٣٤٥٦ x1234567",
    "prices": "$12 $1234 12 x12y34 <567> $1a2 <1",
    "marks": "é ñ́ vs ñ ạ̈o क्षि x́́y ́a",
    "emoji": "👨‍👩‍👧‍👦 🏳️‍🌈🇺🇸a ✊🏿☝️+🙂",
    "cjk": "你好,世界。漢字カタカナかな混合123 한국어 테스트 全角 3",
    "markers": "<|im_start|>user\nhi<|im_end|>\n<|im_en <|im_ <|endoftext|> <b>bold</b><tool_call> "
    "<|<|im_end|>",
    "tabs": "\ta\t\tb\t \tc \t\td\n\t\te",
    "code": "def f_(x: int=0, *a) -> str:\n    return f'{x:08x}'  # ok\n\n\n"
    "if (x->y) {s += '\\n';}//e\n",
    "quotes": "— 'mix' of …?! ()[]{} ... “quotes” can’t; !!!\n\n??/\n",
    "case": "parseHTTPServerURL2JSONv2BetaXiOS15Pro HELLOWorld aB Ab ABC's ǅen’s ǅEN",
    "spaces": "a\u00a0b\u2009c\u3000d\u200be\u2028f\u0085g \u3000\u3000h  \u00a0 i\ufeffj",
    "control": "con\x00a\x1fb\x7fc \x0b\x0cd",
    "sentencepiece": "a▁b ▁▁c <0x41> ▁",
    "mixed": "Hi  é123'll 世界!!\n\n  OK\r\n\t'S <|im_end|> 🙂 don't 45678 ",
    "scripts": "עברית abc\u200f Ελλάδα Привет กำลังทดสอบ ك١٢٣ ﷽ x² ½ Ⅷ ㍿",
}
"""Texts whose tokenization depends on what comes later."""

CONTINUATIONS = (
    *(
        "",
        "a",
        "s",
        "ll",
        "LL",
        "ve ",
        "The",
        " the",
        " ",
        "  ",
        "   x",
        "\n",
        "\n\n",
        " \n",
        "\r\n",
    ),
    *(
        "\t",
        "1",
        "23",
        "456",
        "7890",
        ".",
        "!!",
        "'",
        "'s",
        "'LL",
        "_x",
        "/",
        "é",
        "\u0301",
        "中文",
    ),
    *("end|>", "m_end|>", ">", "|>", "<b>", "🙂", "\u200d", "٣", "ا", " 'll", "\n x", "  \n\n  y"),
)


def path(node: Node, root: Node) -> list[int]:
    """Token ids from the root (excluded) to a node."""
    ids: list[int] = []
    at: Node | None = node
    while at is not root:
        assert at is not None, "the node is not above the root"
        ids.append(at.token)
        at = at.parent
    return ids[::-1]


def exact(tree: CoveringTree) -> list[int]:
    """The tree's canonical tokenization of its prefix."""
    return tree.trunk + path(tree.exact(), tree.root)


def text_of(tokens: ByteTokens, token: int) -> bytes:
    """The bytes of any token, special ones included."""
    spelling = tokens.spelling[token]
    return tokens.added_text(token).encode() if spelling is None else spelling


def check_shape(tree: CoveringTree, prefix: bytes) -> None:
    """Soundness: every head spells the prefix; heads and nodes do not repeat; the tree is small."""
    tokens, heads, live = tree.tokens, tree.heads(), tree.live_nodes()
    plain = prefix.replace("▁".encode(), b" ") if tokens.rewrites_spaces else prefix
    seen = set()
    for head in heads:
        spelled = b"".join(text_of(tokens, t) for t in tree.trunk + path(head.node, tree.root))
        assert plain in (spelled + head.walked, (spelled + head.walked).replace("▁".encode(), b" "))
        key = (id(head.node), head.walked, head.added)
        assert key not in seen
        seen.add(key)
    assert len({(id(node.parent), node.token) for node in live}) == len(live)
    assert len(live) <= 64, f"{len(live)} live nodes"
    assert any(not head.walked for head in heads)
    if not tokens.whole_words:
        for strand in tree._now().strands.values():
            assert sum(not place.walked for place in strand.places) == 1


def check_leaves(tree: CoveringTree) -> None:
    """Leaves begin with what is walked; none is also a branch; filtered ones are a subset."""
    tokens, live = tree.tokens, tree.live_nodes()
    for head in tree.heads():
        branches = {node.token for node in live if node.parent is head.node}
        for filtered in (False, True):
            if not head.walked and filtered and tokens.size > 5000:
                continue
            leaves = tree.leaves(head, filtered, True).tolist()
            assert len(set(leaves)) == len(leaves)
            if head.walked:
                for token in leaves:
                    own = (
                        text_of(tokens, token)
                        if not head.added
                        else tokens.added_text(token).encode()
                    )
                    assert own.startswith(head.walked) and len(own) > len(head.walked)
                    assert head.added or token not in branches


class Covered:
    """Whether canonical tokenizations of continuations pass through a tree."""

    def __init__(self, tree: CoveringTree, prefix: bytes) -> None:
        self.tree, self.prefix = tree, prefix
        self.heads: dict[tuple[tuple[int, ...], bytes], list[Head]] = {}
        for head in tree.heads():
            key = (*tree.trunk, *path(head.node, tree.root)), head.walked
            self.heads.setdefault(key, []).append(head)

    def missing(self, ids: list[int], filtered: bool = False) -> str | None:
        """Why the tree lacks the tokens of a text that begins with the prefix; None if it has."""
        tokens, size, start = self.tree.tokens, len(self.prefix), 0
        lengths = [len(text_of(tokens, token)) for token in ids]
        if tokens.rewrites_spaces and any(
            p in self.prefix[-2:] + b" " for p in (b"\xe2\x96", b"\xe2 ")
        ):
            return None  # inside a literal U+2581, which will be read as a space
        if tokens.rewrites_spaces and "▁".encode() in self.prefix:
            return None
        index = 0
        while index < len(ids) and start + lengths[index] <= size:
            start += lengths[index]
            index += 1
        token = ids[index] if index < len(ids) else None
        walked = self.prefix[start:]
        found = self.heads.get((tuple(ids[:index]), walked))
        if token in tokens.special_ids:
            return None  # the model's `stop`, not a leaf
        if not found:
            return f"no head after {ids[:index][-3:]} with {walked!r} walked, for {token}"
        if token is None or not (walked or filtered):
            return None
        if any(token in self.tree.leaves(head, filtered, True) for head in found):
            return None
        return f"{token} is no leaf after {ids[:index][-3:]} with {walked!r} walked"


def check_text(
    tokens: ByteTokens, encode, text: str, continuations: Iterable[str] = (), start: int = 0
) -> None:
    """All laws at every byte of a text from `start` on.

    Args:
        tokens: The vocabulary.
        encode: The tokenizer: text to ids, no special tokens added.
        text: The text.
        continuations: What to try after every whole character, besides the text itself. Those
            that a normalizer would join with the text are left out: sampled bytes are not
            normalized.
        start: First byte that is looked at.
    """
    text = tokens.normalize(text)
    data, tree = text.encode(), CoveringTree(tokens)
    whole = encode(text)
    tree.push(data[:start])
    for end in range(start + 1, len(data) + 1):
        tree.push(data[end - 1 : end])
        prefix = data[:end]
        assert tree.pushed == end
        check_shape(tree, prefix)
        covered = Covered(tree, prefix)
        missing = covered.missing(whole)
        assert missing is None, f"after {prefix!r}, the text itself: {missing}"
        try:
            sofar = prefix.decode()
        except UnicodeDecodeError:
            continue
        assert exact(tree) == encode(sofar), f"canonical tokenization of {sofar!r}"
        for more in continuations:
            if tokens.normalize(sofar + more) != sofar + more:
                continue
            missing = covered.missing(encode(sofar + more))
            assert missing is None, f"after {sofar!r}, before {more!r}: {missing}"
