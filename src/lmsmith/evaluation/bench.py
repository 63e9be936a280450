"""Benches by name: their plan, and a run of one from its folder to its report.

Not for: what a bench function does (`experiment`), or what a method measures (its own
`bench.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from lmsmith.errors import ConfigError, InterruptedRunError, UnknownNameError
from lmsmith.evaluation.experiment import Arm, Bench
from lmsmith.evaluation.items import Item
from lmsmith.evaluation.report import Report
from lmsmith.evaluation.runs import RunFolder, as_json

__all__ = ["Arm", "Bench", "Item", "benches", "declare", "find_bench", "plan", "run_bench"]

SIZES = ("smoke", "small", "full")

# Benches that belong to no method, with what they measure; methods declare theirs in their cards.
BUILT_IN = {
    "session": (
        "lmsmith.evaluation.session_bench:bench",
        "speed of plain decoding beside transformers' own generate",
    )
}

BenchFunction = Callable[[Bench], None]
F = TypeVar("F", bound=BenchFunction)


def declare(
    models: Mapping[str, Sequence[str]] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """Declare a bench function's defaults, so that its plan is known before it runs.

    Args:
        models: The models of each size, `{"smoke": ["smollm2-135m"], ...}`.
        options: The options of each size with their defaults. A user's option must be among
            them, and is read as the type its default has.
    """

    def keep(function: F) -> F:
        function.models = dict(models or {})  # type: ignore[attr-defined]
        function.options = dict(options or {})  # type: ignore[attr-defined]
        return function

    return keep


def benches() -> list[str]:
    """Names of everything that can be benched."""
    from lmsmith import cards

    return sorted({*BUILT_IN, *(n for n, card in cards.find().items() if card.entry.get("bench"))})


def find_bench(method: str) -> BenchFunction:
    """The bench function of a method or a built-in bench.

    Raises:
        UnknownNameError: There is no such method or bench.
        UsageError: The method has no bench.
    """
    if method in BUILT_IN:
        module, _, name = BUILT_IN[method][0].partition(":")
        return getattr(import_module(module), name)
    from lmsmith import cards

    known = cards.find()
    if method not in known:
        raise UnknownNameError("bench", method, {*BUILT_IN, *known})
    return known[method].load("bench")


def plan(
    method: str,
    size: str = "smoke",
    models: Sequence[str] = (),
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    bench: BenchFunction | None = None,
) -> dict[str, Any]:
    """Every setting of a run, resolved: what `config.json` holds and `--dry-run` prints.

    Raises:
        UnknownNameError: No such bench, size or option; the message names the nearest.
        ConfigError: An option's value is not of the type its default has.
    """
    bench = bench or find_bench(method)
    if size not in SIZES:
        raise UnknownNameError("size", size, SIZES)
    declared = getattr(bench, "options", {}).get(size, {})
    given = dict(options or {})
    for name in given:
        if name not in declared:
            raise UnknownNameError(f"option of bench {method}", name, declared)
    return {
        "method": method,
        "size": size,
        "models": list(models) or list(getattr(bench, "models", {}).get(size, [])),
        "seed": seed,
        "options": {
            name: _typed(name, given[name], default) if name in given else default
            for name, default in declared.items()
        },
    }


def run_bench(
    method: str,
    size: str = "smoke",
    models: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    base: str | Path = "runs",
    bench: BenchFunction | None = None,
) -> Report:
    """Run a bench, or go on with one that was stopped, and write its report.

    Args:
        method: A method's name or a built-in bench.
        size: `smoke`, `small` or `full`.
        models: Models to measure instead of the declared ones.
        out: Run folder; `None` picks one under `base`, as `RunFolder.open` says. A folder that
            holds the finished run gives its report at once.
        seed: Seed of everything drawn.
        options: Options of the bench instead of the declared ones.
        base: Where run folders without a given name live.
        bench: The bench function itself, for benches that are not registered.

    Raises:
        UsageError: An unknown name, a bad value, or a folder that holds another run.
        StorageError: The folder cannot be written.
        InterruptedRunError: Ctrl-C; what was measured is kept.
    """
    bench = bench or find_bench(method)
    config = plan(method, size, models, seed=seed, options=options, bench=bench)
    with RunFolder.open(out, config, base) as folder:
        if folder.finished:
            return Report.load(folder.path)
        try:
            state = Bench(folder)
            bench(state)
            report = state.report()
            folder.finish(report.to_dict())
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"stopped; {folder.count()} results are kept in {folder.path}; "
                "run the same command again to go on from there"
            ) from None
    return report


def _typed(name: str, value: Any, default: Any) -> Any:
    """An option's value as the type of its default, read from text if need be."""
    if isinstance(value, str) and not isinstance(default, str):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    value = as_json(value)
    if default is not None and type(value) is not type(as_json(default)):
        kind = type(as_json(default)).__name__
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "text",
        }
        raise ConfigError(f"option {name!r} is {words.get(kind, f'a {kind}')}, not {value!r}")
    return value
