"""What a bench function works with: items under arms, tables, checks, figures, one report.

Not for: finding and starting benches (`bench`), or what a method measures (its own `bench.py`).

A bench function reads from top to bottom as an experiment: load items, `run` each arm on them,
`table` what came out, `check` it against its bars. Everything it measures is kept in the run
folder as it comes, so a killed bench goes on where it stopped when it is called again.
"""

from __future__ import annotations

import hashlib
import json
import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmsmith.display.progress import progress
from lmsmith.evaluation.environment import environment, fastest_threads
from lmsmith.evaluation.items import Item, check_unique
from lmsmith.evaluation.report import Report
from lmsmith.evaluation.runs import RunFolder, as_json
from lmsmith.evaluation.stats import Interval, mean_interval, paired_bootstrap

if TYPE_CHECKING:
    from lmsmith.models import LM

# Results are flushed to disk at least this often, and whenever a call of `run` ends.
FLUSH_SECONDS = 0.5

_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}

Scores = Mapping[str, Any]


@dataclass(frozen=True)
class Arm:
    """What `Bench.table` found out about one arm.

    Attributes:
        mean: Mean over items with its interval.
        ratio: Sum over items against the baseline's, paired; `None` for the baseline itself.
        difference: Mean minus the baseline's, paired; likewise.
    """

    mean: Interval
    ratio: Interval | None = None
    difference: Interval | None = None


class Bench:
    """What a bench function works with; made by `run_bench`.

    Attributes:
        method: Name of the bench.
        size: `smoke`, `small` or `full`.
        models: Names of the models to measure: the user's, or the declared ones of this size.
        options: Every declared option with its resolved value.
        seed: The run's seed.
        folder: The run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        config = folder.config
        self.folder = folder
        self.method: str = config["method"]
        self.size: str = config["size"]
        self.seed: int = config["seed"]
        self.models: list[str] = config["models"]
        self.options: dict[str, Any] = config["options"]
        self._opened: dict[str, LM] = {}
        self._done: dict[tuple[str, ...], dict[str, Any]] = {
            (row["section"], row["arm"], row["item"], row["print"]): row["scores"]
            for row in folder.rows
        }
        self._arms: list[dict[str, Any]] = []
        self._checks: list[dict[str, Any]] = []
        self._figures: list[dict[str, Any]] = []
        self._model_facts: dict[str, dict[str, str]] = {}

    # Measuring

    def model(self, name: str, **settings: Any) -> LM:
        """Open a model, once a run; `settings` go to `open_model`."""
        key = json.dumps([name, settings], sort_keys=True, default=str)
        if key not in self._opened:
            from lmsmith.models import open_model

            self.choose_threads()
            lm = open_model(name, **settings)
            self._opened[key] = lm
            self._model_facts[name] = {
                "dtype": str(lm.dtype).removeprefix("torch."),
                "device": str(lm.device),
            }
        return self._opened[key]

    def choose_threads(self) -> int:
        """Set torch to the thread count that is fastest here, chosen once a run."""
        import torch

        threads = self.once("threads", fastest_threads)
        torch.set_num_threads(threads)
        return threads

    def seed_for(self, *names: Hashable) -> int:
        """A seed of its own for whatever `names` name, the same in every session of the run."""
        text = json.dumps([self.seed, *map(str, names)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])

    def run(
        self,
        arm: str,
        items: Sequence[Item],
        score: Callable[[list[Item]], Sequence[Scores]],
        batch_size: int = 1,
        section: str = "",
    ) -> list[dict[str, Any]]:
        """Score items under one arm.

        Args:
            arm: The arm's name.
            items: What to score.
            score: Scores a batch: one mapping of JSON values an item, in order. Draw random
                numbers from `seed_for(item.id)` so that a resumed run draws the same.
            batch_size: Items a batch; the batches are the same in a resumed run.
            section: The part of the bench, when items of several parts share names.

        Returns:
            The scores, one an item, in order.
        """

        def score_arm(batch: list[Item]) -> list[dict[str, Scores]]:
            return [{arm: scores} for scores in score(batch)]

        return self.arms([arm], items, score_arm, batch_size, section)[arm]

    def arms(
        self,
        arms: Sequence[str],
        items: Sequence[Item],
        score: Callable[[list[Item]], Sequence[Mapping[str, Scores]]],
        batch_size: int = 1,
        section: str = "",
    ) -> dict[str, list[dict[str, Any]]]:
        """Score items under several arms at once, for arms that share work.

        Like `run`, but `score` returns one mapping from arm to scores an item.

        Returns:
            The scores of each arm, one an item, in order.
        """
        check_unique(items)
        keys = {item.id: (item.id, _fingerprint(item)) for item in items}

        def lacking(item: Item) -> list[str]:
            return [arm for arm in arms if (section, arm, *keys[item.id]) not in self._done]

        title = " ".join(filter(None, (self.method, section, "/".join(arms))))
        ready = sum(not lacking(item) for item in items)
        pending: list[dict[str, Any]] = []
        flushed = time.monotonic()
        with progress(title, len(items), done=ready, unit="items") as task:
            try:
                for start in range(0, len(items), batch_size):
                    # The whole batch is scored again when one of it is lacking: the same batch
                    # gives the same numbers, a smaller one only nearly so.
                    batch = list(items[start : start + batch_size])
                    missing = {item.id: lacking(item) for item in batch}
                    if not any(missing.values()):
                        continue
                    scored = list(score(batch))
                    if len(scored) != len(batch):
                        raise ValueError(f"{len(scored)} scores for {len(batch)} items")
                    for item, by_arm in zip(batch, scored, strict=True):
                        for arm in missing[item.id]:
                            name, fingerprint = keys[item.id]
                            pending.append(
                                {
                                    "section": section,
                                    "arm": arm,
                                    "item": name,
                                    "print": fingerprint,
                                    "scores": dict(by_arm[arm]),
                                }
                            )
                    task.advance(sum(bool(names) for names in missing.values()))
                    if time.monotonic() - flushed > FLUSH_SECONDS:
                        self._keep(pending)
                        flushed = time.monotonic()
            finally:
                self._keep(pending)
        return {arm: [self._done[(section, arm, *keys[item.id])] for item in items] for arm in arms}

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """A value that is measured once a run and kept: a timing, a calibration, a training.

        Returns:
            The value after a trip through JSON.
        """

        def shown() -> Any:
            with progress(f"{self.method} {name}"):
                return measure()

        return self._measured(name, shown)

    def interleaved(
        self, name: str, work: Mapping[str, Callable[[], object]], repeats: int = 7
    ) -> dict[str, list[float]]:
        """Wall time of several pieces of work, taking turns so that a busy moment hits all alike.

        Every piece runs once unmeasured first; each round starts with another one.

        Returns:
            Seconds of every repeat, by name; measured once a run.
        """

        def measure() -> dict[str, list[float]]:
            seconds: dict[str, list[float]] = {arm: [] for arm in work}
            arms = list(work)
            with progress(f"{self.method} {name}", (repeats + 1) * len(arms)) as task:
                for repeat in range(repeats + 1):
                    turn = repeat % len(arms)
                    for arm in arms[turn:] + arms[:turn]:
                        started = time.perf_counter()
                        work[arm]()
                        if repeat:
                            seconds[arm].append(time.perf_counter() - started)
                        task.advance()
            return seconds

        return self._measured(name, measure)

    # Reporting

    def table(
        self,
        section: str,
        metric: str,
        unit: str,
        arms: Mapping[str, Sequence[float]],
        *,
        baseline: str | None = None,
        better: Literal["lower", "higher", ""] = "lower",
        cost: Mapping[str, Mapping[str, float]] | None = None,
        weights: Sequence[float] | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> dict[str, Arm]:
        """Put arms side by side in the report: mean, 95 % interval, ratio to the baseline.

        Args:
            section: The part of the bench.
            metric: What is measured.
            unit: Its unit.
            arms: The values of each arm, the same items in the same order.
            baseline: The arm to compare with.
            better: Which way is better; empty if neither.
            cost: Further columns: numbers of each arm by name.
            weights: What each item counts, the same for all arms.
            groups: A label an item; items with one label are resampled together.

        Returns:
            The intervals of each arm, for checks.

        Raises:
            ValueError: Arms of different lengths, or a baseline that is no arm.
        """
        if baseline is not None and baseline not in arms:
            raise ValueError(f"the baseline {baseline!r} is not among the arms {list(arms)}")
        found = {}
        for arm, values in arms.items():
            made = Arm(mean_interval(values, weights=weights, groups=groups))
            if baseline is not None and arm != baseline:
                base = arms[baseline]
                made = Arm(
                    made.mean,
                    paired_bootstrap(values, base, "ratio", weights=weights, groups=groups),
                    paired_bootstrap(values, base, "difference", weights=weights, groups=groups),
                )
            found[arm] = made
            self._arms.append(
                {
                    "section": section,
                    "metric": metric,
                    "unit": unit,
                    "better": better,
                    "arm": arm,
                    "baseline": baseline,
                    "items": len(values),
                    **made.mean.to_dict(),
                    "ratio": made.ratio.to_dict() if made.ratio else None,
                    "difference": made.difference.to_dict() if made.difference else None,
                    "cost": dict((cost or {}).get(arm, {})),
                }
            )
        return found

    def check(
        self,
        name: str,
        value: float | str | bool | None,
        bar: float | str | bool,
        relation: str = "<=",
        source: str = "",
        note: str = "",
    ) -> bool:
        """Declare a check: `value relation bar`. A miss is reported, never raised.

        Args:
            name: What must hold.
            value: What was measured; `None` or not a number is a miss.
            bar: What it is held against.
            relation: `<=`, `>=`, `<`, `>` or `==`.
            source: Where the bar comes from: the paper, a peer, an identity.
            note: What a reader should know, such as why it was missed.
        """
        if relation not in _RELATIONS:
            raise ValueError(f"relation is one of {', '.join(_RELATIONS)}, not {relation!r}")
        value, bar = as_json(value), as_json(bar)
        passed = value is not None and _RELATIONS[relation](value, bar)
        self._checks.append(
            {
                "name": name,
                "value": _finite(value),
                "relation": relation,
                "bar": bar,
                "passed": passed,
                "source": source,
                "note": note,
            }
        )
        return passed

    def figure(
        self,
        name: str,
        title: str,
        data: Mapping[str, Any],
        *,
        kind: Literal["bars", "lines"] = "bars",
        **axes: Any,
    ) -> Path:
        """Draw a figure into the run folder.

        Args:
            name: File name without ending.
            title: The claim that the figure shows.
            data: As `lmsmith.display.figures.bars` or `.lines` takes it; intervals as they are.
            kind: `bars` or `lines`.
            axes: Labels and scales, as the same functions take them.
        """
        from lmsmith.display import figures

        draw = {"bars": figures.bars, "lines": figures.lines}[kind]
        path = self.folder.write(f"figures/{name}.png", draw(data, title, **axes))
        self._figures.append({"name": name, "title": title, "file": f"figures/{name}.png"})
        return path

    def report(self) -> Report:
        """The report of what was declared so far."""
        facts = {
            **environment(),
            "models": self._model_facts,
            "revisions": self.folder.revisions,
            "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        return Report(
            method=self.method,
            size=self.size,
            model="+".join(self.models),
            arms=self._arms,
            checks=self._checks,
            environment=facts,
            seconds=round(self.folder.seconds, 1),
            settings=self.folder.config,
            figures=self._figures,
            folder=self.folder.path,
        )

    def _measured(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self.folder.measurements:
            self.folder.measure(name, measure())
        return self.folder.measurements[name]

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        """Write rows to disk and count them as done; empties the list."""
        todo, rows[:] = list(rows), []
        for row in self.folder.append(todo) if todo else []:
            self._done[(row["section"], row["arm"], row["item"], row["print"])] = row["scores"]


def _fingerprint(item: Item) -> str:
    """Short hash of an item's content, so that results of a changed item are not reused."""
    text = json.dumps(item.fields, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _finite(value: Any) -> Any:
    """The value, or `None` where it is a number that is not finite, which JSON cannot hold."""
    infinite = isinstance(value, float) and value - value != 0
    return None if infinite else value
