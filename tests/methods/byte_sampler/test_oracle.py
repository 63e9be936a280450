"""The reader against brute force and plain forward passes, on tokenizers with every hard part."""

import math

import pytest
import torch
from families import byte_level, sentencepiece
from laws import AMBIGUOUS
from oracle import BruteForce, family_lm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import valid_pairs_lm
from transformers import PreTrainedTokenizerFast

from lmsmith.methods.byte_sampler.reader import ByteReader, normalise
from lmsmith.models.lm import LM
from lmsmith.testing import tiny_model

PREFIXES = [
    *("I'", "the  ", "12345", "they'l", "a b.\n", "the cat \n ", "é中", "don't <b", "it <b>"),
    "ends<tool_call>",
]
HALVES = [
    b"ok " + "中".encode()[:1],
    "混中".encode()[:-1],
    b"x<b>" + "か".encode()[:2],
    "é".encode()[:1],
]


@pytest.mark.parametrize("name", ["gpt-2", "qwen", "gpt-4o", "sentencepiece"])
def test_next_byte_equals_brute_force(name):
    """Open splits, half characters, byte fallback, added tokens finished and not."""
    lm = family_lm(sentencepiece() if name == "sentencepiece" else byte_level(name))
    oracle, reader = BruteForce(lm), ByteReader(lm)
    prefixes = [*map(str.encode, PREFIXES), *HALVES]
    rows = [reader.open([prefix], start=True) for prefix in prefixes]
    for prefix, found in zip(prefixes, normalise(reader.next_bytes(rows)).exp(), strict=True):
        expected = oracle.next_bytes(prefix)
        assert float((found - expected / expected.sum()).abs().max()) <= 1e-9, prefix


def test_every_byte_has_the_share_of_the_prefix_that_goes_on_with_it():
    """The chain rule P(Pb) = P(b | P) P(P), exact where no invalid pair has any mass."""
    lm = valid_pairs_lm()
    reader = ByteReader(lm)
    for prefix in (b"the", b"aaa", b"at ", b"abab", b"that th"):
        row = reader.open([prefix], start=True)
        whole = reader.prefix_logprob(row)
        vector = normalise(reader.next_bytes([row]))[0].exp()
        for byte in range(256):
            if vector[byte] > 0:
                longer = reader.open([prefix + bytes([byte])], start=True)
                share = math.exp(reader.prefix_logprob(longer) - whole)
                assert math.isclose(share, float(vector[byte]), abs_tol=1e-9)
                reader.close(longer)


def test_a_vocabulary_of_single_bytes_is_the_plain_model():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "<eos>": 1} | {c: i for i, c in enumerate(alphabet, 2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<eos>")
    lm = LM(tiny_model("llama", 0, torch.float64, vocabulary=258), fast, name="bytes")
    reader = ByteReader(lm)
    place = [reader.tokens.byte_ids[byte] for byte in range(256)]
    row, ids = reader.open([], start=True), [0]
    for byte in "héllo 中".encode():
        reader.push(row, bytes([byte]))
        ids.append(place[byte])
        with torch.no_grad():
            plain = torch.softmax(lm.model(torch.tensor([ids])).logits[0, -1], -1)
        found = normalise(reader.next_bytes([row]))[0].exp()
        try:
            bytes(place.index(token) for token in ids[1:]).decode()
        except UnicodeDecodeError:
            stop = torch.zeros(())  # inside a character a text cannot end
        else:
            stop = plain[0] + plain[1]
        expected = torch.cat([plain[place], stop[None]])
        assert float((found - expected / expected.sum()).abs().max()) <= 1e-12


def test_only_where_the_end_is_all_there_is_plain_tokens_say_the_same():
    lm = family_lm(byte_level("gpt-2"))
    oracle, reader = BruteForce(lm), ByteReader(lm)
    added = {i: text.encode() for text, i in oracle.literals.items() if i not in oracle.special}
    text = AMBIGUOUS["mixed"]
    furthest: dict[bool, list[float]] = {True: [], False: []}
    for end in range(1, 40):
        with torch.no_grad():
            logits = lm.model(torch.tensor([[lm.bos_id, *lm.encode(text[:end])]])).logits[0, -1]
        law, plain = torch.softmax(logits, -1), torch.zeros(257, dtype=torch.float64)
        for token, spelling in [*oracle.spelling.items(), *added.items()]:
            plain[spelling[0]] += law[token]
        plain[256] = law[sorted(oracle.special)].sum()
        row = reader.open([text[:end].encode()], start=True)
        found = normalise(reader.next_bytes([row]))[0].exp()
        only = reader.only_end(reader.tree(row))
        furthest[only].append(float((found - plain / plain.sum()).abs().max()))
    assert max(furthest[True]) <= 1e-9 < 0.1 < max(furthest[False])
