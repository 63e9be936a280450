"""The verbs of `lmsmith mixreasoning`: train the concise adapter, calibrate its thresholds.

`lmsmith mixreasoning generate` is `lmsmith generate --method mixreasoning`.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from lmsmith.display.console import show_facts, show_json
from lmsmith.errors import UsageError

if TYPE_CHECKING:
    from lmsmith.evaluation.items import Item

Json = Annotated[bool, Parameter(name="--json", negative=())]

BRIEF = (
    "{question}\nAnswer as briefly as you can: only the necessary calculations, then the final "
    "answer on a line of its own."
)

app = App(
    name="mixreasoning",
    help="Think where a step is hard and be brief elsewhere. `lmsmith mixreasoning generate` is "
    "`lmsmith generate --method mixreasoning`.",
)


@app.command
def train(
    model: str,
    data: str,
    *,
    out: Path,
    question: str = "question",
    answer: str = "answer",
    check: str = "number",
    columns: str | None = None,
    split: str = "train",
    limit: int | None = None,
    prompt: str = "{question}",
    brief_prompt: str = BRIEF,
    raw: Annotated[bool, Parameter(negative=())] = False,
    samples: int = 10,
    max_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.95,
    batch_size: int = 32,
    config: Path | None = None,
    seed: int = 0,
    dtype: str = "auto",
    threads: int | None = None,
    json: Json = False,
) -> None:
    """Train the concise adapter on the shortest correct answer to each question.

    A stopped run goes on with the same command; answers that were drawn are kept in OUT.

    Args:
        model: The model, which also writes the answers.
        data: Questions with answers: a .jsonl, .csv or .parquet file, or the id of a hub data set.
        out: Folder of the adapter.
        question: Field of the question.
        answer: Field of the reference.
        check: number, exact, choice, or module:function that takes an answer and a reference.
        columns: Names of the columns of a CSV file without a header, joined by commas.
        split: Split of a hub data set.
        limit: Use at most this many questions.
        prompt: How a question is put, in training and later.
        brief_prompt: How it is put when short answers are drawn.
        raw: No chat template.
        samples: Answers drawn a question.
        max_tokens: Longest answer.
        temperature: Of the draws.
        top_p: Of the draws.
        batch_size: Answers drawn at once.
        config: TOML file with settings of the training, instead of the paper's.
        seed: Of draws and training.
        dtype: auto, float32, bfloat16 or float16.
        threads: CPU threads.
        json: Print one JSON document.
    """
    from lmsmith.methods.mixreasoning.adapter import PAPER, find_check
    from lmsmith.methods.mixreasoning.making import make_adapter
    from lmsmith.settings import read_toml
    from lmsmith.training.settings import TrainSettings

    if samples < 1:
        raise UsageError(f"--samples is {samples}, but must be at least 1")
    settings = TrainSettings.parse(
        {**PAPER, "seed": seed, **(read_toml(config) if config is not None else {})}
    )
    found = find_check(check)
    items = _items(data, (question, answer), columns, split, limit)
    lm = _open(model, dtype, threads)
    facts = make_adapter(
        lm,
        [(str(item[question]), str(item[answer])) for item in items],
        found,
        settings,
        out,
        plan={
            "check": check,
            "prompt": prompt,
            "brief_prompt": brief_prompt,
            "chat": not raw and "chat" in lm.offers,
            "samples": samples,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
        },
        batch_size=batch_size,
    )
    _tell(facts, json)


@app.command
def calibrate(
    model: str,
    data: str,
    *,
    adapter: Path,
    question: str = "question",
    columns: str | None = None,
    split: str = "train",
    limit: int = 100,
    prompt: str = "{question}",
    raw: Annotated[bool, Parameter(negative=())] = False,
    criterion: str = "confidence",
    candidates: int = 20,
    window: int = 16,
    max_tokens: int = 256,
    temperature: float = 0.6,
    top_p: float = 0.95,
    batch_size: int = 32,
    seed: int = 0,
    dtype: str = "auto",
    threads: int | None = None,
    json: Json = False,
) -> None:
    """Find thresholds: percentiles of window scores in concise mode, saved beside the adapter.

    Args:
        model: The model.
        data: Questions; no references are needed: a file, or the id of a hub data set.
        adapter: Folder of the concise adapter.
        question: Field of the question.
        columns: Names of the columns of a CSV file without a header, joined by commas.
        split: Split of a hub data set.
        limit: Use at most this many questions.
        prompt: How a question is put.
        raw: No chat template.
        criterion: confidence, max-probability, margin or entropy.
        candidates: k of the confidence.
        window: m of the window.
        max_tokens: Longest answer.
        temperature: Of the draws.
        top_p: Of the draws.
        batch_size: Questions answered at once.
        seed: Of the draws.
        dtype: auto, float32, bfloat16 or float16.
        threads: CPU threads.
        json: Print one JSON document.
    """
    from lmsmith.decoding.events import Sampling
    from lmsmith.errors import UnknownNameError
    from lmsmith.methods.mixreasoning import calibration
    from lmsmith.methods.mixreasoning.adapter import ask
    from lmsmith.methods.mixreasoning.config import MixReasoningConfig
    from lmsmith.methods.mixreasoning.decoder import window_scores

    known = ("confidence", "max-probability", "margin", "entropy")
    if criterion not in known:
        raise UnknownNameError("criterion with thresholds", criterion, known)
    config = MixReasoningConfig.parse(
        {"criterion": criterion, "candidates": candidates, "window": window, "mode": "concise"}
    )
    items = _items(data, (question,), columns, split, limit)
    lm = _open(model, dtype, threads, adapter)
    chat = not raw and "chat" in lm.offers
    prompts = [ask(str(item[question]), prompt, chat) for item in items]
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    scores = window_scores(lm, prompts, config, sampling, max_tokens, batch_size)
    found = calibration.Calibration.of(scores, criterion, candidates, window, len(prompts))
    calibration.save(adapter / calibration.FILE, found)
    facts: dict[str, Any] = {
        "saved": str(adapter / calibration.FILE),
        "prompts": found.prompts,
        "windows": found.scores,
        "mean": found.mean,
        "standard deviation": found.deviation,
        "gap": found.gap,
    }
    facts |= {f"tau_low at {place} %": found.low(place) for place in (10, 20, 30, 40)}
    _tell(facts, json)


def _items(
    data: str, fields: tuple[str, ...], columns: str | None, split: str, limit: int | None
) -> list[Item]:
    from lmsmith.evaluation.items import load_items

    names = None if columns is None else columns.split(",")
    items = load_items(data, limit=limit, columns=names, split=split)
    if not items:
        raise UsageError(f"{data} holds no questions")
    for item in items:
        for name in fields:
            if name not in item.fields:
                raise UsageError(
                    f"item {item.id} of {data} has no field {name!r}; it has "
                    f"{', '.join(item.fields)}; name it with --question or --answer"
                )
    return items


def _open(model: str, dtype: str, threads: int | None, adapter: Path | None = None) -> Any:
    import torch

    from lmsmith.evaluation.environment import fastest_threads
    from lmsmith.models import open_model

    lm = open_model(model, dtype=dtype, adapter=adapter)
    torch.set_num_threads(fastest_threads(repeats=1) if threads is None else threads)
    return lm


def _tell(facts: dict[str, Any], json: bool) -> None:
    if json:
        show_json(json_module.loads(json_module.dumps(facts)))
    else:
        show_facts(facts)
