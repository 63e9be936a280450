"""Running sums: a task whose steps are easy or hard, and can be written at length or briefly.

A problem is a chain of two-digit numbers added modulo 100, `37+05+10+48>`. A thinking model works
each addition out digit by digit and checks it (37 to 39 characters); a concise one writes operands
and result only (9). Half the numbers are trivial to add (0, 1, 10, 20), the others are arbitrary.

Neither mode survives prefixes that the other has written unless it has seen such prefixes, so both
are trained on mixed ones, with the loss only on what their own mode writes. This is a deviation
from the paper, which trains on pure short traces and reports that this works from 7B on.

Pure: text and random numbers only. Not for: the model that learns it (`tiny`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

ALPHABET = "0123456789+>:=,?;!#"
TRIVIAL = (0, 1, 10, 20)
STEP = 6  # length of "37+05:" or "37+05=", after which the style of a step is decided
END_OF_STEP = ";"

Piece = tuple[str, bool]
"""A stretch of a training text, and whether the loss is taken on it."""


@dataclass(frozen=True)
class Problem:
    """A chain of numbers to add up modulo 100."""

    operands: tuple[int, ...]

    @classmethod
    def draw(cls, rng: random.Random, operands: int = 4) -> Problem:
        """A random problem; each number but the first is trivial to add with probability 1/2."""
        rest = (rng.choice(TRIVIAL) if rng.random() < 0.5 else rng.randrange(100)
                for _ in range(operands - 1))  # fmt: skip
        return cls((rng.randrange(100), *rest))

    @property
    def prompt(self) -> str:
        """`37+05+10+48>`."""
        return "+".join(f"{number:02d}" for number in self.operands) + ">"

    @property
    def answer(self) -> str:
        """The sum modulo 100, two digits."""
        return f"{sum(self.operands) % 100:02d}"

    @property
    def carries(self) -> list[bool]:
        """For each step, whether its lower digits carry."""
        total, found = self.operands[0], []
        for number in self.operands[1:]:
            found.append(total % 10 + number % 10 > 9)
            total = (total + number) % 100
        return found

    @property
    def trivial(self) -> list[bool]:
        """For each step, whether the number added is one of `TRIVIAL` and carries nothing."""
        steps = zip(self.operands[1:], self.carries, strict=True)
        return [number in TRIVIAL and not carries for number, carries in steps]


def at_length(a: int, b: int) -> str:
    """A step with its working and a check: `37+05:7+5=12,3+0+1=04=42?7+5=12,3+0+1=04;`."""
    low = a % 10 + b % 10
    high = a // 10 + b // 10 + low // 10
    work = f"{a % 10}+{b % 10}={low:02d},{a // 10}+{b // 10}+{low // 10}={high:02d}"
    return f"{a:02d}+{b:02d}:{work}={(a + b) % 100:02d}?{work};"


def in_brief(a: int, b: int, result: int | None = None) -> str:
    """A step without working: `37+05=42;`."""
    return f"{a:02d}+{b:02d}={(a + b) % 100 if result is None else result:02d};"


def finished(a: int, b: int, cut: int) -> str:
    """The shortest end of a step at length that was cut after `cut` characters.

    Working that has begun is gone on with, but not checked.
    """
    if cut < STEP:
        return in_brief(a, b)[cut:]
    return at_length(a, b).partition("?")[0][cut:] + END_OF_STEP


def think_example(problem: Problem, rng: random.Random) -> list[Piece]:
    """A text for the thinking mode: it takes over from concise steps, whole, cut or wrong."""
    pieces: list[Piece] = [(problem.prompt, False)]
    total = problem.operands[0]
    for number in problem.operands[1:]:
        right = (total + number) % 100
        long, kind = at_length(total, number), rng.random()
        # What concise mode may have made of the step: brief, or working that it did not check.
        cut = 1 if rng.random() < 0.6 else rng.randrange(STEP, len(long))
        right = right if kind < 0.5 or cut > 1 else _sometimes_wrong(right, rng, 0.3)
        other = (
            in_brief(total, number, right)
            if cut == 1
            else long[:cut] + finished(total, number, cut)
        )
        if kind < 0.5:
            pieces.append((long, True))
        elif kind < 0.7:
            pieces.append((other, False))
        else:
            # As after a rollback. What agrees with a step at length is gone on with, anything
            # else is started over.
            begun = other[: rng.randrange(1, len(other))]
            rest = long[len(begun) :] if long.startswith(begun) else "!" + long
            pieces += [(begun, False), (rest, True)]
            right = (total + number) % 100
        total = right
    return [*pieces, (f"#{total:02d}", True)]


def brief_example(problem: Problem, rng: random.Random) -> list[Piece]:
    """A text for the concise mode: it takes over from steps at length, whole or cut."""
    pieces: list[Piece] = [(problem.prompt, False)]
    total = problem.operands[0]
    for number in problem.operands[1:]:
        right = (total + number) % 100
        long, kind = at_length(total, number), rng.random()
        if kind < 0.5:
            pieces.append((in_brief(total, number), True))
        else:
            lead = ""
            if rng.random() < 0.2:
                brief = in_brief(total, number, _sometimes_wrong(right, rng, 0.5))
                lead = brief[: rng.randrange(STEP, len(brief))] + "!"
            cut = len(long) if kind < 0.65 else rng.randrange(1, len(long))
            pieces.append((lead + long[:cut], False))
            if cut < len(long):
                pieces.append((finished(total, number, cut), True))
        total = right
    return [*pieces, (f"#{total:02d}", True)]


def final_answer(text: str) -> str | None:
    """The answer that a text ends with."""
    found = re.search(r"#(\d\d)$", text)
    return found[1] if found else None


def step_spans(text: str) -> list[tuple[int, int]]:
    """First and end character of each step of a text, the final answer left out."""
    spans, start = [], 0
    for place, letter in enumerate(text):
        if letter == END_OF_STEP:
            spans.append((start, place + 1))
            start = place + 1
    return spans


def joined(pieces: Sequence[Piece]) -> str:
    """The text of pieces."""
    return "".join(text for text, _ in pieces)


def _sometimes_wrong(result: int, rng: random.Random, share: float) -> int:
    return rng.randrange(100) if rng.random() < share else result
