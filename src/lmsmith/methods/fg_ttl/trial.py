"""One arm over one stream of the tiny model, and what it left of the model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmsmith.decoding.events import Sampling
from lmsmith.decoding.generate import generate
from lmsmith.evaluation.items import Item
from lmsmith.methods.fg_ttl.adaptation import Adaptation, Answer, run
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.forward import Text, read
from lmsmith.methods.fg_ttl.guard import signs
from lmsmith.methods.fg_ttl.selection import answer_positions, select
from lmsmith.methods.fg_ttl.stream import read_items
from lmsmith.methods.fg_ttl.toy import END, STEPS, problems, shift
from lmsmith.models import LM

LONGEST = 3 * STEPS + 8
"""Most new tokens: a right answer has three a step and the end."""

ALSO = ("length", "entropy", "KL to base", "source accuracy after", "rolled back")


def online(
    lm: LM,
    items: Sequence[Item],
    config: FGTTLConfig | None,
    *,
    noise: float,
    held_out: int,
) -> list[Mapping[str, Any]]:
    """Answer one stream, adapting as `config` says, or with the frozen model.

    Args:
        lm: The source model; it is shifted here.
        items: The stream: `prompt`, `answer`, and the `seed` of the shift.
        config: The arm; none is the frozen model, which is an arm with a rate of zero.
        noise: Size of the shift.
        held_out: Problems to measure on once the stream has ended.

    Returns:
        One mapping an item: whether it was `right`, and under `ALSO` what holds for the whole run.
    """
    seed = items[0]["seed"]
    shift(lm, noise, seed)
    config = config or FGTTLConfig(learning_rate=0.0, max_new_tokens=LONGEST, guard=False)
    state = Adaptation(lm, config)
    prompts = [item["prompt"] for item in items]
    answers = list(run(state, read_items(lm, prompts, config)))
    after = {
        "length": sum(len(answer.ids) for answer in answers) / len(answers),
        "entropy": _entropy(state, answers),
        "rolled back": state.rollbacks,
        **_held_out(state, held_out, seed),
    }
    return [
        {"right": answer.text == item["answer"], **after}
        for answer, item in zip(answers, items, strict=True)
    ]


@torch.no_grad()
def where(lm: LM, items: Sequence[Item], noise: float) -> dict[str, dict[str, float]]:
    """Which parts of a step the selector picks, before anything is learned.

    Returns:
        For the part that comes next (a number's tens, its ones, the mark after it): its share of
        the positions that may be selected, and of those that are, and its mean gain in nats.
    """
    shift(lm, noise, items[0]["seed"])
    state = Adaptation(lm, FGTTLConfig(max_new_tokens=LONGEST))
    answers = state.predict(list(read_items(lm, [i["prompt"] for i in items], state.config)))
    rows = read(lm, [Text((*a.prompt_ids, *a.ids), len(a.prompt_ids)) for a in answers])
    found = select(state.learner.entropies(rows), rows.starts, rows.lengths)
    here = torch.arange(rows.ids.shape[1], device=rows.ids.device)
    part = (here + 1 - rows.starts[:, None]) % 3
    valid = found.gain > -torch.inf
    return {
        name: {
            "eligible": float((valid & (part == number)).sum() / valid.sum().clamp_min(1)),
            "selected": float(
                (found.mask & (part == number)).sum() / found.mask.sum().clamp_min(1)
            ),
            "gain": float(found.gain[valid & (part == number)].mean()),
        }
        for number, name in enumerate(("tens", "ones", "mark"))
    }


@torch.no_grad()
def _entropy(state: Adaptation, answers: Sequence[Answer]) -> float:
    """Mean entropy over all answers of the model that the stream has left behind, nats a token."""
    rows = read(state.lm, [Text((*a.prompt_ids, *a.ids), len(a.prompt_ids)) for a in answers])
    entropy = state.learner.entropies(rows)
    return float(entropy[answer_positions(entropy, rows.starts, rows.lengths)].mean())


def _held_out(state: Adaptation, count: int, seed: int) -> dict[str, float]:
    """On further problems, after the stream: accuracy, and KL to the model before it."""
    rest = problems(count, random.Random(f"held out {seed}").getrandbits(32))
    done = generate(
        state.lm,
        [one.prompt for one in rest],
        sampling=Sampling(0.0),
        max_tokens=LONGEST,
        batch_size=count,
    )
    right = sum(text.text == one.answer for text, one in zip(done, rest, strict=True))
    end = state.lm.encode(END)
    texts = [
        Text((*state.lm.encode(one.prompt + one.answer), *end), len(one.prompt)) for one in rest
    ]
    found = signs(state.learner, texts)
    return {
        "source accuracy after": right / count,
        "KL to base": found.kl if found is not None else 0.0,
    }
