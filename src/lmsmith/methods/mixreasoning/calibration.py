"""Thresholds by percentile: how window scores are spread in concise mode, kept beside the adapter.

Confidence depends on k and on the vocabulary, so absolute thresholds do not transfer. Not for:
collecting the scores (`decoder.window_scores`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmsmith.errors import ModelFileError, UsageError

FILE = "mixreasoning.json"
FORMAT = 1
GRID = (1, 2, 5, *range(10, 100, 5), 98, 99)
GAP_DEVIATIONS = 0.4  # the paper's +2 at a standard deviation of about 5


@dataclass(frozen=True)
class Calibration:
    """The spread of one criterion's window scores in concise mode.

    Attributes:
        criterion: Whose scores.
        candidates: k.
        window: m.
        prompts: Prompts that were answered.
        scores: Full windows seen.
        mean: Of the scores.
        deviation: Their standard deviation.
        percentiles: Score at each percentile of `GRID`, as text.
    """

    criterion: str
    candidates: int
    window: int
    prompts: int
    scores: int
    mean: float
    deviation: float
    percentiles: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, scores: Sequence[float], criterion: str, candidates: int, window: int, prompts: int
    ) -> Calibration:
        """The spread of window scores.

        Raises:
            UsageError: There are none.
        """
        if not len(scores):
            raise UsageError(
                f"no answer reached the window of {window} tokens; give more or longer prompts, "
                "or a smaller window"
            )
        values = np.asarray(scores, dtype=np.float64)
        found = np.percentile(values, GRID)
        return cls(
            criterion,
            candidates,
            window,
            prompts,
            len(values),
            float(values.mean()),
            float(values.std()),
            {str(place): float(value) for place, value in zip(GRID, found, strict=True)},
        )

    def low(self, percentile: float) -> float:
        """The score at a percentile, between those of the grid by straight lines."""
        return float(np.interp(percentile, GRID, [self.percentiles[str(p)] for p in GRID]))

    @property
    def gap(self) -> float:
        """How far the upper threshold lies above the lower one."""
        return GAP_DEVIATIONS * self.deviation


def load(path: Path) -> dict[str, Calibration]:
    """The calibrations in a file, by criterion; none if there is no file.

    Raises:
        ModelFileError: The file is not one of ours.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, not {FORMAT}")
        return {name: _checked(entry) for name, entry in data["criteria"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{path} holds no calibration: {error}; calibrate again") from None


def save(path: Path, calibration: Calibration) -> None:
    """Put a calibration into a file beside those of other criteria, in one step.

    Raises:
        ModelFileError: The file that is there is not one of ours.
    """
    entries = load(path) | {calibration.criterion: calibration}
    data = {"format": FORMAT, "criteria": {name: asdict(one) for name, one in entries.items()}}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _checked(entry: Mapping[str, Any]) -> Calibration:
    made = Calibration(**entry)
    made.low(50.0), float(made.deviation)
    return made
