"""When to think and when to be brief: the paper's algorithm 1 as a small state machine.

It sees one score a next-token distribution and says whether to draw from it or to go back. It is
pure: no model, no tokens, only counts. The loop around it is

    while not controller.done:
        drop = controller.observe(score of p_t under controller.mode)
        if drop is None: draw a token from p_t; controller.emit()
        else:            drop that many of the newest tokens, and compute p_t anew

Not for: what the score is (`confidence`), or caches and text (`decoder`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from lmsmith.errors import ConfigError


class Mode(StrEnum):
    """Which model writes: the base (think) or the base with the adapter (concise)."""

    THINK = "think"
    CONCISE = "concise"


@dataclass(frozen=True)
class Rule:
    """When the mode changes. All comparisons are strict: a score at a threshold changes nothing.

    Attributes:
        low: In concise mode, a mean score below this switches to thinking.
        high: In thinking mode, a mean score above this switches to concise.
        window: Scores averaged: the last so many, fewer at the start.
        think_dwell: Least tokens from a switch to thinking to the next switch.
        concise_dwell: Least tokens from a switch to concise to the next switch.
        rewind: Tokens dropped as concise gives way to thinking; the first token of the concise
            stretch always stays, so neither the prompt nor what was thought is ever touched.
        start: The first mode.
    """

    low: float
    high: float
    window: int = 16
    think_dwell: int = 16
    concise_dwell: int = 16
    rewind: int = 15
    start: Mode = Mode.THINK

    def __post_init__(self) -> None:
        if math.isnan(self.low) or math.isnan(self.high):
            raise ConfigError("a threshold is not a number")
        if min(self.window, self.think_dwell, self.concise_dwell) < 1 or self.rewind < 0:
            raise ConfigError("window and dwell are at least 1 token, and a rewind at least 0")

    @classmethod
    def paper(cls, low: float, high: float, m: int = 16, start: Mode = Mode.THINK) -> Self:
        """Algorithm 1: m is the window and the dwell, and a rollback drops m - 1 tokens.

        The check comes before y_t is drawn, so t <- max(1, t - m + 1) drops y_{t-m+1} to y_{t-1}.
        """
        return cls(low, high, m, m, m, m - 1, start)

    @classmethod
    def fixed(cls, mode: Mode, window: int = 16) -> Self:
        """One mode throughout: the think-only and concise-only baselines."""
        return cls(-math.inf, math.inf, window, start=mode)


class Controller:
    """The mode of one answer, and the tokens it has cost.

    Attributes:
        rule: When the mode changes.
        mode: The mode at work; the next distribution is to be computed under it.
        dwelt: Tokens since the last change of mode.
        kept: Tokens of the answer.
        generated: Tokens drawn, those dropped again included.
        thought: Kept tokens that were emitted in thinking mode.
        to_think: Switches from concise to thinking.
        to_concise: Switches from thinking to concise.
        mean: The mean score at the last observation.
    """

    def __init__(
        self, rule: Rule, max_kept: int | None = None, max_generated: int | None = None
    ) -> None:
        """A controller at the start of an answer.

        Args:
            rule: When the mode changes.
            max_kept: Most tokens of the answer (the paper's T_max).
            max_generated: Most tokens drawn, dropped ones included.
        """
        self.rule = rule
        self.mode = rule.start
        self.dwelt = self.kept = self.generated = self.thought = 0
        self.to_think = self.to_concise = 0
        self.mean = math.nan
        self._max_kept = math.inf if max_kept is None else max_kept
        self._max_generated = math.inf if max_generated is None else max_generated
        # Not emptied at a switch: by the next one it holds scores of the new mode only, as long as
        # the dwell is no shorter than the window.
        self._scores: deque[float] = deque(maxlen=rule.window)

    @property
    def discarded(self) -> int:
        """Tokens that were drawn and dropped again."""
        return self.generated - self.kept

    @property
    def done(self) -> bool:
        """Whether a budget is used up."""
        return self.kept >= self._max_kept or self.generated >= self._max_generated

    @property
    def retractable(self) -> int:
        """How many of the newest tokens a later rollback may still drop."""
        if self.mode is Mode.THINK or self.rule.low == -math.inf:
            return 0
        earliest = max(self.dwelt, self.rule.concise_dwell)  # `dwelt` at the next possible switch
        safe = earliest - min(self.rule.rewind, earliest - 1)
        return max(0, self.dwelt - safe)

    def observe(self, score: float, may_switch: bool = True) -> int | None:
        """Take in the score of a next-token distribution (algorithm 1, steps b to d).

        Args:
            score: How sure the mode at work is of its next token; higher is surer.
            may_switch: Whether the mode may change here.

        Returns:
            `None`: draw from this distribution, whatever `mode` has become. A number: the mode has
            become thinking; drop so many of the newest tokens, draw nothing, and compute the
            distribution anew under the new mode.
        """
        rule = self.rule
        self._scores.append(score)
        self.mean = sum(self._scores) / len(self._scores)
        if not may_switch:
            return None
        if self.mode is Mode.CONCISE:
            if self.dwelt >= rule.concise_dwell and self.mean < rule.low:
                drop = min(rule.rewind, self.dwelt - 1)
                self.kept -= drop
                self.to_think += 1
                self._switch(Mode.THINK)
                return drop
        elif self.dwelt >= rule.think_dwell and self.mean > rule.high:
            self.to_concise += 1
            self._switch(Mode.CONCISE)
        return None

    def emit(self) -> None:
        """Count a token that was drawn (step e)."""
        self.dwelt += 1
        self.kept += 1
        self.generated += 1
        self.thought += self.mode is Mode.THINK

    def _switch(self, mode: Mode) -> None:
        self.mode = mode
        self.dwelt = 0
