"""What is refused before a model is asked: settings that mean nothing, text that is no Unicode.

Not for: what only a model can refuse, such as a prompt beyond its context (`Decoder.admit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lmsmith.decoding.events import Request, Sampling
from lmsmith.errors import UsageError


def check_sampling(sampling: Sampling) -> None:
    """Refuse settings that mean nothing.

    Raises:
        UsageError: A value lies outside its range; the message says which and what is allowed.
    """
    finite = math.isfinite(sampling.temperature)
    for name, value, allowed, good in (
        ("temperature", sampling.temperature, "0 or more", finite and sampling.temperature >= 0),
        ("top_k", sampling.top_k, "0 (off) or more", sampling.top_k >= 0),
        ("top_p", sampling.top_p, "from 0 to 1", 0 <= sampling.top_p <= 1),
        ("min_p", sampling.min_p, "from 0 to 1", 0 <= sampling.min_p <= 1),
        ("seed", sampling.seed, "from 0 to 2**64 - 1", 0 <= (sampling.seed or 0) < 2**64),
    ):
        if not good:
            raise UsageError(f"{name} is {value}, but it must be {allowed}")


def check_request(request: Request) -> None:
    """Refuse a request that no decoder could serve.

    Raises:
        UsageError: A value out of range, or a prompt, message or stop string that holds half a
            character: a lone surrogate, as bytes that are not UTF-8 leave one behind.
    """
    check_sampling(request.sampling)
    if request.max_tokens < 0:
        raise UsageError(f"max_tokens is {request.max_tokens}, but it must be 0 or more")
    for what, value in (("the prompt", request.prompt), ("a stop string", request.stop)):
        for text in _texts(value):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"{what} holds a lone surrogate, U+{ord(text[error.start]):04X}, at character "
                    f"{error.start}; give it as Unicode text"
                ) from None


def _texts(value: Any) -> Iterator[str]:
    """Every string in a prompt or in its messages, however deep."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        # Token ids, of which there may be many, hold no text.
        elif isinstance(one, list | tuple) and one and not isinstance(one[0], int):
            waiting += one
