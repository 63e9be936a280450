"""Tiny language models of every supported family, with seeded random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lmsmith.errors import UnknownNameError
from lmsmith.models.lm import LM
from lmsmith.testing.tokenizers import tiny_tokenizer

FAMILIES = ("llama", "qwen2", "gemma3", "gpt2")
CONTEXT = 256
# Shorter than the sequences that tests feed, so that crops and trees cross it.
WINDOW = 6


def tiny_model(
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocabulary: int = 512,
    **overrides: Any,
) -> PreTrainedModel:
    """A model of some 50,000 parameters, in evaluation mode.

    Its weights are larger than a fresh model's, so that logits depend on every token seen and a
    wrong mask or position shows.

    Args:
        family: One of `FAMILIES`.
        seed: Seed of the weights.
        dtype: Of the weights.
        vocabulary: Token ids.
        **overrides: Settings of the transformers configuration.

    Raises:
        UnknownNameError: No such family.
    """
    shared: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1}
    block: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
    }
    config: Any
    model: PreTrainedModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "llama":
            config = LlamaConfig(**(shared | block | {"tie_word_embeddings": True} | overrides))
            model = LlamaForCausalLM(config)
        elif family == "qwen2":
            config = Qwen2Config(**(shared | block | overrides))
            model = Qwen2ForCausalLM(config)
        elif family == "gemma3":
            own = {
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "final_logit_softcapping": 30.0,
                "pad_token_id": 2,
            }
            config = Gemma3TextConfig(**(shared | block | own | overrides))
            model = Gemma3ForCausalLM(config)
        elif family == "gpt2":
            own = {
                "n_embd": 32,
                "n_layer": 3,
                "n_head": 4,
                "n_positions": CONTEXT,
                "initializer_range": 0.2,
            }
            config = GPT2Config(**(shared | own | overrides))
            model = GPT2LMHeadModel(config)
        else:
            raise UnknownNameError("model family", family, FAMILIES)
        # Biases and norms start at constants; noise makes them count.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    torch.nn.Module.to(model, dtype)
    return model.eval().requires_grad_(False)


def tiny_lm(
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> LM:
    """A `tiny_model` with the `tiny_tokenizer`, ready for a session or a decoder."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, seed, dtype, vocabulary=len(tokenizer), **overrides)
    return LM(model, tokenizer, name=f"tiny-{family}")
