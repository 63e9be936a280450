"""The verbs of `lmsmith fg-ttl`: run a stream, show what would be learned from, read a log."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from lmsmith.display.console import say, show, show_facts, show_json
from lmsmith.errors import InterruptedRunError, UsageError
from lmsmith.methods.fg_ttl.config import PRESETS, FGTTLConfig

Json = Annotated[bool, Parameter(name="--json", negative=())]

app = App(name="fg-ttl", help="Adapt a model to a stream of unlabelled prompts as it answers them.")


@app.command
def run(
    model: str,
    stream: Path,
    /,
    *,
    preset: Literal["official_code", "small"] | None = None,
    config: Path | None = None,
    adapter: Path | None = None,
    source: Path | None = None,
    chat: bool = False,
    out: Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    dry_run: bool = False,
    json: Json = False,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Answer a stream, learning from each batch before the next; a stopped run goes on.

    Args:
        model: A known name, folder, hub id or .gguf file.
        stream: One prompt a line, or JSON lines with `prompt` or `messages`, and an `id`.
        preset: Settings that others are changes to: the official code's, or ones for small models.
        config: TOML file with settings; options stand in front of it, it in front of the preset.
        adapter: Begin with this PEFT LoRA adapter instead of a fresh one.
        source: File of prompts from before the shift, which EATA's penalty protects.
        chat: Put plain text into the model's chat template.
        out: Run folder, runs/fg-ttl-TIME without: the log, and the adapter after the last batch.
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        dry_run: Print the resolved settings, and stop.
        json: Print one JSON document and nothing else.
        given: Settings of the method, as they were given on the command line.
    """
    settings = _settings(preset, config, given)
    plan = {"model": model, "stream": str(stream), "settings": settings.record()}
    if dry_run:
        show_json(plan)
        return
    from lmsmith.methods.fg_ttl.stream import read_items, read_lines

    lines = read_lines(stream)
    sources = read_lines(source) if source is not None else ()
    from lmsmith.models import open_model

    lm = open_model(model, dtype=dtype, device=device)
    from lmsmith.methods.fg_ttl.adaptation import Adaptation
    from lmsmith.methods.fg_ttl.adaptation import run as answer_all
    from lmsmith.methods.fg_ttl.journal import Journal
    from lmsmith.models.adapter import Adapter

    begin = Adapter.load(adapter) if adapter is not None else None
    state = Adaptation(lm, settings, adapter=begin, source=sources)
    journal = Journal(out, state, {"stream": str(stream.resolve()), "chat": chat})
    folder = journal.folder.path
    if journal.resumed:
        say(f"going on from batch {state.batch} in {folder}")
    try:
        answers = answer_all(
            state, read_items(lm, lines, settings, chat), journal, None if json else _tell
        )
        if json:
            show_json(plan | {"folder": str(folder), "answers": [_plain(a) for a in answers]})
            return
        for one in answers:
            _print(one)
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"stopped; {journal.folder.count()} batches are kept in {folder}; "
            "run the same command again to go on from there"
        ) from None
    say(f"{folder}: {state.batch} batches, {state.rollbacks} rolled back")


@app.command
def select(
    model: str,
    prompt: str,
    /,
    *,
    chat: bool = False,
    preset: Literal["official_code", "small"] | None = None,
    config: Path | None = None,
    json: Json = False,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Answer one prompt and show the tokens that would be learned from; nothing is learned.

    Args:
        model: A known name, folder, hub id or .gguf file.
        prompt: Text.
        chat: Put it into the model's chat template.
        preset: Settings that others are changes to.
        config: TOML file with settings.
        json: Print one JSON document.
        given: Settings of the method, as they were given on the command line.
    """
    settings = _settings(preset or "small", config, given)
    from lmsmith.methods.fg_ttl.inspect import explain
    from lmsmith.models import open_model

    rows = explain(open_model(model), prompt, settings, chat)
    if json:
        show_json(rows)
        return
    from lmsmith.display.tables import Table

    show(
        Table(
            ["", "token", "entropy after (nats)", "window", "gain (nats)", "weight", "temperature"],
            [
                [
                    "*" if row["selected"] else "",
                    repr(row["token"]),
                    row["entropy"],
                    row["window"],
                    row["gain"],
                    row["weight"],
                    row["temperature"],
                ]
                for row in rows
            ],
            "Learned from: *",
        )
    )


@app.command
def log(folder: Path, /, *, json: Json = False) -> None:
    """What a run learned, a line a batch.

    Args:
        folder: A run folder.
        json: Print one JSON document.
    """
    rows = list(_log(folder))
    if json:
        show_json(rows)
        return
    from lmsmith.display.tables import Table

    show(
        Table(
            ["batch", "answers", "selected", "loss", "KL to base", "adapter", "rolled back"],
            [
                [
                    row["batch"],
                    row["answered"],
                    row["selected"],
                    row["loss"],
                    row["kl"],
                    row["adapter"],
                    row["rolled_back"],
                ]
                for row in rows
            ],
            str(folder),
        )
    )
    show_facts({"rolled back": sum(bool(row["rolled_back"]) for row in rows)})


def _settings(
    preset: str | None, config: Path | None, given: Mapping[str, Any] | None
) -> FGTTLConfig:
    from lmsmith.settings import read_toml

    values: dict[str, Any] = PRESETS[preset]().record() if preset else {}
    if config is not None:
        values |= read_toml(config)
    return FGTTLConfig.parse(values | dict(given or {}))


def _log(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = (folder / "items.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        raise UsageError(f"{folder} is no run folder of fg-ttl: it has no items.jsonl") from None
    for line in lines:
        try:
            row = json_format.loads(line)
            steps = row.get("steps", [])
            losses = [step["loss"] for step in steps if step["loss"] is not None]
            yield {
                "batch": row["batch"],
                "answered": sum(not answer["skipped"] for answer in row["answers"]),
                "skipped": sum(bool(answer["skipped"]) for answer in row["answers"]),
                "selected": sum(len(p) for step in steps for p in step["positions"]),
                "loss": sum(losses) / len(losses) if losses else None,
                "kl": (row.get("signs") or {}).get("kl"),
                "adapter": row.get("adapter_after", "")[:12],
                "rolled_back": row.get("rolled_back", ""),
            }
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{folder} is no run folder of fg-ttl") from None


def _tell(record: Mapping[str, Any]) -> None:
    if record.get("rolled_back"):
        say(f"batch {record['batch']} rolled back: {record['rolled_back']}")


def _plain(answer: Any) -> dict[str, Any]:
    return {
        "id": answer.id,
        "batch": answer.batch,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "skipped": answer.skipped,
    }


def _print(answer: Any) -> None:
    if answer.skipped:
        say(f"item {answer.id} skipped: {answer.skipped}")
        return
    sys.stdout.write(f"[{answer.id}] {answer.text.strip()}\n")
    sys.stdout.flush()
