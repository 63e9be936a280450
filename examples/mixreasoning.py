"""Think where a step is hard: the whole way, on a tiny reasoner that is trained first (minutes).

    python examples/mixreasoning.py

With a model of your own, `open_model("MODEL", adapter="concise")` after `lmsmith mixreasoning
train` takes the place of the recipe.
"""

import random
import sys

from lmsmith import Sampling, generate
from lmsmith.methods.mixreasoning.calibration import Calibration
from lmsmith.methods.mixreasoning.config import MixReasoningConfig
from lmsmith.methods.mixreasoning.decoder import window_scores
from lmsmith.methods.mixreasoning.sums import Problem
from lmsmith.methods.mixreasoning.tiny import Recipe

GREEDY = Sampling(temperature=0)
PROMPTS = ["A37B05C10D48>", "A60B20C01D10>", "A89B17C00D26>"]


def main() -> None:
    """Answer a few sums in each mode, and show where it was thought."""
    lm = Recipe().train()
    shared = {"window": 5, "candidates": 5}

    # Thresholds: percentiles of window confidence in concise mode; no references are needed.
    concise = MixReasoningConfig(mode="concise", **shared)
    rng = random.Random(0)
    prompts = [Problem.draw(rng).prompt for _ in range(50)]
    scores = window_scores(lm, prompts, concise, GREEDY)
    spread = Calibration.of(scores, "confidence", 5, 5, len(prompts))
    low = spread.low(20)
    mix = MixReasoningConfig(low=low, high=low + spread.gap, **shared)

    for name, config in {
        "think": MixReasoningConfig(mode="think", **shared),
        "concise": concise,
        "mix": mix,
    }.items():
        done = generate(
            lm, PROMPTS, method="mixreasoning", config=config, sampling=GREEDY, max_tokens=200
        )
        for prompt, one in zip(PROMPTS, done, strict=True):
            notes = one.trace.notes
            sys.stdout.write(
                f"{name:8}{prompt}{one.text}\n        {one.trace.tokens_kept} tokens kept, "
                f"{notes['generated']} generated, {notes['thinking_share']:.0%} thought\n"
            )


if __name__ == "__main__":
    main()
