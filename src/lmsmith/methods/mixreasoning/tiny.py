"""A tiny reasoner that has yet to learn: a Llama over the characters of `sums`.

Not for: what it is taught (`sums`), or teaching it (`lmsmith.training`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lmsmith.methods.mixreasoning.sums import ALPHABET, Piece
from lmsmith.models import LM

END = "<|end|>"
CONTEXT = 256
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tokenizer() -> Any:
    """One token a character, and an end token with id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: place for place, letter in enumerate((END, *ALPHABET))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def untrained(seed: int, width: int = 128, layers: int = 4) -> LM:
    """A model with random weights, about 12 * layers * width^2 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return LM(model, tokens, name=f"sums-{width}x{layers}-{seed}")


def example(pieces: Sequence[Piece]) -> dict[str, list[int]]:
    """A training text as ids with a loss mask, the end token included."""
    ids = {letter: place for place, letter in enumerate(ALPHABET, start=1)}
    found = {"input_ids": [], "loss_mask": []}  # type: dict[str, list[int]]
    for text, counts in pieces:
        found["input_ids"] += [ids[letter] for letter in text]
        found["loss_mask"] += [int(counts)] * len(text)
    return {"input_ids": [*found["input_ids"], 0], "loss_mask": [*found["loss_mask"], 1]}
