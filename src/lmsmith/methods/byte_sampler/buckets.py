"""From next-token probabilities to next-byte masses: which byte each token stands for.

Not for: which tokens may follow; that is the covering tree's (`tree`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lmsmith.methods.byte_sampler.vocabulary import ByteTokens

STOP = 256
"""Index of `stop` in a 257-vector."""

_DISCARD = 257


class ByteBuckets:
    """Which next byte each token stands for, once the first bytes of it are known.

    Args:
        tokens: The model's vocabulary as bytes.
        vocabulary: Width of the model's logits (may exceed the tokenizer's).
        stop_ids: Tokens that count as `stop`.
        device: Where the tables live.
    """

    def __init__(
        self, tokens: ByteTokens, vocabulary: int, stop_ids: frozenset[int], device: torch.device
    ) -> None:
        self._tokens, self._vocabulary, self._device = tokens, vocabulary, device
        first = torch.full((vocabulary,), _DISCARD, dtype=torch.long)
        for token, spelling in enumerate(tokens.spelling[:vocabulary]):
            if spelling:
                first[token] = spelling[0]
        self._first = first.to(device)  # [vocabulary] in 0..257
        # What only the end of a complete text may be followed by: `stop`, and added tokens.
        ending = {token: STOP for token in stop_ids if token < vocabulary}
        ending |= {
            token: content[0]
            for token, content in tokens.added.items()
            if token < vocabulary and token not in ending
        }
        self._ending = torch.tensor(list(ending), dtype=torch.long, device=device)
        self._ending_bytes = torch.tensor(list(ending.values()), dtype=torch.long, device=device)
        self._cache: dict[bytes, tuple[Tensor, Tensor]] = {}

    def masses(self, logprobs: Tensor) -> Tensor:
        """Sum ordinary tokens' probabilities by first byte: `[n, vocabulary] -> [n, 257]`."""
        sums = logprobs.new_zeros(len(logprobs), _DISCARD + 1)
        return sums.index_add_(1, self._first, logprobs.exp())[:, :_DISCARD]

    def ending(self, logprobs: Tensor) -> Tensor:
        """Probability of `stop`, and of added tokens by first byte: `[vocabulary] -> [257]`."""
        sums = logprobs.new_zeros(_DISCARD)
        return sums.index_add_(0, self._ending_bytes, logprobs[self._ending].exp())

    def stop(self, logprobs: Tensor) -> Tensor:
        """Probability of `stop` alone: `[vocabulary] -> [257]`."""
        sums = self.ending(logprobs)
        sums[:STOP] = 0
        return sums

    def after(self, walked: bytes) -> tuple[Tensor, Tensor]:
        """Ids of the tokens longer than `walked` that start with it, and their next bytes."""
        if walked not in self._cache:
            if len(self._cache) > 4096:
                self._cache.clear()
            low, high = self._tokens.range(walked)
            low += len(self.spelled(walked))
            following = np.empty(high - low, dtype=np.int64)
            if high - low > 512:  # spellings are sorted, so each next byte is one stretch of them
                for byte in range(256):
                    first, last = self._tokens.range(walked + bytes((byte,)))
                    following[first - low : last - low] = byte
            else:
                for place, token in enumerate(self._tokens.sorted_ids[low:high].tolist()):
                    following[place] = self._tokens.spelling[token][len(walked)]
            ids = self._tokens.sorted_ids[low:high]
            known = ids < self._vocabulary
            self._cache[walked] = (
                torch.from_numpy(ids[known]).to(self._device),
                torch.from_numpy(following[known]).to(self._device),
            )
        return self._cache[walked]

    def spelled(self, walked: bytes) -> list[int]:
        """Ids of the ordinary tokens whose bytes are exactly `walked`."""
        low, high = self._tokens.range(walked)
        ids = []
        for token in self._tokens.sorted_ids[low:high]:
            if self._tokens.spelling[token] != walked:
                break
            ids.append(int(token))
        return ids

    def split(self, ids: Sequence[int] | np.ndarray, walked: bytes) -> tuple[Tensor, Tensor]:
        """The `ids` that have a byte after `walked`, and that byte, as tensors."""
        at = len(walked)
        kept, following = [], []
        for token in map(int, ids):
            spelling = self._tokens.spelling[token] or self._tokens.added.get(token, b"")
            if len(spelling) > at and token < self._vocabulary:
                kept.append(token)
                following.append(spelling[at])
        return (
            torch.tensor(kept, dtype=torch.long, device=self._device),
            torch.tensor(following, dtype=torch.long, device=self._device),
        )
