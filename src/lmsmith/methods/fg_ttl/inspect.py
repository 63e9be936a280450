"""Where one answer would be learned from, token by token."""

from __future__ import annotations

from typing import Any

import torch

from lmsmith.errors import UsageError
from lmsmith.methods.fg_ttl.adaptation import Adaptation
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.forward import Text, read
from lmsmith.methods.fg_ttl.selection import future_gain, volatility, window_sizes
from lmsmith.methods.fg_ttl.stream import read_items
from lmsmith.methods.fg_ttl.targets import choose
from lmsmith.models import LM


@torch.no_grad()
def explain(lm: LM, prompt: Any, config: FGTTLConfig, chat: bool = False) -> list[dict[str, Any]]:
    """Answer a prompt; one row an answer token, with what the objective makes of it.

    Raises:
        UsageError: The prompt cannot be answered, or the objective learns from prompts.
    """
    if config.objective == "tlm":
        raise UsageError("objective 'tlm' learns from prompts; there is nothing to select")
    state = Adaptation(lm, config)
    [item] = read_items(lm, [prompt], config, chat)
    if item.skipped:
        raise UsageError(item.skipped)
    [answer] = state.predict([item])
    ids, start = (*item.prompt_ids, *answer.ids), len(item.prompt_ids)
    rows = read(lm, [Text(ids, start)])
    entropy = state.learner.entropies(rows)
    generator = torch.Generator().manual_seed(config.seed)
    target = choose(entropy, rows.starts, rows.lengths, config, lm.vocabulary, generator)
    sigma = volatility(entropy, rows.lengths, config.local_window)
    window = window_sizes(sigma, config.gamma, config.n_min, config.n_max)
    gain = future_gain(entropy, window, rows.lengths)
    weights, temperatures = (torch.full_like(entropy, torch.nan) for _ in range(2))
    weights[target.mask], temperatures[target.mask] = target.weights, target.temperatures
    return [
        {
            "position": place,
            "token": lm.decode([ids[place]]),
            "entropy": float(entropy[0, place]),
            "window": int(window[0, place]),
            "gain": float(gain[0, place]),
            "selected": bool(target.mask[0, place]),
            "weight": float(weights[0, place]) if target.mask[0, place] else None,
            "temperature": float(temperatures[0, place]) if target.mask[0, place] else None,
        }
        for place in range(start, len(ids))
    ]
