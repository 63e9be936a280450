"""Make a concise adapter from questions: draw, keep the shortest correct answers, train.

What is drawn is kept in the adapter's folder, so that a stopped run goes on. Not for: which answer
is kept (`adapter`), or the training loop (`lmsmith.training`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmsmith.decoding.events import Sampling
from lmsmith.display.progress import progress
from lmsmith.errors import UsageError
from lmsmith.methods.mixreasoning.adapter import (
    Candidate,
    Check,
    ask,
    draw_answers,
    shortest_correct,
    training_example,
)
from lmsmith.training import TrainSettings, train

if TYPE_CHECKING:
    from lmsmith.models import LM

PLAN, ANSWERS = "plan.json", "answers.jsonl"


def make_adapter(
    lm: LM,
    questions: Sequence[tuple[str, str]],
    check: Check,
    settings: TrainSettings,
    out: Path,
    plan: Mapping[str, Any],
    batch_size: int = 32,
) -> dict[str, Any]:
    """Draw answers, keep the shortest correct one a question, train, and save a PEFT folder.

    Args:
        lm: The model; afterwards the adapter is attached to it.
        questions: Questions with references.
        check: Whether an answer is right.
        settings: Of the training.
        out: Folder of the adapter; `answers.jsonl` there has everything that was drawn.
        plan: `prompt`, `brief_prompt`, `chat`, `samples`, `max_tokens`, `temperature`, `top_p`,
            `seed`; what a run that goes on must share.
        batch_size: Answers drawn at once.

    Returns:
        What came of it: questions, kept examples, mean lengths, final loss.

    Raises:
        UsageError: No question was answered correctly, or the folder holds another run.
    """
    out.mkdir(parents=True, exist_ok=True)
    _same_plan(out / PLAN, {**plan, "model": lm.name, "questions": len(questions)})
    answers = _draw(lm, questions, out / ANSWERS, plan, batch_size)
    examples, lengths, correct, drawn = [], [], 0, 0
    for (question, reference), candidates in zip(questions, answers, strict=True):
        drawn += sum(one.tokens for one in candidates)
        correct += sum(one.complete and check(one.text, reference) for one in candidates)
        kept = shortest_correct(candidates, reference, check)
        if kept is not None:
            prompt = ask(question, plan["prompt"], plan["chat"])
            examples.append(training_example(prompt, kept.text))
            lengths.append(kept.tokens)
    if not examples:
        raise UsageError(
            f"none of {len(questions) * plan['samples']} answers is right; look into "
            f"{out / ANSWERS}, and at --check, --max-tokens and --brief-prompt"
        )
    result = train(lm, examples, settings, out=out / "training")
    assert result.adapter is not None
    result.adapter.save(out)
    result.adapter.folder = out
    total = len(questions) * plan["samples"]
    return {
        "adapter": str(out),
        "questions": len(questions),
        "answers that are right": correct / total,
        "examples": len(examples),
        "tokens of an answer": drawn / total,
        "tokens of a kept answer": sum(lengths) / len(lengths),
        "steps": result.steps,
        "loss": result.log[-1]["loss"],
    }


def _draw(
    lm: LM,
    questions: Sequence[tuple[str, str]],
    path: Path,
    plan: Mapping[str, Any],
    batch_size: int,
) -> list[list[Candidate]]:
    """Candidates of every question; those in the file are not drawn again."""
    found = [[Candidate(**one) for one in row] for row in _rows(path)]
    chunk = max(1, batch_size // plan["samples"])
    with (
        path.open("a", encoding="utf-8") as file,
        progress("short answers", len(questions), done=len(found), unit="questions") as task,
    ):
        while len(found) < len(questions):
            start = len(found)
            asked = questions[start : start + chunk]
            new = draw_answers(
                lm,
                [ask(question, plan["brief_prompt"], plan["chat"]) for question, _ in asked],
                plan["samples"],
                plan["max_tokens"],
                Sampling(
                    plan["temperature"],
                    top_p=plan["top_p"],
                    seed=plan["seed"] * 10**9 + start * plan["samples"],
                ),
                batch_size,
            )
            for row in new:
                file.write(json.dumps([asdict(one) for one in row]) + "\n")
            file.flush()
            found += new
            task.advance(len(new))
    return found


def _rows(path: Path) -> list[list[dict[str, Any]]]:
    """Complete lines of the file; half a line, left by a crash, is cut off."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def _same_plan(path: Path, plan: Mapping[str, Any]) -> None:
    if path.is_file():
        there = json.loads(path.read_text(encoding="utf-8"))
        for name, value in plan.items():
            if there.get(name) != value:
                raise UsageError(
                    f"{path.parent} holds a run with {name} {there.get(name)!r}, not {value!r}; "
                    "give another --out"
                )
        return
    path.write_text(json.dumps(dict(plan), indent=2) + "\n", encoding="utf-8")
