"""What each objective learns from: positions of the answers, their weights and temperatures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmsmith.methods.fg_ttl import objectives
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.selection import (
    answer_positions,
    has_whole_windows,
    highest,
    select,
    volatility,
    window_sizes,
)


@dataclass(frozen=True)
class Target:
    """Where the loss is taken, and how strongly.

    Attributes:
        mask: `[rows, positions]`, bool; S positions in all.
        weights: `[S]`, constants that sum to 1 (EATA's do not), in the mask's row-major order.
        temperatures: `[S]`, constants.
    """

    mask: Tensor
    weights: Tensor
    temperatures: Tensor


def choose(
    entropy: Tensor,
    starts: Tensor,
    lengths: Tensor,
    config: FGTTLConfig,
    vocabulary: int,
    generator: torch.Generator | None = None,
) -> Target:
    """The target of every objective on answers.

    Args:
        entropy: `[rows, positions]`, nats; without a graph.
        starts: `[rows]`; where the answers begin.
        lengths: `[rows]`.
        config: Names the objective and holds its settings.
        vocabulary: Size of the distributions.
        generator: Draws the random positions.
    """
    answers = answer_positions(entropy, starts, lengths)
    gain = None
    match config.objective:
        case "fg-ttl" | "selection":
            chosen = select(
                entropy,
                starts,
                lengths,
                local_window=config.local_window,
                gamma=config.gamma,
                n_min=config.n_min,
                n_max=config.n_max,
                top_p=config.top_p,
                top_k=config.top_k,
                entropy_threshold=config.entropy_threshold,
                whole_windows=config.whole_windows,
            )
            mask, gain = chosen.mask, chosen.gain
        case "temperature":
            mask = answers
            if config.whole_windows:
                sigma = volatility(entropy, lengths, config.local_window)
                window = window_sizes(sigma, config.gamma, config.n_min, config.n_max)
                mask = answers & has_whole_windows(window, lengths)
        case "high-entropy":
            mask = highest(entropy, answers, config.top_p, config.top_k)
        case "random":
            score = torch.rand(entropy.shape, generator=generator).to(entropy.device)
            mask = highest(score, answers, config.top_p, config.top_k)
        case "eata":
            margin = config.eata_margin or objectives.eata_margin(vocabulary)
            mask = answers & (entropy < margin)
        case "sar":
            margin = config.sar_margin or objectives.sar_margin(vocabulary)
            mask = answers & (entropy < margin)
        case _:  # tent, come
            mask = answers
    return weigh(mask, entropy, gain, config, vocabulary)


def weigh(
    mask: Tensor, entropy: Tensor, gain: Tensor | None, config: FGTTLConfig, vocabulary: int
) -> Target:
    """Weights and temperatures of chosen positions."""
    chosen = entropy[mask]
    temperatures = torch.ones_like(chosen)
    if config.objective in ("fg-ttl", "temperature"):
        temperatures = objectives.risk_temperature(chosen, config.alpha)
    if config.objective == "fg-ttl" and gain is not None:
        weights = objectives.gain_weights(gain[mask], config.tau)
    elif config.objective == "eata":
        margin = config.eata_margin or objectives.eata_margin(vocabulary)
        weights = objectives.eata_weights(chosen, margin)
    else:
        weights = objectives.uniform_weights(len(chosen), chosen)
    return Target(mask, weights, temperatures)
