"""Next-byte masses of any toy tokenizer by brute force: text to come is tried, not reasoned about.

The judges are the tokenizer's own pre-tokenizer and BPE model. Where the tokens of a prefix depend
on what follows, many continuations are tokenized, and each says where a token may be read.
"""

from __future__ import annotations

import json
import math
import re

import torch
from laws import AMBIGUOUS, CONTINUATIONS
from transformers import PreTrainedTokenizerFast

from lmsmith.models.lm import LM
from lmsmith.testing import tiny_model


def family_lm(tokenizer, seed: int = 0) -> LM:
    """A tiny float64 model over one of `families.py`'s tokenizers."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    size = tokenizer.get_vocab_size()
    ids = {"bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id}
    return LM(tiny_model("llama", seed, torch.float64, vocabulary=size, **ids), fast, name="toy")


def byte_characters() -> list[str]:
    """GPT-2's character for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


class BruteForce:
    """Where a token may be read after a prefix, and the next byte's masses."""

    def __init__(self, lm: LM) -> None:
        self.lm, self.tokenizer = lm, lm.tokenizer.backend_tokenizer
        state = json.loads(self.tokenizer.to_str())
        self.characters = state["model"]["byte_fallback"]
        self.literals = {one["content"]: one["id"] for one in state["added_tokens"]}
        self.special = {one["id"] for one in state["added_tokens"] if one["special"]}
        alphabet = byte_characters()
        back = {character: byte for byte, character in enumerate(alphabet)}
        self.alphabet = alphabet
        self.spelling: dict[int, bytes] = {}
        for text, token in state["model"]["vocab"].items():
            if self.characters:
                single = re.fullmatch("<0x(..)>", text)
                spelled = bytes([int(single[1], 16)]) if single else text.replace("▁", " ").encode()
                if single and spelled < b"\x80" and self.bpe(spelled) != (token,):
                    continue  # no text becomes this token
            else:
                spelled = bytes(back[character] for character in text)
            if spelled.decode(errors="replace") not in self.literals and token not in self.special:
                self.spelling[token] = spelled

    def bpe(self, data: bytes) -> tuple[int, ...]:
        """Tokens of a pre-token, or of the beginning of one."""
        if not data:
            return ()
        text = data.decode().replace(" ", "▁") if self.characters else ""
        text = text or "".join(self.alphabet[byte] for byte in data)
        return tuple(token.id for token in self.tokenizer.model.tokenize(text))

    def pretokens(self, text: str) -> list[str]:
        """The text as the pre-tokenizer splits it."""
        if self.characters or not text:
            return [text] if text else []
        pieces = self.tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [text[start:stop] for _, (start, stop) in pieces]

    def heads(self, prefix: bytes) -> dict[tuple[tuple[int, ...], bytes, bool], bool]:
        """(Tokens before, bytes walked, of an added token) -> the prefix may end there as it is."""
        found: dict[tuple[tuple[int, ...], bytes, bool], bool] = {}
        for whole in self._texts(prefix):
            self._read(prefix, whole, found)
        return found

    def _texts(self, prefix: bytes):
        try:
            begun = prefix.decode()
        except UnicodeDecodeError as error:
            half, begun = prefix[error.start :], prefix[: error.start].decode()
            points = {chr(p) for p in (*range(0x80, 0x3100), *range(0x4E00, 0xA000, 7))}
            points.update("".join(AMBIGUOUS.values()))
            endings = [point for point in points if point.encode().startswith(half)]
            yield from (begun + end + then for end in endings for then in ("", "a"))
            return
        yield from (begun + more for more in CONTINUATIONS)
        yield from (begun + text[cut:] for text in self.literals for cut in range(len(text)))

    def _read(self, prefix: bytes, whole: str, found: dict) -> None:
        ids: tuple[int, ...] = ()
        at, size = 0, len(prefix)
        literal = "|".join(map(re.escape, sorted(self.literals, key=len, reverse=True)))
        for piece in re.split(f"({literal})", whole):
            if piece in self.literals:
                stop = at + len(piece.encode())
                if stop > size:
                    if at < size and self.literals[piece] not in self.special:
                        found[ids, prefix[at:], True] = False
                    return
                ids, at = (*ids, self.literals[piece]), stop
                continue
            for pretoken in self.pretokens(piece):
                data = pretoken.encode()
                if at + len(data) > size:
                    self._inside(ids, prefix[at:], pretoken, found)
                    return
                ids, at = (*ids, *self.bpe(data)), at + len(data)
        assert at == size
        found[ids, b"", False] = True

    def _inside(self, ids: tuple[int, ...], begun: bytes, pretoken: str, found: dict) -> None:
        """Places in a pre-token of which the prefix has only the beginning."""
        cuts = range(len(begun) + 1)
        if self.characters:
            ends = [len(pretoken[:n].encode()) for n in range(len(pretoken) + 1)]
            cuts = [end for end in ends if end <= len(begun)]
            split = pretoken[len(cuts) - 1] if cuts[-1] < len(begun) else ""
            if split and self.bpe(split.encode()) and len(self.bpe(split.encode())) > 1:
                spelled = self.bpe(split.encode())[: len(begun) - cuts[-1]]
                found.setdefault(
                    ((*ids, *self.bpe(begun[: cuts[-1]]), *spelled), b"", False), False
                )
                return
        for cut in cuts:
            walked = begun[cut:]
            if any(spelled.startswith(walked) for spelled in self.spelling.values()):
                found.setdefault(((*ids, *self.bpe(begun[:cut])), walked, False), False)

    def next_bytes(self, prefix: bytes) -> torch.Tensor:
        """Masses of the next byte and `stop`, leaves not filtered  # [257], probabilities."""
        total = torch.zeros(257, dtype=torch.float64)
        for (ids, walked, added), ends in self.heads(prefix).items():
            with torch.no_grad():
                logits = self.lm.model(torch.tensor([[self.lm.bos_id, *ids]])).logits[0]
            laws = torch.log_softmax(logits, -1)
            c = sum(float(laws[at][token]) for at, token in enumerate(ids))
            probs = (laws[-1] + c).exp()
            ordinary = {text.encode(): token for text, token in self.literals.items()}
            extra = [(t, s) for s, t in ordinary.items() if t not in self.special]
            leaves = extra if added else list(self.spelling.items()) + (extra if ends else [])
            for token, spelled in leaves:
                if spelled.startswith(walked) and len(spelled) > len(walked):
                    total[spelled[len(walked)]] += probs[token]
            if ends:
                total[256] += probs[sorted(self.special | self.lm.eos_ids)].sum()
        assert math.isfinite(float(total.sum()))
        return total
