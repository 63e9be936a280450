"""The bench's arm on a real model: word problems, an adapter from the model's own shortest answers.

No bars: a small instruct model has no long thinking mode, so its thinking arm is its ordinary chain
of thought. Accuracy, tokens and shares are reported with intervals, whatever they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.evaluation.items import Item, load_items
from lmsmith.methods.mixreasoning.adapter import PAPER, ask, find_check, same_number
from lmsmith.methods.mixreasoning.calibration import Calibration
from lmsmith.methods.mixreasoning.config import MixReasoningConfig
from lmsmith.methods.mixreasoning.decoder import MixDecoder, window_scores
from lmsmith.methods.mixreasoning.making import make_adapter
from lmsmith.models.cache import cache_dir
from lmsmith.training import TrainSettings

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench
    from lmsmith.models import LM

THINK = "{question}\nReason step by step, then give the final answer as a number."
BRIEF = "{question}\nOnly write the necessary calculation in one line, then the final number."
ARMS: Mapping[str, Mapping[str, Any]] = {
    "think": {"mode": "think"},
    "concise": {"mode": "concise"},
    "mix": {},
}
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "seed": 0}


def real_model(bench: Bench, lm: LM, folder: Path) -> None:
    """Train, calibrate and measure on GSM8K.

    Args:
        bench: The bench; `real_train` and `real_test` are counts of questions, `real_steps` of
            training steps, `real_tokens` the longest answer.
        lm: The model.
        folder: Where `train.jsonl` and `test.jsonl` are, with `question` and `answer`.
    """
    options = bench.options
    count, longest = options["real_train"], options["real_tokens"]
    train = load_items(folder / "train.jsonl", limit=count + options["real_calibration"])
    test = load_items(folder / "test.jsonl", limit=options["real_test"])
    chat = "chat" in lm.offers
    plan = {"check": "number", "prompt": THINK, "brief_prompt": BRIEF, "chat": chat, "samples": 4,
            "max_tokens": longest, **SAMPLED}  # fmt: skip
    settings = TrainSettings.parse(
        {**PAPER, "learning_rate": 1e-4, "batch_size": 8, "steps": options["real_steps"]}
    )
    questions = [(item["question"], item["answer"]) for item in train[:count]]
    facts = bench.once(
        "adapter of the real model",
        lambda: make_adapter(
            lm, questions, find_check("number"), settings, _folder(lm, settings, plan, count), plan
        ),
    )
    lm.load_adapter(facts["adapter"])
    shared = {"window": options["real_window"]}
    spread = bench.once("calibration of the real model", lambda: _spread(lm, train[count:], shared,
                                                                        longest, chat))  # fmt: skip
    low = spread["low"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for arm, fixed in ARMS.items():
        threshold = {} if fixed else {"low": low, "high": low + spread["gap"]}
        config = MixReasoningConfig(**{**shared, **fixed, **threshold})

        def score(batch: list[Item], config: MixReasoningConfig = config) -> list[dict[str, Any]]:
            requests = [
                Request(ask(item["question"], THINK, chat), longest, Sampling(0, seed=0))
                for item in batch
            ]
            done = complete(MixDecoder(lm, config), requests, len(batch))
            return [
                {
                    "right": float(same_number(one.text, item["answer"])),
                    "kept": one.trace.tokens_kept,
                    "generated": one.trace.notes["generated"],
                    "share": one.trace.notes["thinking_share"],
                    "switches": one.trace.notes["to_think"] + one.trace.notes["to_concise"],
                }
                for item, one in zip(batch, done, strict=True)
            ]

        rows[arm] = bench.run(arm, test, score, 32, f"GSM8K, {lm.name}")
    for metric, unit, name, better in (
        ("exact answers", "share", "right", "higher"),
        ("generated, discarded included", "tokens", "generated", "lower"),
        ("thinking share", "of kept tokens", "share", ""),
    ):
        bench.table(
            f"GSM8K, {lm.name}",
            metric,
            unit,
            {arm: [row[name] for row in found] for arm, found in rows.items()},
            baseline="think" if better else None,
            better=better,  # type: ignore[arg-type]
            cost={
                arm: {k: sum(row[k] for row in found) / len(found) for k in ("kept", "switches")}
                for arm, found in rows.items()
            },
        )


def _spread(
    lm: LM, items: list[Item], shared: Mapping[str, Any], longest: int, chat: bool
) -> dict[str, float]:
    concise = MixReasoningConfig(mode="concise", **shared)
    prompts = [ask(item["question"], THINK, chat) for item in items]
    scores = window_scores(lm, prompts, concise, Sampling(0, seed=0), longest)
    found = Calibration.of(scores, "confidence", concise.candidates, concise.window, len(prompts))
    return {"low": found.low(concise.percentile), "gap": found.gap}


def _folder(lm: LM, settings: TrainSettings, plan: Mapping[str, Any], count: int) -> Path:
    text = json.dumps([lm.name, settings.record(), dict(plan), count])
    return cache_dir() / "trained" / "gsm8k" / hashlib.sha256(text.encode()).hexdigest()[:12]
