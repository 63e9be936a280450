"""A tiny reasoner and the shift that it meets: running sums with worked steps.

A problem is `37+5+8=`, its answer every running sum modulo 100, `42;50;`. The source model is
trained on these; the stream writes them in another way, so that the model knows how to add but is
unsure of what it reads.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lmsmith.files import folder_atomic
from lmsmith.models import LM
from lmsmith.models.cache import cache_dir

END = "<|end|>"
ALPHABET = "0123456789+=;& "
CONTEXT = 128


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the source model's weights."""

    seed: int = 0
    width: int = 96
    layers: int = 3
    problems: int = 160_000
    batch: int = 64
    rate: float = 2e-3
    version: int = 1


@dataclass(frozen=True)
class Problem:
    """A prompt and its right answer."""

    prompt: str
    answer: str


def problems(count: int, seed: int, steps: tuple[int, int] = (5, 8)) -> list[Problem]:
    """Problems of the source: a two-digit start and some one-digit terms."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        total = draw.randrange(100)
        terms = [draw.randrange(1, 10) for _ in range(draw.randint(*steps))]
        prompt, sums = f"{total:02d}", []
        for term in terms:
            total = (total + term) % 100
            prompt += f"+{term}"
            sums.append(f"{total:02d};")
        made.append(Problem(f"{prompt}=", "".join(sums)))
    return made


def shifted(problem: Problem) -> Problem:
    """The same problem as the stream writes it: another sign, which the source never saw."""
    return Problem(problem.prompt.replace("+", "&"), problem.answer)


def tokenizer() -> Any:
    """One token a character, and an end token with id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: place for place, letter in enumerate((END, *ALPHABET))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def source_model(recipe: Recipe) -> LM:
    """The trained source model; trained once and then read from the cache."""
    from transformers import LlamaForCausalLM

    text = json.dumps(asdict(recipe), sort_keys=True)
    name = f"fg-ttl-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = cache_dir() / "trained" / name
    if not folder.is_dir():
        lm = _train(recipe)
        with folder_atomic(folder) as temporary:
            lm.model.save_pretrained(temporary)
            (temporary / "recipe.json").write_text(text, encoding="utf-8")
    return LM(LlamaForCausalLM.from_pretrained(folder), tokenizer(), name)


def _train(recipe: Recipe) -> LM:
    from transformers import LlamaConfig, LlamaForCausalLM

    from lmsmith.training import TrainSettings, train

    tokens = tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=recipe.width,
        intermediate_size=8 * recipe.width // 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        lm = LM(LlamaForCausalLM(config), tokens, "the tiny reasoner")
    examples = [_example(problem) for problem in problems(recipe.problems, recipe.seed)]
    settings = TrainSettings(
        batch_size=recipe.batch,
        learning_rate=recipe.rate,
        schedule="cosine",
        warmup=0.05,
        precision="float32",
        seed=recipe.seed,
    )
    train(lm, examples, settings)
    return lm


def _example(problem: Problem) -> dict[str, list[int]]:
    """A problem as ids, of which the answer's and the end count."""
    prompt, answer = ([ALPHABET.index(c) + 1 for c in t] for t in (problem.prompt, problem.answer))
    return {
        "input_ids": [*prompt, *answer, 0],
        "loss_mask": [0] * len(prompt) + [1] * (len(answer) + 1),
    }
