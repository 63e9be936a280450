"""Its experiment: the baseline and the method on the same items with the same seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmsmith.decoding.events import Sampling
from lmsmith.decoding.generate import generate
from lmsmith.evaluation.bench import Bench, declare
from lmsmith.evaluation.items import Item, number_items

from .config import TemplateMethodConfig

Scores = Mapping[str, Any]

PROMPTS = ("The sea was", "In the morning", "A good friend", "The old house")
MODELS = {size: ["smollm2-135m"] for size in ("smoke", "small", "full")}
OPTIONS = {
    "smoke": {"items": 4, "tokens": 16},
    "small": {"items": 64, "tokens": 64},
    "full": {"items": 512, "tokens": 256},
}


@declare(models=MODELS, options=OPTIONS)
def bench(bench: Bench) -> None:
    """Compare how likely the model finds its own text, with and without the method."""
    lm = bench.model(bench.models[0])
    items = number_items(
        {"prompt": PROMPTS[i % len(PROMPTS)]} for i in range(bench.options["items"])
    )

    def arm(config: TemplateMethodConfig | None) -> Callable[[list[Item]], list[Scores]]:
        def score(batch: list[Item]) -> list[Scores]:
            done = generate(
                lm,
                [item["prompt"] for item in batch],
                method=None if config is None else "template-method",
                config=config,
                sampling=[Sampling(seed=bench.seed_for(item.id)) for item in batch],
                max_tokens=bench.options["tokens"],
            )
            return [{"bits": bits_per_token(c.logprobs), "text": c.text} for c in done]

        return score

    plain = bench.run("plain", items, arm(None), batch_size=32)
    same = bench.run("factor 1", items, arm(TemplateMethodConfig(factor=1.0)), batch_size=32)
    sharp = bench.run("template-method", items, arm(TemplateMethodConfig()), batch_size=32)
    bench.table(
        "own text",
        "surprise",
        "bits a token",
        {
            "plain": [row["bits"] for row in plain],
            "template-method": [row["bits"] for row in sharp],
        },
        baseline="plain",
    )
    bench.check(
        "factor 1 is plain decoding",
        [row["text"] for row in same] == [row["text"] for row in plain],
        True,
        "==",
        source="identity",
    )


def bits_per_token(logprobs: Sequence[float]) -> float:
    """Mean surprise of a text, in bits."""
    return -sum(logprobs) / max(1, len(logprobs)) / math.log(2)
