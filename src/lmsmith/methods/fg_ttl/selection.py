"""Which positions to learn from: Future-Gain guided token selection (FTS).

The idea: a position is worth learning from when the model is less uncertain after it than before.
Future-Gain is the mean entropy of the window before a position minus that of the window after it,
G(t) = mean H[t-N .. t-1] - mean H[t+1 .. t+N], with a window N(t) that is long where entropy is
calm and short where it jumps. Everything here is a pure function of entropies.

Shapes: `entropy  # [rows, positions]` in nats, right-padded; `starts, lengths  # [rows]`, where
each row's answer begins and where the row ends. What lies past a row's length is never read.

Not for: entropies themselves (`objectives`), or the model (`forward`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """What was chosen, and on what grounds.

    Attributes:
        mask: `[rows, positions]`, bool; the positions to learn from.
        gain: `[rows, positions]`, nats; minus infinity where a position could not be chosen.
        window: `[rows, positions]`, int64; half-width N(t) in tokens.
    """

    mask: Tensor
    gain: Tensor
    window: Tensor


def select(
    entropy: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    local_window: int = 6,
    gamma: float = 1.0,
    n_min: int = 2,
    n_max: int = 10,
    top_p: float = 0.2,
    top_k: int | None = None,
    entropy_threshold: float = 1e-3,
    whole_windows: bool = True,
) -> Selection:
    """Choose the positions of highest Future-Gain, then drop those of almost no entropy.

    Args:
        entropy: `[rows, positions]`, nats.
        starts: `[rows]`; the first position that may be chosen.
        lengths: `[rows]`; positions that exist.
        local_window: Positions over which volatility is measured.
        gamma: Window size at a volatility of one nat.
        n_min: Shortest window, tokens.
        n_max: Longest window, tokens.
        top_p: Share of the eligible positions to take, rounded down, at least one.
        top_k: Take this many instead.
        entropy_threshold: Nats; positions at or below it are dropped after the cut, so that a
            row may end up with none.
        whole_windows: Whether a position needs both its windows inside the row; otherwise they
            are cut at the row's ends, and an empty one counts as zero.

    Source: official code, `PerTokenDynamicFutureGainSelector`, whose defaults these are.
    """
    window = window_sizes(volatility(entropy, lengths, local_window), gamma, n_min, n_max)
    eligible = answer_positions(entropy, starts, lengths)
    if whole_windows:
        eligible &= has_whole_windows(window, lengths)
    gain = future_gain(entropy, window, lengths).masked_fill(~eligible, -torch.inf)
    mask = highest(gain, eligible, top_p, top_k) & (entropy > entropy_threshold)
    return Selection(mask, gain, window)


def volatility(entropy: Tensor, lengths: Tensor, local_window: int = 6) -> Tensor:
    """Standard deviation (n - 1) of the entropies around each position, `[rows, positions]`.

    The neighbourhood reaches (M - 1) // 2 back and M // 2 ahead; past a row's ends its first and
    last values are repeated.
    """
    _, size = entropy.shape
    offsets = torch.arange(local_window, device=entropy.device) - (local_window - 1) // 2
    around = torch.arange(size, device=entropy.device)[:, None] + offsets  # [positions, M]
    last = (lengths - 1).clamp_min(0)[:, None, None]
    around = torch.minimum(around.clamp_min(0)[None], last)  # [rows, positions, M]
    values = entropy.gather(1, around.flatten(1)).view(around.shape)
    return values.std(dim=-1)


def window_sizes(sigma: Tensor, gamma: float = 1.0, n_min: int = 2, n_max: int = 10) -> Tensor:
    """N = clamp(round(gamma / (sigma + 1e-6)), n_min, n_max), halves to even; int64 like sigma."""
    return (gamma / (sigma + 1e-6)).round().clamp(n_min, n_max).long()


def future_gain(entropy: Tensor, window: Tensor, lengths: Tensor) -> Tensor:
    """Mean entropy before each position minus that after it, `[rows, positions]` in nats.

    The position itself is in neither window. Sums are differences of prefix sums, in float64:
    entropies of a long answer add up to far more than one window's.
    """
    rows, size = entropy.shape
    before = torch.zeros(rows, size + 1, dtype=torch.float64, device=entropy.device)
    before[:, 1:] = entropy.double().cumsum(1)  # before[:, t] = sum of H[:t]
    here = torch.arange(size, device=entropy.device).expand(rows, size)
    ends = lengths[:, None]

    def mean(first: Tensor, stop: Tensor) -> Tensor:
        total = before.gather(1, stop) - before.gather(1, first)
        return total / (stop - first).clamp_min(1)

    past = mean((here - window).clamp_min(0), here)
    # Past a row's end both bounds meet there, so padding is in no sum.
    future = mean(torch.minimum(here + 1, ends), torch.minimum(here + 1 + window, ends))
    return (past - future).to(entropy.dtype)


def answer_positions(entropy: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Positions of the answers, `[rows, positions]`, bool."""
    here = torch.arange(entropy.shape[1], device=entropy.device)
    return (here >= starts[:, None]) & (here < lengths[:, None])


def has_whole_windows(window: Tensor, lengths: Tensor) -> Tensor:
    """Where both windows lie inside the row, `[rows, positions]`, bool.

    The past window may reach into the prompt; an answer's last N positions never qualify.
    """
    here = torch.arange(window.shape[1], device=window.device)
    return (here >= window) & (here <= lengths[:, None] - window - 1)


def highest(
    score: Tensor, eligible: Tensor, top_p: float = 0.2, top_k: int | None = None
) -> Tensor:
    """The positions of highest score in each row, `[rows, positions]`, bool.

    Of n eligible positions max(1, floor(top_p * n)) are taken, or top_k; of equal scores the
    earlier position. A row without eligible positions has none.
    """
    count = eligible.sum(1)
    wanted = (count.double() * top_p).floor().long() if top_k is None else count.clamp_max(top_k)
    wanted = torch.minimum(wanted.clamp_min(1), count)
    order = score.masked_fill(~eligible, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    # A score of minus infinity of its own must not let a position in that is not eligible.
    return (rank < wanted[:, None]) & eligible
