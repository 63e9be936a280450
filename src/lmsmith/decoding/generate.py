"""The plain loop over a decoder's steps: prompts in, completions out, the batch kept full.

Not for: how any decoder works; methods are found by their cards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmsmith.decoding.checks import check_request
from lmsmith.decoding.events import Decoder, Event, Prompt, Request, Sampling, Trace
from lmsmith.errors import CapabilityError, UsageError

if TYPE_CHECKING:
    from lmsmith.cards import Card
    from lmsmith.models import LM


_DEFAULT = Sampling()


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    Attributes:
        prompt: The prompt as it was given.
        text: New text.
        ids: Token ids (or byte values) that were drawn, the end token included.
        logprobs: Log-probability of each id in nats, before temperature and truncation.
        trace: What it cost and why it ended.
    """

    prompt: Prompt
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    trace: Trace


def make_decoder(
    models: LM | Sequence[LM], method: str | None = None, config: Any = None
) -> Decoder:
    """A decoder by its method's name.

    Args:
        models: One model, or several for a method that combines them.
        method: A method's name; `None` is plain decoding.
        config: The method's settings: its own class, a mapping, or `None` for the defaults.

    Raises:
        UnknownNameError: No such method.
        CapabilityError: A model does not offer what the method needs.
        UsageError: A method that produces no text, or too many models for it.
        ConfigError: Settings that the method does not have or allow.
    """
    models = list(models) if isinstance(models, Sequence) else [models]
    if not models:
        raise UsageError("there is no model; give at least one")
    if method is None:
        if len(models) > 1:
            raise UsageError(
                f"plain decoding takes one model, not {len(models)}; name a method that combines "
                "them"
            )
        if config:
            raise UsageError("plain decoding has no settings of its own; name a method")
        from lmsmith.decoding.plain import PlainDecoder

        check_offers(models[0].offers, models[0].name)
        return PlainDecoder(models[0])

    from lmsmith import cards

    card = cards.get(method)
    make = card.load("decoder")
    if card.models and len(models) > card.models:
        most = "one model" if card.models == 1 else f"at most {card.models} models"
        raise UsageError(f"{method} takes {most}, not {len(models)}")
    for lm in models:
        check_offers(lm.offers, lm.name, card)
    if "config" in card.entry:
        config = card.load("config").parse(config)
    decoder: Decoder = make(models, config)
    return decoder


def check_offers(offers: Collection[str], name: str, card: Card | None = None) -> None:
    """Refuse a model that does not offer what a method needs.

    Args:
        offers: What the model offers, as `LM.offers`.
        name: The model's name.
        card: The method; `None` is plain decoding.

    Raises:
        CapabilityError: Something is missing.
    """
    who, needs = ("plain decoding", ("logits",)) if card is None else (card.name, card.needs)
    if missing := sorted(set(needs) - set(offers)):
        raise CapabilityError(
            who,
            " and ".join(missing),
            ", ".join(sorted(offers)) or "nothing",
            f"give another model than {name}",
        )


def stream(decoder: Decoder, requests: Iterable[Request], batch_size: int = 32) -> Iterator[Event]:
    """Run requests through a decoder and yield its Events as they come.

    A row that ends makes room for the next request, so the batch stays full; requests may come
    from a generator and are taken only when there is room. If the caller stops early, or a request
    is refused, the rows at work are retired. The decoder is the stream's own meanwhile.

    Args:
        decoder: A decoder without active rows.
        requests: What to run.
        batch_size: Most rows at once.

    Yields:
        The decoder's Events; an Event's `row` is its request's position in `requests`.

    Raises:
        UsageError: A request the decoder refuses, or a batch size below 1.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, but it must be at least 1")
    waiting = enumerate(requests)
    place: dict[int, int] = {}  # the decoder's row -> the request's position
    more = True
    try:
        while True:
            while more and len(place) < batch_size:
                for position, request in waiting:
                    check_request(request)
                    place[decoder.admit(request)] = position
                    break
                else:
                    more = False
            if not place:
                return
            for event in decoder.step():
                position = place[event.row]
                if event.trace is not None:
                    del place[event.row]
                yield replace(event, row=position)
    finally:
        for row in place:
            decoder.retire(row)


def generate(
    models: LM | Sequence[LM],
    prompts: Sequence[Prompt] | str | bytes,
    *,
    method: str | None = None,
    config: Any = None,
    sampling: Sampling | Sequence[Sampling] = _DEFAULT,
    max_tokens: int = 128,
    stop: Sequence[str] | str = (),
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    batch_size: int = 32,
    on_event: Callable[[Event], None] | None = None,
) -> list[Completion]:
    """Continue prompts, with the plain model or with a method.

    Args:
        models: One model, or several for a method that combines them.
        prompts: Texts, UTF-8 bytes, token ids or chat messages; one text counts as a list of one.
        method: A method's name; `None` is plain decoding.
        config: The method's settings: its own class, a mapping, or `None` for the defaults.
        sampling: How to draw: one a prompt, or one for all. One for all with a seed gives the
            prompt at position i the seed plus i, so that equal prompts differ.
        max_tokens: Most new tokens a prompt.
        stop: Strings that end a text.
        stop_ids: Token ids that end a text, besides the model's own.
        ignore_eos: Go on past the model's end tokens.
        batch_size: Most prompts at work at once.
        on_event: Called with every Event as it comes; `row` is the prompt's position.

    Returns:
        One completion a prompt, in their order.

    Raises:
        UsageError: A prompt that cannot be used or a value out of range; among several prompts
            the message names which.
        CapabilityError: A model does not offer what the method needs.
    """
    if isinstance(prompts, str | bytes):
        prompts = [prompts]
    if not all(isinstance(prompt, str | bytes | Sequence) for prompt in prompts):
        raise UsageError(
            "prompts is a list of prompts; put one prompt's token ids or messages into a list of "
            "their own"
        )
    if isinstance(sampling, Sampling):
        sampling = [_with_own_seed(sampling, position) for position in range(len(prompts))]
    if len(sampling) != len(prompts):
        raise UsageError(f"{len(sampling)} sampling settings for {len(prompts)} prompts")
    requests = [
        Request(
            prompt,
            max_tokens=max_tokens,
            sampling=one,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_ids=tuple(stop_ids),
            ignore_eos=ignore_eos,
        )
        for prompt, one in zip(prompts, sampling, strict=True)
    ]
    return complete(make_decoder(models, method, config), requests, batch_size, on_event)


def check_all(requests: Sequence[Request], decoder: Decoder | None = None) -> None:
    """Refuse what cannot be served before anything is generated.

    Args:
        requests: What will be run.
        decoder: Asked as well: admitting a request computes nothing yet, so each is admitted and
            retired again.

    Raises:
        UsageError: A request that is refused; among several by its number, `prompt 3 of 4: ...`.
    """
    for number, request in enumerate(requests, start=1):
        try:
            check_request(request)
            if decoder is not None:
                decoder.retire(decoder.admit(request))
        except UsageError as error:
            if len(requests) == 1:
                raise
            raise UsageError(f"prompt {number} of {len(requests)}: {error}") from error


def complete(
    decoder: Decoder,
    requests: Sequence[Request],
    batch_size: int = 32,
    on_event: Callable[[Event], None] | None = None,
) -> list[Completion]:
    """Run requests through a decoder to their ends.

    Args:
        decoder: A decoder without active rows.
        requests: What to run.
        batch_size: Most rows at once.
        on_event: Called with every Event as it comes.

    Returns:
        One completion a request, in their order.

    Raises:
        UsageError: A request the decoder refuses; among several the message names which, and
            nothing has been generated.
    """
    check_all(requests, decoder)
    events: list[list[Event]] = [[] for _ in requests]
    for event in stream(decoder, requests, batch_size):
        events[event.row].append(event)
        if on_event is not None:
            on_event(event)
    return [_joined(request, of_row) for request, of_row in zip(requests, events, strict=True)]


def _joined(request: Request, events: Sequence[Event]) -> Completion:
    trace = events[-1].trace
    assert trace is not None, "a decoder ended a row without a trace"
    return Completion(
        prompt=request.prompt,
        text="".join(event.text for event in events),
        ids=tuple(one for event in events for one in event.ids),
        logprobs=tuple(one for event in events for one in event.logprobs),
        trace=trace,
    )


def _with_own_seed(sampling: Sampling, position: int) -> Sampling:
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + position) % 2**64)
