"""What the concise adapter learns from: the shortest correct answer to each question.

Several short answers a question are drawn from a model that is asked to be brief; wrong ones go,
and of the correct ones the shortest is kept (paper, section 3.1 and appendix B). The adapter is
trained on them under the plain prompt, so that briefness comes from the weights.

Not for: the training loop (`lmsmith.training`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmsmith.decoding.events import Prompt, Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.errors import UnknownNameError, UsageError
from lmsmith.evaluation.scorers import exact_match, last_number

if TYPE_CHECKING:
    from lmsmith.models import LM

Check = Callable[[str, str], bool]
"""Whether an answer is right: `(answer, reference) -> bool`."""

PAPER: Mapping[str, Any] = {
    "tune": "lora",
    "lora_rank": 32,
    "lora_alpha": 64.0,
    "learning_rate": 1e-5,
    "weight_decay": 0.01,
    "batch_size": 64,
    "epochs": 1.0,
}
"""How the paper trains the adapter (appendix B)."""


@dataclass(frozen=True)
class Candidate:
    """An answer that was drawn.

    Attributes:
        text: The answer.
        tokens: Its length.
        complete: Whether the model ended it.
    """

    text: str
    tokens: int
    complete: bool = True


def shortest_correct(
    candidates: Sequence[Candidate], reference: str, check: Check
) -> Candidate | None:
    """The shortest complete answer that is right; the first of equals, `None` if there is none."""
    right = (one for one in candidates if one.complete and check(one.text, reference))
    return min(right, key=lambda one: one.tokens, default=None)


def same_number(answer: str, reference: str) -> bool:
    """Whether the last numbers of both texts are equal."""
    found, wanted = last_number(answer), last_number(reference)
    return found is not None and found == wanted


def same_choice(answer: str, reference: str) -> bool:
    """Whether the last letter that stands alone is the one wanted, such as `The answer is (B)`."""
    found = re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", answer)
    return bool(found) and found[-1] == reference.strip()[:1].upper()


CHECKS: Mapping[str, Check] = {
    "number": same_number,
    "exact": exact_match,
    "choice": same_choice,
}


def find_check(name: str) -> Check:
    """A check by its name, or a Python function by `module:function`.

    Raises:
        UnknownNameError: No such check.
        UsageError: The function cannot be imported.
    """
    if ":" not in name:
        if name not in CHECKS:
            raise UnknownNameError("check", name, CHECKS)
        return CHECKS[name]
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"the check {name} cannot be imported: {error}") from None
    if not callable(found):
        raise UsageError(f"the check {name} is no function; it takes an answer and a reference")
    return found


def draw_answers(
    lm: LM,
    prompts: Sequence[Prompt],
    samples: int,
    max_tokens: int,
    sampling: Sampling,
    batch_size: int = 32,
) -> list[list[Candidate]]:
    """Several answers a prompt, from the model without its adapter.

    Args:
        lm: The model.
        prompts: What it is asked.
        samples: Answers a prompt.
        max_tokens: Longest answer; one that does not end by then is not complete.
        sampling: How to draw; with a seed, draw number i gets the seed plus i.
        batch_size: Most rows at once.

    Returns:
        `[prompts][samples]`.
    """
    requests = [
        Request(prompt, max_tokens=max_tokens, sampling=_seeded(sampling, place * samples + draw))
        for place, prompt in enumerate(prompts)
        for draw in range(samples)
    ]
    done = complete(PlainDecoder(lm), requests, batch_size)
    found = [
        Candidate(one.text.strip(), one.trace.tokens_kept, one.trace.finish_reason == "stop")
        for one in done
    ]
    return [found[start : start + samples] for start in range(0, len(found), samples)]


def ask(question: str, template: str, chat: bool) -> Prompt:
    """A question as a prompt: put into a template, and a chat turn of the user's.

    Raises:
        UsageError: The template has no `{question}`.
    """
    if "{question}" not in template:
        raise UsageError(f"the prompt {template!r} has no {{question}} in it")
    text = template.replace("{question}", question)
    return [{"role": "user", "content": text}] if chat else text


def training_example(prompt: Prompt, answer: str) -> dict[str, Any]:
    """An example of supervised training: the loss is on the answer only."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": answer}
    return {"messages": [*prompt, {"role": "assistant", "content": answer}]}


def _seeded(sampling: Sampling, place: int) -> Sampling:
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + place) % 2**64)
