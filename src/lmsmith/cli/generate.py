"""`lmsmith generate`: read prompts, run one decoder over them, print the text as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lmsmith.cli.output import DryRun, Json, emit
from lmsmith.errors import UsageError

if TYPE_CHECKING:
    from lmsmith.cards import Card
    from lmsmith.decoding.events import Event, Prompt, Request, Trace

Flag = Parameter(negative=())


def generate(
    model: Annotated[
        str,
        Parameter(
            help="A known name, folder, hub id or .gguf file; A+B for a method that takes several."
        ),
    ],
    prompt: Annotated[
        str | None, Parameter(help="Text to continue; - reads standard input.")
    ] = None,
    /,
    *,
    method: Annotated[
        str | None, Parameter(help="A name from `lmsmith list`; plain without.")
    ] = None,
    config: Annotated[Path | None, Parameter(help="TOML file with the method's settings.")] = None,
    stdin: Annotated[bool, Flag, Parameter(help="Read the prompt from standard input.")] = False,
    prompts: Annotated[
        Path | None,
        Parameter(help="File of prompts: one a line, or JSON lines with `prompt` or `messages`."),
    ] = None,
    batch_size: Annotated[int, Parameter(help="Most rows at work at once.")] = 32,
    max_tokens: Annotated[int, Parameter(help="Most new tokens (bytes, for a byte method).")] = 128,
    temperature: Annotated[
        float, Parameter(help="Divides the logits; 0 takes the likeliest.")
    ] = 1.0,
    top_k: Annotated[int, Parameter(help="Keep the k likeliest; 0 keeps all.")] = 0,
    top_p: Annotated[float, Parameter(help="Keep the likeliest that add up to this.")] = 1.0,
    min_p: Annotated[float, Parameter(help="Drop less than this share of the likeliest.")] = 0.0,
    seed: Annotated[int | None, Parameter(help="Seed of the draws.")] = None,
    stop: Annotated[
        list[str] | None, Parameter(negative=(), help="String that ends the text; repeatable.")
    ] = None,
    chat: Annotated[
        bool, Parameter(negative="--raw", help="Put the prompt into the model's chat template.")
    ] = False,
    system: Annotated[str | None, Parameter(help="System message; implies --chat.")] = None,
    adapter: Annotated[Path | None, Parameter(help="Folder of a PEFT LoRA adapter.")] = None,
    dtype: Annotated[str, Parameter(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, Parameter(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, Parameter(help="CPU threads; torch's choice without.")] = None,
    show: Annotated[bool, Flag, Parameter(help="Colour the text by the method's signal.")] = False,
    json: Json = False,
    dry_run: DryRun = False,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Continue a prompt, plainly or with a method.

    With `--method M` the method's own settings are flags as well; `lmsmith generate --method M
    --help` lists them.
    """
    specs = _specs(model)
    card, settings = _method(method, config, given or {}, specs)
    requests = _requests(
        _prompts(prompt, stdin, prompts, chat or system is not None, system),
        dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        max_tokens,
        tuple(stop or ()),
    )
    if batch_size < 1:
        raise UsageError(f"--batch-size is {batch_size}, but must be at least 1")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads is {threads}, but must be at least 1")
    if adapter is not None and len(specs) > 1:
        raise UsageError("--adapter goes with one model; give one MODEL or leave --adapter out")
    plan = {
        "models": specs,
        "method": method,
        "settings": settings.record() if settings is not None else {},
        "sampling": asdict(requests[0].sampling),
        "max_tokens": max_tokens,
        "stop": list(stop or ()),
        "batch_size": batch_size,
    }
    if dry_run:
        emit(plan | {"dtype": dtype, "device": device, "prompts": [r.prompt for r in requests]})
        return

    import torch

    from lmsmith.decoding.generate import make_decoder, stream
    from lmsmith.models import open_model

    if card is not None:
        card.load("decoder")  # a broken method is told before minutes of loading
    if threads is not None:
        torch.set_num_threads(threads)
    models = [open_model(s, dtype=dtype, device=device, adapter=adapter) for s in specs]
    decoder = make_decoder(models, method=method, config=settings)
    events = stream(decoder, requests, batch_size=batch_size)
    if json:
        emit(plan | {"completions": _collect(events, requests)})
    else:
        _print(events, requests, show)


def _specs(model: str) -> list[str]:
    specs = [model] if Path(model).exists() else model.split("+")
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
    prompts: Iterable[Prompt], sampling: dict[str, Any], max_tokens: int, stop: tuple[str, ...]
) -> list[Request]:
    from dataclasses import replace

    from lmsmith.decoding.events import Request, Sampling

    for name, value, allowed, what in (
        ("temperature", sampling["temperature"], sampling["temperature"] >= 0, "0 or more"),
        ("top-k", sampling["top_k"], sampling["top_k"] >= 0, "0 or more"),
        ("top-p", sampling["top_p"], 0 < sampling["top_p"] <= 1, "above 0 and at most 1"),
        ("min-p", sampling["min_p"], 0 <= sampling["min_p"] <= 1, "between 0 and 1"),
        ("max-tokens", max_tokens, max_tokens >= 1, "at least 1"),
        ("stop", "", "" not in stop, "a string of at least one character"),
    ):
        if not allowed:
            raise UsageError(f"--{name} is {value!r}, but must be {what}")
    base = Sampling(**sampling)
    seed = base.seed
    # Rows that shared a seed would make the same draws.
    return [
        Request(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=base if seed is None else replace(base, seed=seed + index),
            stop=stop,
        )
        for index, prompt in enumerate(prompts)
    ]


def _prompts(
    prompt: str | None, stdin: bool, file: Path | None, chat: bool, system: str | None
) -> list[Prompt]:
    if (prompt is not None) + stdin + (file is not None) != 1:
        raise UsageError("give one of: a PROMPT, - for standard input, or --prompts FILE")
    if file is not None:
        found = list(_read_file(file))
        if not found:
            raise UsageError(f"{file} holds no prompts; write one a line")
    elif stdin:
        found = [_decode(sys.stdin.buffer.read(), "standard input")]
    else:
        # Words of the command line that are not UTF-8 arrive with surrogates in their place.
        found = [_decode((prompt or "").encode("utf-8", "surrogateescape"), "PROMPT")]
    if not chat:
        return found
    head = [] if system is None else [{"role": "system", "content": system}]
    return [[*head, {"role": "user", "content": p}] if isinstance(p, str) else p for p in found]


def _decode(blob: bytes, where: str) -> str:
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8: byte 0x{blob[error.start]:02x} at offset {error.start}; "
            "convert it to UTF-8 first, for example with iconv"
        ) from None


def _read_file(path: Path) -> Iterator[Prompt]:
    import json

    try:
        blob = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(_decode(blob, str(path)).splitlines(), start=1):
        if not line.strip():
            continue
        if path.suffix not in (".jsonl", ".ndjson"):
            yield line
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path} line {number} is not JSON: {error}") from None
        value = row.get("messages", row.get("prompt")) if isinstance(row, dict) else row
        if not value or not isinstance(value, str | list):
            raise UsageError(f"{path} line {number} has neither `prompt` nor `messages`")
        yield value


def _collect(events: Iterable[Event], requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Every row's whole answer, in the order of the prompts."""
    rows: list[dict[str, Any]] = [
        {"prompt": r.prompt, "text": "", "ids": [], "logprobs": []} for r in requests
    ]
    for event in events:
        row = rows[event.row]
        row["text"] += event.text
        row["ids"] += event.ids
        row["logprobs"] += event.logprobs
        if event.trace is not None:
            row["trace"] = asdict(event.trace)
    return rows


def _print(events: Iterable[Event], requests: Sequence[Request], show: bool) -> None:
    """Stream the text; several rows come one after the other, in the order of the prompts."""
    from lmsmith.cli.signal import Painter

    painter = Painter(show)
    held: list[list[Event]] = [[] for _ in requests]
    traces: list[Trace] = []
    current = 0
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
