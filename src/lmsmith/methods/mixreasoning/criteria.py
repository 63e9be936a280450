"""From settings to a rule and to the scores it is given: the method's criterion and its rivals.

Every criterion is the same controller under another score, "higher is surer", so that they differ
in the signal alone. Not for: the signals of a distribution (`confidence`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from torch import Tensor

from lmsmith.errors import UsageError
from lmsmith.methods.mixreasoning.confidence import SIGNALS, certainty
from lmsmith.methods.mixreasoning.controller import Mode, Rule

if TYPE_CHECKING:
    from lmsmith.methods.mixreasoning.calibration import Calibration
    from lmsmith.methods.mixreasoning.config import MixReasoningConfig

PAPER_GAP = 2.0


def make_rule(config: MixReasoningConfig, calibrations: Mapping[str, Calibration]) -> Rule:
    """The controller's rule.

    Args:
        config: The settings.
        calibrations: By criterion; asked only where the settings leave a threshold open.

    Raises:
        UsageError: A threshold is open and there is no calibration for these settings.
    """
    m, start = config.window, Mode(config.start)
    if config.mode != "mix":
        return Rule.fixed(Mode(config.mode), m)
    if config.criterion == "random":
        # The score is uniform on [0, 1): a decision is thinking with probability `share`.
        rewind = 0 if config.boundary else m - 1
        return Rule(config.share, config.share, 1, m, m, rewind, start)
    if config.criterion == "keywords":
        # The score is 0 at a keyword and else 1: a mean below 1 is a keyword within the window.
        mark = 1 - 0.5 / m
        return Rule.paper(mark, mark, m, start)
    if config.criterion == "entropy-v1":
        before, after = config.window_before, config.window_after
        return Rule(1 - config.t_up, 1 - config.t_down, 1, max(1, before + after), 1, before, start)
    low, high = thresholds(config, calibrations)
    if config.criterion == "reverse":
        low, high = -high, -low
    return Rule.paper(low, high, m, start)


def thresholds(
    config: MixReasoningConfig, calibrations: Mapping[str, Calibration]
) -> tuple[float, float]:
    """tau_low and tau_high of a criterion that is a signal of the distribution.

    Raises:
        UsageError: See `make_rule`.
    """
    low, gap = config.low, config.gap
    if low is None:
        name = "confidence" if config.criterion == "reverse" else config.criterion
        found = calibrations.get(name)
        if found is None:
            raise UsageError(
                f"there are no thresholds for the criterion {name}; run lmsmith mixreasoning "
                "calibrate MODEL --adapter A DATA, or give --low and --high"
            )
        if (found.candidates, found.window) != (config.candidates, config.window):
            raise UsageError(
                f"the calibration is for {found.candidates} candidates and a window of "
                f"{found.window}, not {config.candidates} and {config.window}; calibrate again"
            )
        low = found.low(config.percentile)
        gap = found.gap if gap is None else gap
    if config.high is not None:
        return low, config.high
    return low, low + (PAPER_GAP if gap is None else gap)


def signals(config: MixReasoningConfig, logits: Tensor) -> list[float]:
    """The score of each distribution, `[rows, vocabulary]`, where it is one of the distribution."""
    if config.criterion in SIGNALS:
        scores = SIGNALS[config.criterion](logits, config.candidates)
        return (-scores if config.criterion == "reverse" else scores).tolist()
    if config.criterion == "entropy-v1":
        return certainty(logits, config.candidates, config.norm).tolist()
    # Shown beside the others; random and keywords decide by something else.
    return SIGNALS["confidence"](logits, config.candidates).tolist()


def chance(rng: Random) -> float:
    """The score of the criterion random."""
    return rng.random()


def keyword_score(before: str, after: str, keywords: Sequence[str]) -> float:
    """The score of the criterion keywords.

    Args:
        before: The end of the text without its newest token.
        after: The same with it.
        keywords: What is looked for.

    Returns:
        0.0 if the newest token completes a keyword, else 1.0.
    """
    return 0.0 if any(after.count(word) > before.count(word) for word in keywords) else 1.0
