"""Small tokenizers with the pre-tokenizers of well-known families, trained in the test."""

from __future__ import annotations

import json
from functools import cache

from laws import AMBIGUOUS
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "<b>", "<b>x", "\n\n\n")

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _regex(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, _BYTES])


SPLITTERS = {
    "whole text": _BYTES,
    "gpt-2": _GPT2,
    # Groups of up to three digits, from the left.
    "gpt-4": _regex(
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
    ),
    # Case matters, contractions belong to their word.
    "gpt-4o": _regex(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + _CONTRACTIONS
        + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + _CONTRACTIONS
        + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        + _SPACES
    ),
    "qwen": _regex(
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
    ),
    # Several passes, one of them for a script.
    "deepseek": _regex(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    ),
    # Groups of three digits from the right: every alignment stays open.
    "digits from the right": _regex(
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"[^\r\n\p{L}\p{N}]?\p{Lu}*[\p{Ll}\p{M}]+|[^\r\n\p{L}\p{N}]?\p{Lu}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
    ),
    # Depends on what is before the split.
    "look-behind": _regex(r"(?<=[$<x])\d+|\d|\p{L}+|[^\d\p{L}]+"),
    "single digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _GPT2]
    ),
}


def _train(tokenizer: Tokenizer, size: int, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
    )
    words = "the cat isn't on the mat; they'll see 12 cats and 345678 dogs in the tokenizer. " * 3
    tokenizer.train_from_iterator([*AMBIGUOUS.values(), words] * 3, trainer)
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in ADDED])


@cache
def byte_level(name: str, size: int = 700) -> Tokenizer:
    """A byte-level BPE with one of `SPLITTERS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SPLITTERS[name]
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, size, sorted(pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


@cache
def whole_words(name: str = "gpt-4") -> Tokenizer:
    """Like Llama 3: pre-tokens in the vocabulary are never merged; some no merge can make."""
    state = json.loads(byte_level(name).to_str())
    state["model"]["ignore_merges"] = True
    vocabulary = state["model"]["vocab"]
    top = 10 + max(*vocabulary.values(), *(a["id"] for a in state["added_tokens"]))
    for index, word in enumerate(
        ["Ġtokenizer", "Ġdogs", "Ġdo", "345", "don", "æĸĩåŃĹ", "ĠĠĠ", "Hi"]
    ):
        if word not in vocabulary:
            vocabulary[word] = top + index
        state["model"]["merges"] = [
            merge for merge in state["model"]["merges"] if "".join(merge) != word
        ]
    known = {a["content"] for a in state["added_tokens"]} | set(vocabulary)
    state["model"]["merges"] = [m for m in state["model"]["merges"] if set(m) <= known]
    return Tokenizer.from_str(json.dumps(state))


@cache
def sentencepiece(size: int = 400) -> Tokenizer:
    """Like Gemma: characters with byte fallback, spaces rewritten, no splits."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        limit_alphabet=80,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    texts = [piece for text in AMBIGUOUS.values() for piece in text.split("\n")]
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in texts] * 3, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [a for a in state["added_tokens"] if not a["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken(c, normalized=False) for c in (*ADDED, "\n", "\n\n", "\t")])
    return tokenizer


def tokenizers() -> dict[str, Tokenizer]:
    """Every family by name."""
    families = {name: byte_level(name) for name in SPLITTERS}
    return {**families, "whole words": whole_words(), "sentencepiece": sentencepiece()}
