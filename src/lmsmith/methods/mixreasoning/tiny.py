"""A tiny reasoner: a Llama over the characters of `sums`, trained once and kept by its recipe.

Not for: what it is taught (`sums`), or the loop that teaches it (`lmsmith.training`).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmsmith.methods.mixreasoning.sums import ALPHABET, Piece, Problem, brief_example, think_example
from lmsmith.models import LM
from lmsmith.models.cache import cache_dir
from lmsmith.training import train

END = "<|end|>"
CONTEXT = 256


@dataclass(frozen=True)
class Recipe:
    """What a tiny reasoner is made from; the same recipe is the same model.

    Attributes:
        seed: Of weights, examples and their order.
        width: Of the residual stream.
        layers: Transformer blocks.
        base_steps: Steps of the thinking model, all weights.
        brief_steps: Steps of the concise adapter, the base frozen.
        batch: Examples a step.
        base_rate: Peak learning rate of the thinking model.
        brief_rate: Peak learning rate of the adapter.
        rank: Of the adapter; its alpha is twice that.
        operands: Numbers a problem.
    """

    seed: int = 0
    width: int = 96
    layers: int = 3
    base_steps: int = 600
    brief_steps: int = 400
    batch: int = 32
    base_rate: float = 3e-3
    brief_rate: float = 3e-3
    rank: int = 8
    operands: int = 4

    def train(self) -> LM:
        """The trained model with its adapter; each from the cache if it was made before."""
        lm = untrained(self.seed, self.width, self.layers)
        base = {"steps": self.base_steps, "learning_rate": self.base_rate}
        folder = self._train(lm, base, think_example, cache_dir() / "trained" / "sums")
        brief = {
            "steps": self.brief_steps,
            "learning_rate": self.brief_rate,
            "tune": "lora",
            "lora_rank": self.rank,
            "lora_alpha": 2.0 * self.rank,
        }
        self._train(lm, brief, brief_example, folder / "brief")
        return lm

    def _train(
        self,
        lm: LM,
        settings: Mapping[str, Any],
        make: Callable[[Problem, random.Random], list[Piece]],
        parent: Path,
    ) -> Path:
        """Train on examples; the folder, named by a hash of all that makes the result."""
        rng = random.Random(f"{self.seed} {make.__name__}")
        settings = {**SHARED, "batch_size": self.batch, "seed": self.seed, **settings}
        problems = (Problem.draw(rng, self.operands) for _ in range(settings["steps"] * self.batch))
        examples = [example(make(problem, rng)) for problem in problems]
        text = json.dumps([settings, examples[:64], lm.name])
        folder = parent / hashlib.sha256(text.encode()).hexdigest()[:12]
        train(lm, examples, settings, out=folder / "run")
        return folder


SHARED: Mapping[str, Any] = {
    "schedule": "wsd",
    "warmup": 0.04,
    "decay": 0.3,
    "betas": (0.9, 0.98),
    "weight_decay": 0.01,
    "precision": "float32",
    "logits_chunk": 8192,  # the vocabulary is 20 characters
    "checkpoint_every": 100,
    "keep": 1,
}


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
