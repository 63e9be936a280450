"""`lmsmith generate`: read prompts, run one decoder over them, print the text as it comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lmsmith.display.console import show_json
from lmsmith.display.progress import progress
from lmsmith.errors import UsageError

if TYPE_CHECKING:
    from lmsmith.cards import Card
    from lmsmith.decoding.events import Event, Prompt, Request, Sampling, Trace


def generate(
    model: str,
    prompt: str | None = None,
    /,
    *,
    method: str | None = None,
    config: Path | None = None,
    prompts: Path | None = None,
    batch_size: int = 32,
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: list[str] | None = None,
    chat: Annotated[bool, Parameter(negative="--raw")] = False,
    system: str | None = None,
    adapter: Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    show: bool = False,
    json: bool = False,
    dry_run: bool = False,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Continue a prompt, plainly or with a method.

    With `--method M` the settings of M are options as well; `lmsmith generate --method M --help`
    lists them.

    Args:
        model: A known name, folder, hub id or .gguf file; A+B for a method that takes several.
        prompt: Text to continue; - reads standard input, less a final line break.
        method: A name from `lmsmith list`; by default plain decoding.
        config: TOML file with settings of the method; options override it.
        prompts: File of prompts: one a line, or JSON lines with `prompt` or `messages`.
        batch_size: Most prompts to run at once.
        max_tokens: Most new tokens, or bytes for a method that draws bytes.
        temperature: Sampling temperature; 0 always takes the likeliest token.
        top_k: Draw from the k likeliest tokens only; 0 draws from all.
        top_p: Draw from the likeliest tokens that together reach this probability.
        min_p: Leave out tokens less likely than this share of the likeliest one.
        seed: Seed of the draws; without one every run differs.
        stop: String that ends the text; repeatable.
        chat: Put the prompt into the model's chat template; --raw, the default, does not.
        system: System message; implies --chat.
        adapter: Folder of a PEFT LoRA adapter.
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        threads: CPU threads; by default the count that is fastest right now.
        show: Show the prompt, and colour the text by the method's signal; without a method, by
            each token's probability.
        json: Print one JSON document and nothing else.
        dry_run: Print the resolved settings and prompts, and run nothing.
        given: Settings of the method, as they were given on the command line.
    """
    from lmsmith.decoding.events import Sampling
    from lmsmith.decoding.generate import check_all, make_decoder, stream

    specs = _specs(model)
    card, settings = _method(method, config, given or {}, specs)
    stops = tuple(_argument(one, "--stop") for one in stop or ())
    requests = _requests(
        _prompts(
            prompt,
            prompts,
            chat,
            None if system is None else _argument(system, "--system"),
            whole=method is None,
        ),
        Sampling(temperature, top_k, top_p, min_p, seed),
        max_tokens,
        stops,
    )
    check_all(requests)
    if batch_size < 1:
        raise UsageError(f"--batch-size is {batch_size}, but must be at least 1")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads is {threads}, but must be at least 1")
    if adapter is not None and len(specs) > 1:
        raise UsageError("--adapter goes with one model; give one MODEL or leave --adapter out")
    plan: dict[str, Any] = {
        "models": specs,
        "method": method,
        "settings": settings.record() if settings is not None else {},
        "sampling": asdict(requests[0].sampling),
        "max_tokens": max_tokens,
        "stop": list(stops),
        "batch_size": batch_size,
    }
    if dry_run:
        show_json(
            plan
            | {
                "dtype": dtype,
                "device": device,
                "prompts": [
                    r.prompt.decode("utf-8", "backslashreplace")
                    if isinstance(r.prompt, bytes)
                    else r.prompt
                    for r in requests
                ],
            }
        )
        return

    from lmsmith.cli.threads import set_threads
    from lmsmith.models import check_offers, open_model

    for spec in specs:
        needs, who = (("logits",), "plain decoding") if card is None else (card.needs, card.name)
        check_offers(spec, needs, who)
    if card is not None:
        card.load("decoder")  # a broken method is told before minutes of loading
    # Opening first: a model that is not there is told before torch is imported.
    models = [open_model(s, dtype=dtype, device=device, adapter=adapter) for s in specs]
    set_threads(threads)
    decoder = make_decoder(models, method=method, config=settings)
    check_all(requests, decoder)
    events = stream(decoder, requests, batch_size=batch_size)
    if json:
        show_json(plan | {"completions": _collect(events, requests)})
    else:
        _print(events, requests, show)


def _specs(model: str) -> list[str]:
    # Not Path.exists, which fails on what is too long for a path.
    specs = [model] if os.path.exists(model) else model.split("+")
    if not all(specs):
        raise UsageError(f"MODEL {model!r} has an empty part; write A+B to open several models")
    return specs


def _method(
    name: str | None, config: Path | None, given: Mapping[str, Any], specs: Sequence[str]
) -> tuple[Card | None, Any]:
    """The method's card and its resolved settings, checked against the number of models."""
    from lmsmith import cards

    if name is None:
        if config is not None:
            raise UsageError("--config holds a method's settings; give --method as well")
        if len(specs) > 1:
            able = [c.name for c in cards.find().values() if c.models != 1 and "decoder" in c.entry]
            raise UsageError(
                f"{'+'.join(specs)} names {len(specs)} models; add --method with one that combines "
                f"models: {', '.join(able) or 'none is installed'}"
            )
        return None, None
    card = cards.get(name)
    if "decoder" not in card.entry:
        raise UsageError(f"method {name!r} does not generate text; see lmsmith info {name}")
    if card.models and len(specs) > card.models:
        few = "one model" if card.models == 1 else f"at most {card.models} models"
        raise UsageError(f"method {name!r} takes {few}, but {'+'.join(specs)} names {len(specs)}")
    if "config" not in card.entry:
        if config is not None:
            raise UsageError(f"method {name!r} has no settings; leave --config out")
        return card, None
    settings = card.load("config")
    return card, settings.parse(given) if config is None else settings.from_toml(config, **given)


def _requests(
    prompts: Iterable[Prompt], sampling: Sampling, max_tokens: int, stop: tuple[str, ...]
) -> list[Request]:
    """One request a prompt; rows that shared a seed would make the same draws."""
    from lmsmith.decoding.checks import check_sampling
    from lmsmith.decoding.events import Request

    check_sampling(sampling)
    if max_tokens < 1:
        raise UsageError(f"--max-tokens is {max_tokens}, but must be at least 1")
    if "" in stop:
        raise UsageError("--stop is empty, but must be a string of at least one character")
    seed = sampling.seed
    return [
        Request(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling if seed is None else replace(sampling, seed=(seed + row) % 2**64),
            stop=stop,
        )
        for row, prompt in enumerate(prompts)
    ]


def _prompts(
    prompt: str | None, file: Path | None, chat: bool, system: str | None, whole: bool
) -> list[Prompt]:
    """The prompts; `whole`: half a character at the end is a mistake."""
    as_messages = chat or system is not None
    whole = whole or as_messages
    if (prompt is None) == (file is None):
        raise UsageError("give either a PROMPT (- for standard input) or --prompts FILE")
    if file is not None:
        found = list(_read_file(file))
        if not found:
            raise UsageError(f"{file} holds no prompts; write one a line")
    elif prompt == "-":
        # The line break that `echo` adds is not part of what the user wants continued.
        blob = sys.stdin.buffer.read().removesuffix(b"\n")
        found = [_prompt(blob, "standard input", whole)]
    else:
        blob = (prompt or "").encode("utf-8", "surrogateescape")
        found = [_prompt(blob, "PROMPT", whole)]
    if not as_messages:
        return found
    head = [] if system is None else [{"role": "system", "content": system}]
    return [[*head, {"role": "user", "content": p}] if isinstance(p, str) else p for p in found]


def _prompt(blob: bytes, where: str, whole: bool) -> Prompt:
    """Text, or bytes that end inside a character, which a decoder of bytes goes on from."""
    try:
        blob.decode()
    except UnicodeDecodeError as error:
        if not whole and error.reason == "unexpected end of data":
            return blob
    return _decode(blob, where)


def _argument(word: str, name: str) -> str:
    """A word of the command line; one that is not UTF-8 arrives with surrogates in its place."""
    return _decode(word.encode("utf-8", "surrogateescape"), name)


def _decode(blob: bytes, where: str) -> str:
    try:
        # The byte order mark that some editors put in front is no text.
        return blob.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8: byte 0x{blob[error.start]:02x} at offset {error.start}; "
            "convert it to UTF-8 first, for example with iconv"
        ) from None


def _read_file(path: Path) -> Iterator[Prompt]:
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    rows = path.suffix in (".jsonl", ".ndjson")
    # Not splitlines, which also splits at characters that may stand inside a text.
    for number, line in enumerate(_decode(blob, str(path)).split("\n"), start=1):
        if line.strip():
            text = line.removesuffix("\r")
            yield _parse(text, f"{path} line {number}") if rows else text


def _parse(line: str, where: str) -> Prompt:
    """The prompt in a line of JSON: text, messages or token ids, bare or under their name."""
    import json

    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply to be a prompt") from None
    if isinstance(row, dict) and not {"prompt", "messages"} & set(row):
        raise UsageError(f"{where} has neither `prompt` nor `messages`")
    value = row.get("messages", row.get("prompt")) if isinstance(row, dict) else row
    if isinstance(value, str) or (isinstance(value, list) and _same_kind(value)):
        return value
    raise UsageError(
        f"{where} holds no prompt; a prompt is text, a list of messages, each with a `role` and "
        "`content`, or a list of token ids"
    )


def _same_kind(values: list[Any]) -> bool:
    """Whether a list is all messages or all token ids."""
    ids = all(type(one) is int for one in values)
    return bool(values) and (ids or all(_is_message(one) for one in values))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str | list | None)
    )


def _collect(events: Iterable[Event], requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Every row's whole answer, in the order of the prompts."""
    rows: list[dict[str, Any]] = [
        {"prompt": r.prompt, "text": "", "ids": [], "logprobs": []} for r in requests
    ]
    with progress("generating", len(requests), unit="prompts") as task:
        for event in events:
            row = rows[event.row]
            row["text"] += event.text
            row["ids"] += event.ids
            row["logprobs"] += event.logprobs
            if event.trace is not None:
                row["trace"] = asdict(event.trace)
                task.advance()
    return rows


def _print(events: Iterable[Event], requests: Sequence[Request], show: bool) -> None:
    """Stream the text; several rows come one after the other, in the order of the prompts."""
    from lmsmith.cli.signal import Painter

    held: list[list[Event]] = [[] for _ in requests]
    traces: list[Trace] = []
    current = 0
    with Painter(show) as painter:
        if show:
            painter.prompt(requests[0].prompt)
        for event in events:
            held[event.row].append(event)
            while current < len(requests):
                for ready in held[current]:
                    painter.text(ready)
                done = bool(held[current]) and held[current][-1].trace is not None
                held[current] = []
                if not done:
                    break
                painter.end()
                current += 1
                if show and current < len(requests):
                    painter.prompt(requests[current].prompt)
            if event.trace is not None:
                traces.append(event.trace)
    if sys.stderr.isatty():
        painter.summary(traces)
