"""A tiny reasoner and the shift that it meets: chains of additions with every step written out.

A problem is `37dB=`: from 37 add d (4) and B (2) in turn, modulo 100. Its answer is every step on
the way, `41;43,47;49,...`, so that one wrong step makes all later ones wrong, as in a chain of
thought. The shift is noise on the model's weights: it still knows how to add, but less surely.
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
LOWER, UPPER = "abcdefghi", "ABCDEFGHI"
ALPHABET = f"0123456789{LOWER}{UPPER}=;,"
CONTEXT = 64
STEPS = 8


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the source model's weights."""

    seed: int = 0
    width: int = 64
    layers: int = 2
    problems: int = 48_000
    batch: int = 64
    rate: float = 3e-3
    steps: int = STEPS
    version: int = 1


@dataclass(frozen=True)
class Problem:
    """A prompt and its right answer."""

    prompt: str
    answer: str


def problems(count: int, seed: int) -> list[Problem]:
    """Problems that a seed decides, drawn from 8,100 different ones."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        total, terms = draw.randrange(100), (draw.randint(1, 9), draw.randint(1, 9))
        prompt = f"{total:02d}{LOWER[terms[0] - 1]}{UPPER[terms[1] - 1]}="
        steps = ""
        for step in range(STEPS):
            total = (total + terms[step % 2]) % 100
            steps += f"{total:02d}{';,'[step % 2]}"
        made.append(Problem(prompt, steps))
    return made


def shift(lm: LM, noise: float, seed: int) -> None:
    """Add Gaussian noise to every matrix of a model, `noise` of the matrix's own deviation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            if parameter.dim() == 2:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * drawn)


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
    name = f"sums-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = cache_dir() / "fg-ttl" / name
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
    examples = [example(problem) for problem in problems(recipe.problems, recipe.seed)]
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


def example(problem: Problem) -> dict[str, list[int]]:
    """A problem as ids, of which the answer's and the end count."""
    prompt, answer = ([ALPHABET.index(c) + 1 for c in t] for t in (problem.prompt, problem.answer))
    return {
        "input_ids": [*prompt, *answer, 0],
        "loss_mask": [0] * len(prompt) + [1] * (len(answer) + 1),
    }
