"""Running sums: a task whose steps are easy or hard, and can be written at length or briefly.

A problem is a chain of two-digit numbers to be added modulo 100, `A37B05C10D48>`. A thinking model
works each addition out digit by digit and checks it (42 characters a step); a concise one writes
operands and result only (10). Half the numbers are trivial to add (0, 1, 10, 20), the others are
arbitrary. A step names its number by letter, so that neither mode has to count steps.

Neither mode survives prefixes that the other has written unless it has seen such prefixes, so both
are trained on mixed ones, with the loss only on what their own mode writes. This is a deviation
from the paper, which trains on pure short traces and reports that this works from 7B on.

Pure: text and random numbers only. Not for: the model that learns it (`tiny`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LABELS = "ABCDEFGH"
ALPHABET = "0123456789+>:=,?;!#" + LABELS
TRIVIAL = (0, 1, 10, 20)
HEAD = 7  # characters of "B37+05:" or "B37+05=", the last of which decides the style of a step
END_OF_STEP = ";"

Piece = tuple[str, bool]
"""A stretch of a training text, and whether the loss is taken on it."""


@dataclass(frozen=True)
class Step:
    """One addition.

    Attributes:
        label: Letter of the number added.
        a: The sum so far.
        b: The number added.
    """

    label: str
    a: int
    b: int

    @property
    def result(self) -> int:
        """The new sum, modulo 100."""
        return (self.a + self.b) % 100

    @property
    def at_length(self) -> str:
        """With working and a check: `B37+05:7+5=12,3+0+1=04=42?7+5=12,3+0+1=04;`."""
        a, b = self.a, self.b
        low = a % 10 + b % 10
        high = a // 10 + b // 10 + low // 10
        work = f"{a % 10}+{b % 10}={low:02d},{a // 10}+{b // 10}+{low // 10}={high:02d}"
        return f"{self.label}{a:02d}+{b:02d}:{work}={self.result:02d}?{work};"

    def in_brief(self, result: int | None = None) -> str:
        """Without working: `B37+05=42;`; with another result if one is given."""
        result = self.result if result is None else result
        return f"{self.label}{self.a:02d}+{self.b:02d}={result:02d};"

    def finished(self, cut: int) -> str:
        """The shortest end of the step at length when it was cut after `cut` characters.

        Working that has begun is gone on with, but not checked.
        """
        if cut < HEAD:
            return self.in_brief()[cut:]
        return self.at_length.partition("?")[0][cut:] + END_OF_STEP


@dataclass(frozen=True)
class Problem:
    """A chain of numbers to add up modulo 100."""

    operands: tuple[int, ...]

    @classmethod
    def draw(cls, rng: random.Random, operands: int = 4) -> Problem:
        """A random problem; each number but the first is trivial to add with probability 1/2."""
        rest = (
            rng.choice(TRIVIAL) if rng.random() < 0.5 else rng.randrange(100)
            for _ in range(operands - 1)
        )
        return cls((rng.randrange(100), *rest))

    @property
    def prompt(self) -> str:
        """`A37B05C10D48>`."""
        named = zip(LABELS, self.operands, strict=False)
        return "".join(f"{label}{number:02d}" for label, number in named) + ">"

    @property
    def answer(self) -> str:
        """The sum modulo 100, two digits."""
        return f"{sum(self.operands) % 100:02d}"

    @property
    def added(self) -> Iterator[tuple[str, int]]:
        """Letter and value of each number but the first."""
        return zip(LABELS[1:], self.operands[1:], strict=False)

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


def think_example(problem: Problem, rng: random.Random) -> list[Piece]:
    """A text for the thinking mode: it takes over from concise steps, whole, cut or wrong."""
    pieces: list[Piece] = [(problem.prompt, False)]
    total = problem.operands[0]
    for label, number in problem.added:
        step, kind = Step(label, total, number), rng.random()
        total, long = step.result, step.at_length
        if kind < 0.5:
            pieces.append((long, True))
            continue
        # What concise mode may have made of the step: brief, or working that it did not check.
        if rng.random() < 0.6:
            result = rng.randrange(100) if rng.random() < 0.3 else step.result
            other = step.in_brief(result)
        else:
            result, cut = step.result, rng.randrange(HEAD, len(long))
            other = long[:cut] + step.finished(cut)
        if kind < 0.7:
            pieces.append((other, False))
            total = result
        else:
            # As after a rollback. What agrees with a step at length is gone on with, anything
            # else is started over.
            begun = other[: rng.randrange(1, len(other))]
            rest = long[len(begun) :] if long.startswith(begun) else "!" + long
            pieces += [(begun, False), (rest, True)]
    return [*pieces, (f"#{total:02d}", True)]


def brief_example(problem: Problem, rng: random.Random) -> list[Piece]:
    """A text for the concise mode: it takes over from steps at length, whole or cut."""
    pieces: list[Piece] = [(problem.prompt, False)]
    total = problem.operands[0]
    for label, number in problem.added:
        step, kind = Step(label, total, number), rng.random()
        total, long = step.result, step.at_length
        if kind < 0.5:
            pieces.append((step.in_brief(), True))
            continue
        lead = ""
        if rng.random() < 0.2:  # as where thinking has started a brief step over
            result = rng.randrange(100) if rng.random() < 0.5 else step.result
            lead = step.in_brief(result)[: rng.randrange(HEAD, HEAD + 3)] + "!"
        cut = len(long) if kind < 0.6 else rng.randrange(1, len(long))
        pieces.append((lead + long[:cut], False))
        if cut < len(long):
            pieces.append((step.finished(cut), True))
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
