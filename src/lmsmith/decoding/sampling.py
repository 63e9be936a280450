"""Drawing the next token, or byte, for a whole batch of rows at once.

Rows differ in their settings and each owns a random generator, so what a row draws does not depend
on its neighbours. Truncation follows transformers: temperature, top-k, top-p, min-p, each on what
the one before left over. The width is whatever the logits have: a vocabulary, or 257 for bytes.

Not for: choosing the model or keeping a row's text (`lmsmith.decoding.rows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from lmsmith.decoding.events import Sampling
from lmsmith.errors import LmsmithError

_BLOCK = 512
"""Entries summed together in the coarse level of a draw."""

_NUCLEUS_GUESS = 1024
"""Candidates looked at first for top-p without top-k; a flatter row falls back to a full sort."""


class Drawn(NamedTuple):
    """One draw a row.

    Attributes:
        ids: Chosen entries, [rows] int64.
        logprobs: Their log-probabilities in nats before temperature and truncation, [rows].
    """

    ids: torch.Tensor
    logprobs: torch.Tensor


def generator_for(sampling: Sampling) -> torch.Generator:
    """A row's own random generator, on the CPU so that a seed means the same on every device."""
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def sample(
    logits: torch.Tensor,
    samplings: Sampling | Sequence[Sampling],
    generators: Sequence[torch.Generator],
) -> Drawn:
    """Draw one entry a row.

    Args:
        logits: Unnormalised log-probabilities, [rows, n]; -inf forbids an entry.
        samplings: One setting for all rows, or one a row. Temperature 0 takes the most likely.
        generators: One a row; a row that is not greedy takes one number from its own.

    Raises:
        LmsmithError: A row's logits are not numbers, or forbid everything.
    """
    logits = _wide(logits)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for part in _parts_for(logits, samplings):
        chosen = logits[part.index]
        if part.greedy:
            ids[part.index] = chosen.argmax(-1)
            continue
        weights, places = _weights(chosen, part)
        drawn = draw(weights, [generators[row] for row in part.rows])
        ids[part.index] = drawn if places is None else places.gather(-1, drawn[:, None])[:, 0]
    # Twice as fast as logsumexp. What is not a number spoils its whole row, so the choice shows it.
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    if not bool(logprobs.isfinite().all()):
        raise LmsmithError(
            "the model's logits are not finite numbers; open it with dtype float32, or check it"
        )
    return Drawn(ids, logprobs)


def filtered_probs(logits: torch.Tensor, samplings: Sampling | Sequence[Sampling]) -> torch.Tensor:
    """The distribution that `sample` draws from, [rows, n], each row summing to 1.

    Args:
        logits: Unnormalised log-probabilities, [rows, n].
        samplings: One setting for all rows, or one a row. Temperature 0 puts all on the maximum.
    """
    logits = _wide(logits)
    probs = torch.zeros_like(logits)
    for part in _parts_for(logits, samplings):
        chosen = logits[part.index]
        if part.greedy:
            shares = torch.zeros_like(chosen).scatter_(-1, chosen.argmax(-1, keepdim=True), 1.0)
        else:
            weights, places = _weights(chosen, part)
            shares = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
            if places is not None:
                shares = torch.zeros_like(chosen).scatter_add_(-1, places, shares)
        probs[part.index] = shares
    return probs


def draw(weights: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw one index a row in proportion to non-negative weights, [rows, n] -> [rows] int64.

    Each row inverts its own cumulative sum at one uniform number of its own generator. The sum is
    kept in two levels, blocks and entries, so that a wide vocabulary costs one pass and float64
    rounding. An entry of weight 0 is never drawn.
    """
    rows, n = weights.shape
    uniform = torch.tensor(
        [torch.rand((), dtype=torch.float64, generator=one).item() for one in generators],
        dtype=torch.float64,
    ).to(weights.device)  # [rows]
    if n > _BLOCK:
        pad = -n % _BLOCK
        blocks = torch.nn.functional.pad(weights, (0, pad)).view(rows, -1, _BLOCK)
        coarse = blocks.sum(-1).double().cumsum(-1)  # [rows, blocks]
        target = uniform * coarse[:, -1]
        block = _first_above(coarse, target)
        before = (coarse.gather(-1, (block - 1).clamp(min=0)[:, None])[:, 0]).where(block > 0, 0.0)
        fine = blocks[torch.arange(rows, device=weights.device), block].double().cumsum(-1)
        return (block * _BLOCK + _first_above(fine, target - before)).clamp(max=n - 1)
    fine = weights.double().cumsum(-1)
    return _first_above(fine, uniform * fine[:, -1])


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative weight exceeds the target, [rows, m], [rows] -> [rows]."""
    # Rounding may put the target on the very end; then the last entry with weight is meant.
    last = cumulative[:, -1] * (1 - 2**-52)
    found = torch.searchsorted(cumulative, torch.minimum(target, last)[:, None], right=True)[:, 0]
    return found.clamp(max=cumulative.shape[-1] - 1)  # weights that are not numbers have no place


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class _Part:
    """The rows of a batch that are drawn in the same way; their settings are columns."""

    rows: tuple[int, ...]
    index: torch.Tensor | slice
    greedy: bool
    ranked: bool  # needs the candidates in order: top-k or top-p is on
    temperature: torch.Tensor  # [rows, 1]
    log_min_p: torch.Tensor | None  # [rows, 1]; None where no row uses it
    top_k: torch.Tensor  # [rows, 1]; 0 is off
    top_p: torch.Tensor  # [rows, 1]; 2 is off: no share of a distribution reaches it
    most: int  # largest top-k; 0 if none is on
    nucleus: bool  # some row uses top-p without top-k


def _parts_for(logits: torch.Tensor, samplings: Sampling | Sequence[Sampling]) -> tuple[_Part, ...]:
    if isinstance(samplings, Sampling):
        samplings = (samplings,) * logits.shape[0]
    elif len(samplings) != logits.shape[0]:
        raise ValueError(f"{len(samplings)} settings for {logits.shape[0]} rows of logits")
    return _parts(tuple(samplings), logits.device)


@lru_cache(maxsize=64)
def _parts(samplings: tuple[Sampling, ...], device: torch.device) -> tuple[_Part, ...]:
    """Split a batch by how its rows are drawn; cached, as a batch is the same for many steps."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for row, one in enumerate(samplings):
        greedy = one.temperature == 0
        ranked = not greedy and (one.top_k > 0 or one.top_p < 1)
        kinds.setdefault((greedy, ranked), []).append(row)

    def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    parts = []
    for (greedy, ranked), rows in kinds.items():
        ones = [samplings[row] for row in rows]
        everything = len(kinds) == 1
        parts.append(
            _Part(
                rows=tuple(rows),
                index=slice(None) if everything else torch.tensor(rows, device=device),
                greedy=greedy,
                ranked=ranked,
                temperature=column([one.temperature for one in ones]),
                log_min_p=column([math.log(one.min_p) if one.min_p else -math.inf for one in ones])
                if any(one.min_p for one in ones)
                else None,
                top_k=column([one.top_k for one in ones], torch.int64),
                top_p=column([one.top_p if one.top_p < 1 else 2.0 for one in ones]),
                most=max(one.top_k for one in ones),
                nucleus=any(one.top_p < 1 and not one.top_k for one in ones),
            )
        )
    return tuple(parts)


def _weights(logits: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unnormalised probabilities after truncation, and the entries they belong to if reordered."""
    # Relative to the row's maximum, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(part.temperature.to(logits.dtype))
    if part.ranked:
        return _ranked(scaled, part)
    if part.log_min_p is not None:
        scaled.masked_fill_(scaled < part.log_min_p.to(scaled.dtype), -math.inf)
    return scaled.exp_(), None


def _ranked(scaled: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the candidates by falling probability, [rows, m], and their entries, [rows, m].

    Only as many candidates are ordered as the truncation can keep, never a whole vocabulary unless
    the distribution is that flat. Every row sees the same order whatever its neighbours need: ties
    at a row's top-k are all kept, as transformers keeps them, and ties stand in entry order.
    """
    n = scaled.shape[-1]
    width = min(n, max(part.most, _NUCLEUS_GUESS if part.nucleus else 0))
    values, places = scaled.topk(width)
    limited = part.top_k > 0
    kth = values.gather(-1, part.top_k.clamp(1, width) - 1).where(limited, -math.inf)  # [rows, 1]
    whole = scaled.exp().sum(-1, keepdim=True).double() if part.nucleus else None
    if width < n:
        ties = int((scaled >= kth).where(limited & kth.isfinite(), False).sum(-1).max())
        if ties > width:
            values, places = scaled.topk(ties)
    values, places = _ties_in_entry_order(values, places)
    if width < n and whole is not None:
        # The nucleus must end strictly above the last candidate, or ties would be cut.
        inside = values.double().exp().where(values > values[:, -1:], 0.0).sum(-1, keepdim=True)
        flat = (~limited & (inside < part.top_p * whole)).nonzero()[:, 0]
        if len(flat):
            missing = n - values.shape[-1]
            values = torch.nn.functional.pad(values, (0, missing), value=-math.inf)
            places = torch.nn.functional.pad(places, (0, missing))
            values[flat], places[flat] = scaled[flat].sort(stable=True, dim=-1, descending=True)
    weights = values.double().exp().where(values >= kth, 0.0)
    total = weights.sum(-1, keepdim=True)
    shares = weights / (total if whole is None else total.where(limited, whole))
    keep = shares.cumsum(-1) - shares < part.top_p
    keep[:, 0] = True
    if part.log_min_p is not None:
        keep &= values >= part.log_min_p
    return weights.where(keep, 0.0), places


def _ties_in_entry_order(
    values: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Falling values with equal ones by rising entry, which `topk` does not promise."""
    if not bool((values[:, 1:] == values[:, :-1]).any()):
        return values, places
    by_entry = places.argsort(-1)
    values, order = values.gather(-1, by_entry).sort(stable=True, dim=-1, descending=True)
    return values, places.gather(-1, by_entry).gather(-1, order)
