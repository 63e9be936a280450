"""Toy BPE models small enough to enumerate: the independent side of the oracle tests."""

from __future__ import annotations

import math
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lmsmith.models.lm import LM
from lmsmith.testing import tiny_model

TEXT = "the cat sat on the mat, that that the hat at the attic; abab baba aab aaab aaaa " * 4


@cache
def toy_tokenizer(size: int = 44, text: str = TEXT) -> PreTrainedTokenizerFast:
    """A byte-level BPE without pre-token splits, trained on `text`; it puts `<s>` in front."""
    letters = sorted({*pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                      .pre_tokenize_str(text)[0][0]})  # fmt: skip
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=letters,
        special_tokens=["<s>", "<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[i : i + 40] for i in range(0, len(text), 40)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<eos>")


@cache
def toy_lm(seed: int = 0, size: int = 44, family: str = "llama") -> LM:
    """A tiny float64 model over the toy vocabulary."""
    tokenizer = toy_tokenizer(size)
    model = tiny_model(family, seed, torch.float64, vocabulary=len(tokenizer))
    return LM(model, tokenizer, name="toy")


class _ValidHead(torch.nn.Module):
    """An output layer that forbids tokens which may not follow; the last feature is the token."""

    def __init__(self, weight: torch.Tensor, invalid: torch.Tensor) -> None:
        super().__init__()
        self.weight, self._invalid = torch.nn.Parameter(weight), invalid

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden[..., :-1], self.weight)
        return logits.masked_fill(self._invalid[hidden[..., -1].long()], -math.inf)


def valid_pairs_lm(seed: int = 0) -> LM:
    """A toy model that gives no mass to pairs of tokens which its tokenizer never writes."""
    tokenizer = toy_tokenizer()
    model = tiny_model("llama", seed, torch.float64, vocabulary=len(tokenizer))
    special = set(tokenizer.all_special_ids)
    texts = ["" if i in special else tokenizer.decode([i]) for i in range(len(tokenizer))]
    invalid = torch.tensor(
        [
            [
                token not in special
                and tokenizer(texts[before] + texts[token], add_special_tokens=False)["input_ids"]
                != [one for one in (before, token) if one not in special]
                for token in range(len(tokenizer))
            ]
            for before in range(len(tokenizer))
        ]
    )
    seen: dict[str, torch.Tensor] = {}
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: seen.update(ids=given[0])
    )
    model.get_decoder().norm.register_forward_hook(
        lambda module, given, out: torch.cat([out, seen["ids"][..., None].to(out)], dim=-1)
    )
    model.set_output_embeddings(
        _ValidHead(model.get_input_embeddings().weight.detach().clone(), invalid)
    )
    return LM(model, tokenizer, name="valid pairs")


class Enumeration:
    """Next-byte masses by trying every token sequence, with the tokenizer as the only judge."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        tokenizer = lm.tokenizer
        self.special = set(tokenizer.all_special_ids)
        self.spelling = {
            token: tokenizer.decode([token]).encode()
            for token in range(len(tokenizer))
            if token not in self.special
        }

    @cache  # noqa: B019  # one instance a test
    def logprobs(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Next-token log-probabilities from a forward pass of its own  # [vocabulary]."""
        with torch.no_grad():
            logits = self.lm.model(torch.tensor([[self.lm.bos_id, *ids]])).logits[0, -1]
        return torch.log_softmax(logits, -1)

    def valid(self, ids: tuple[int, ...]) -> bool:
        text = b"".join(self.spelling[token] for token in ids).decode()
        return tuple(self.lm.tokenizer(text, add_special_tokens=False)["input_ids"]) == ids

    def covers(self, prefix: bytes) -> list[tuple[int, ...]]:
        """Valid sequences whose bytes are a prefix of `prefix` (itself included)."""
        found: list[tuple[int, ...]] = []
        stack: list[tuple[tuple[int, ...], bytes]] = [((), b"")]
        while stack:
            ids, data = stack.pop()
            if not self.valid(ids):
                continue  # no extension of an invalid sequence is valid
            found.append(ids)
            for token, spelling in self.spelling.items():
                if prefix.startswith(data + spelling):
                    stack.append(((*ids, token), data + spelling))
        return found

    def next_bytes(
        self, prefix: bytes, filtered: bool, top_k: int = 0, temperature: float = 1.0
    ) -> torch.Tensor:
        """Masses of the next byte and `stop`  # [257], probabilities (not logs).

        Args:
            prefix: The bytes so far.
            filtered: Leave out leaves that are not valid.
            top_k: Truncates the distribution of the leaf, not of the tokens before it; 0 does not.
            temperature: Of every token distribution.
        """
        total = torch.zeros(257, dtype=torch.float64)
        for ids in self.covers(prefix):
            data = b"".join(self.spelling[token] for token in ids)
            laws = [
                torch.log_softmax(self.logprobs(ids[:i]) / temperature, -1)
                for i in range(len(ids) + 1)
            ]
            c = sum(float(law[token]) for law, token in zip(laws, ids, strict=False))
            row = laws[-1].exp()
            if top_k:
                row = torch.where(row >= row.topk(top_k).values[-1], row, 0.0)
                row = row / row.sum()
            row = row * math.exp(c)
            for token, spelling in self.spelling.items():
                whole = data + spelling
                if len(whole) > len(prefix) and whole.startswith(prefix):
                    if filtered and not self.valid((*ids, token)):
                        continue
                    total[whole[len(prefix)]] += row[token]
            if data == prefix:
                total[256] += sum(float(row[token]) for token in self.special)
        return total

    def prefix_probability(self, prefix: bytes) -> float:
        """Mass of the valid sequences that cover the prefix minimally."""
        total = 0.0
        for ids in self.covers(prefix):
            data = b"".join(self.spelling[token] for token in ids)
            c = sum(float(self.logprobs(ids[:i])[ids[i]]) for i in range(len(ids)))
            for token, spelling in self.spelling.items():
                fits = len(data) < len(prefix) and (data + spelling).startswith(prefix)
                if fits and self.valid((*ids, token)):
                    total += math.exp(c + float(self.logprobs(ids)[token]))
        return total
