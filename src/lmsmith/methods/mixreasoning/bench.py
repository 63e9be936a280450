"""Does it think where it must, what does it save, and what does switching cost.

A tiny reasoner is trained on running sums (`sums`, `tiny`), as no small open model has a long
thinking mode. Arms: thinking only, concise only, the method, chance with the same thinking share
(anywhere, and at step boundaries only), and the criterion the wrong way round. The percentile of
the threshold and the rates of chance are chosen on problems of their own; bars were fixed before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmsmith.decoding.events import Event, Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.evaluation.bench import declare
from lmsmith.evaluation.items import Item
from lmsmith.evaluation.stats import mean_interval, paired_bootstrap
from lmsmith.methods.mixreasoning import calibration
from lmsmith.methods.mixreasoning.config import MixReasoningConfig
from lmsmith.methods.mixreasoning.cost import cost
from lmsmith.methods.mixreasoning.decoder import MixDecoder, window_scores
from lmsmith.methods.mixreasoning.real import real_model
from lmsmith.methods.mixreasoning.sums import END_OF_STEP, Problem, final_answer, step_spans
from lmsmith.methods.mixreasoning.tiny import Recipe

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench
    from lmsmith.models import LM

ARMS = ("think", "concise", "mix", "random", "random at steps", "reverse")
GREEDY = Sampling(temperature=0, seed=0)
WORTH_IT = 0.6  # most generated tokens on the validation problems, as a share of thinking's

Config = MixReasoningConfig
# The arm on a real model runs where `gsm8k` names a folder with train.jsonl and test.jsonl.
REAL: Mapping[str, Any] = {
    "gsm8k": "",
    "real_model": "qwen2.5-coder-0.5b",
    "real_train": 128,
    "real_steps": 24,
    "real_calibration": 32,
    "real_test": 100,
    "real_tokens": 200,
    "real_window": 8,
}


@declare(
    models={"smoke": [], "small": ["smollm2-135m"], "full": ["qwen2.5-coder-0.5b"]},
    options={
        "smoke": {
            "seeds": 1,
            "width": 32,
            "layers": 2,
            "base_steps": 10,
            "brief_steps": 5,
            "problems": 8,
            "validation": 8,
            "calibration": 8,
            "longest": 24,  # too short for an answer: no bar is meant to be met
            "window": 5,
            "candidates": 5,
            "percentiles": "20,40",
            "timed_tokens": 0,
            "repeats": 0,
            **REAL,
        },
        "small": {
            "seeds": 3,
            "width": 96,
            "layers": 3,
            "base_steps": 600,
            "brief_steps": 400,
            "problems": 500,
            "validation": 100,
            "calibration": 100,
            "longest": 200,  # a whole answer at length has about 130 tokens
            "window": 5,
            "candidates": 5,
            "percentiles": "10,20,30,40",
            "timed_tokens": 48,
            "repeats": 5,
            **REAL,
        },
        "full": {
            "seeds": 5,
            "width": 192,
            "layers": 4,
            "base_steps": 3000,
            "brief_steps": 600,
            "problems": 2000,
            "validation": 400,
            "calibration": 400,
            "longest": 200,  # a whole answer at length has about 130 tokens
            "window": 5,
            "candidates": 5,
            "percentiles": "5,10,15,20,25,30,35,40",
            "timed_tokens": 128,
            "repeats": 9,
            **REAL,
            "real_train": 7000,
            "real_steps": 800,
            "real_test": 1319,
        },
    },
)
def bench(bench: Bench) -> None:
    """The sums under every arm, then what switching costs."""
    bench.choose_threads()
    scores: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    groups: list[str] = []
    models = []
    for seed in range(bench.options["seeds"]):
        lm = _reasoner(bench, seed)
        models.append(lm)
        settings = bench.once(f"settings of seed {seed}", lambda lm=lm: _choose(bench, lm))  # type: ignore[misc]
        for percentile, row in settings["validation"].items():
            bench.once(f"validation of seed {seed}, {percentile} %", lambda row=row: row)  # type: ignore[misc]
        items = _problems(bench, "test", bench.options["problems"], seed)
        for arm in ARMS:
            config = Config.parse(settings["arms"][arm])
            score = _scorer(lm, config, bench.options["longest"])
            scores[arm] += bench.run(arm, items, score, 64, f"sums, seed {seed}")
        groups += [item["prompt"] for item in items]
    summary = _tables(bench, scores, groups)
    if bench.size != "smoke":
        _bars(bench, scores, groups, summary)
    _identities(bench, models[0], scores)
    if bench.options["timed_tokens"]:
        cost(bench, bench.model(bench.models[0]) if bench.models else models[0])
    if bench.options["gsm8k"]:
        real_model(bench, bench.model(bench.options["real_model"]), Path(bench.options["gsm8k"]))


def _reasoner(bench: Bench, seed: int) -> LM:
    options = bench.options
    return Recipe(
        seed=bench.seed + seed,
        width=options["width"],
        layers=options["layers"],
        base_steps=options["base_steps"],
        brief_steps=options["brief_steps"],
    ).train()


def _problems(bench: Bench, purpose: str, count: int, seed: int = 0) -> list[Item]:
    """The same problems for every training seed."""
    rng = random.Random(bench.seed_for("problems", purpose))
    items = []
    for number in range(count):
        problem = Problem.draw(rng)
        fields = {"prompt": problem.prompt, "operands": list(problem.operands)}
        items.append(Item(f"{purpose}-{number}", {**fields, "training seed": seed}))
    return items


def _scorer(
    lm: LM, config: Config, longest: int
) -> Callable[[list[Item]], list[Mapping[str, Any]]]:
    """Answers problems, and counts what was right, what it cost and where it was thought."""

    def score(batch: list[Item]) -> list[Mapping[str, Any]]:
        modes: list[list[str]] = [[] for _ in batch]

        def note(event: Event) -> None:
            modes[event.row] += [event.info.get("mode", "")] * len(event.text)

        requests = [
            Request(item["prompt"], max_tokens=longest, sampling=Sampling(0, seed=number))
            for number, item in enumerate(batch)
        ]
        done = complete(MixDecoder(lm, config), requests, len(batch), note)
        return [
            _scores(Problem(tuple(item["operands"])), one, found)
            for item, one, found in zip(batch, done, modes, strict=True)
        ]

    return score


def _scores(problem: Problem, done: Any, modes: Sequence[str]) -> dict[str, Any]:
    notes = done.trace.notes
    tokens = {"carry": 0, "trivial": 0}
    thought = dict(tokens)
    for (start, end), carries, trivial in zip(
        step_spans(done.text), problem.carries, problem.trivial, strict=False
    ):
        kind = "carry" if carries else "trivial" if trivial else ""
        if kind:
            tokens[kind] += end - start
            thought[kind] += modes[start:end].count("think")
    return {
        "right": float(final_answer(done.text) == problem.answer),
        "kept": done.trace.tokens_kept,
        "generated": notes["generated"],
        "discarded": done.trace.tokens_discarded,
        "thinking": notes["thinking_share"] * done.trace.tokens_kept,
        "switches": notes["to_think"] + notes["to_concise"],
        "refilled": notes["refilled"],
        "carry tokens": tokens["carry"],
        "carry thought": thought["carry"],
        "trivial tokens": tokens["trivial"],
        "trivial thought": thought["trivial"],
    }


def _choose(bench: Bench, lm: LM) -> dict[str, Any]:
    """Settings of every arm, from problems that are in no test."""
    options = bench.options
    shared = {"window": options["window"], "candidates": options["candidates"]}
    prompts = [item["prompt"] for item in _problems(bench, "calibration", options["calibration"])]
    concise = Config(mode="concise", **shared)
    scores = window_scores(lm, prompts, concise, GREEDY, options["longest"])
    found = calibration.Calibration.of(
        scores, "confidence", shared["candidates"], shared["window"], len(prompts)
    )
    items = _problems(bench, "validation", options["validation"])

    def measured(config: Mapping[str, Any]) -> dict[str, float]:
        rows = _scorer(lm, Config.parse(config), options["longest"])(items)
        return {
            "right": _mean(rows, "right"),
            "generated": _mean(rows, "generated"),
            "share": _mean(rows, "thinking") / _mean(rows, "kept"),
        }

    fixed = {mode: {"mode": mode, **shared} for mode in ("think", "concise")}
    budget = WORTH_IT * measured(fixed["think"])["generated"]
    tried: dict[str, dict[str, float]] = {}
    mixes: dict[str, dict[str, Any]] = {}
    for percentile in options["percentiles"].split(","):
        low = found.low(float(percentile))
        mixes[percentile] = {**shared, "low": low, "high": low + found.gap}
        tried[percentile] = measured(mixes[percentile])
    # The most often right of those that save enough; among equals, the cheapest.
    best = max(
        tried,
        key=lambda p: (
            tried[p]["generated"] <= budget,
            tried[p]["right"] if tried[p]["generated"] <= budget else -tried[p]["generated"],
            -tried[p]["generated"],
        ),
    )
    chance = {"criterion": "random", **shared}
    steps = {**chance, "boundary": END_OF_STEP}
    target = tried[best]["share"]
    return {
        "percentile": best,
        "validation": tried,
        "arms": {
            **fixed,
            "mix": mixes[best],
            "random": {**chance, "share": _matched(chance, target, measured)},
            "random at steps": {**steps, "share": _matched(steps, target, measured)},
            "reverse": {**mixes[best], "criterion": "reverse"},
        },
    }


def _matched(
    config: Mapping[str, Any],
    target: float,
    measured: Callable[[Mapping[str, Any]], Mapping[str, float]],
    rounds: int = 6,
) -> float:
    """The rate at which chance thinks as much as the method, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(rounds):
        middle = (low + high) / 2
        if measured({**config, "share": middle})["share"] < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _tables(
    bench: Bench, scores: Mapping[str, list[dict[str, Any]]], groups: list[str]
) -> dict[str, dict[str, float]]:
    """Accuracy and cost over all training seeds; a problem's answers are resampled together."""
    right = {arm: [row["right"] for row in rows] for arm, rows in scores.items()}
    generated = {arm: [row["generated"] for row in rows] for arm, rows in scores.items()}
    summary = {
        arm: {
            "kept": _mean(rows, "kept"),
            "generated": _mean(rows, "generated"),
            "thinking share": _mean(rows, "thinking") / _mean(rows, "kept"),
            "switches": _mean(rows, "switches"),
        }
        for arm, rows in scores.items()
    }
    bench.table(
        "running sums", "exact answers", "share", right, baseline="think", better="higher",
        cost=summary, groups=groups,
    )  # fmt: skip
    bench.table(
        "running sums", "generated, discarded included", "tokens", generated, baseline="think",
        groups=groups,
    )  # fmt: skip
    return summary


def _bars(
    bench: Bench,
    scores: Mapping[str, list[dict[str, Any]]],
    groups: list[str],
    summary: Mapping[str, Mapping[str, float]],
) -> None:
    """What was registered before the run."""
    right = {arm: [row["right"] for row in rows] for arm, rows in scores.items()}
    generated = {arm: [row["generated"] for row in rows] for arm, rows in scores.items()}

    def gap(one: str, other: str) -> tuple[float, str]:
        found = paired_bootstrap(right[one], right[other], "difference", groups=groups)
        return found.value, f"95 % interval [{found.low:+.3f}, {found.high:+.3f}]"

    ratio = paired_bootstrap(generated["mix"], generated["think"], "ratio", groups=groups)
    bench.check(
        "generated tokens over thinking, discarded included", ratio.value, 0.65, "<=",
        "pre-registered", f"95 % interval [{ratio.low:.3f}, {ratio.high:.3f}]",
    )  # fmt: skip
    value, note = gap("mix", "concise")
    bench.check("accuracy above concise", value, 0.12, ">=", "pre-registered", note)
    value, note = gap("mix", "think")
    bench.check("accuracy above thinking", value, -0.10, ">=", "pre-registered; aim -0.02", note)
    for arm in ("random", "random at steps"):
        value, note = gap("mix", arm)
        share = f"thinking shares {summary['mix']['thinking share']:.2f} and "
        note = f"{note}; {share}{summary[arm]['thinking share']:.2f}"
        bench.check(f"accuracy above {arm}", value, 0.10, ">=", "pre-registered", note)
    shares = {
        kind: _mean(scores["mix"], f"{kind} thought")
        / max(1e-9, _mean(scores["mix"], f"{kind} tokens"))
        for kind in ("carry", "trivial")
    }
    bench.check(
        "thinking share on carry steps over that on trivial ones",
        shares["carry"] / shares["trivial"] if shares["trivial"] else None,
        1.5,
        ">=",
        "pre-registered",
        f"{shares['carry']:.3f} and {shares['trivial']:.3f}",
    )
    bench.figure(
        "accuracy",
        "Thinking where confidence is low keeps most of the accuracy",
        {"exact answers": {arm: mean_interval(right[arm], groups=groups) for arm in ARMS}},
        y_label="share of exact answers",
    )


def _identities(bench: Bench, lm: LM, scores: Mapping[str, list[dict[str, Any]]]) -> None:
    """What holds for any model, trained or not."""
    unbalanced = sum(
        row["generated"] != row["kept"] + row["discarded"]
        for rows in scores.values()
        for row in rows
    )
    bench.check("answers whose kept and discarded tokens are not those generated", unbalanced, 0,
                "==", "identity")  # fmt: skip
    items = _problems(bench, "test", min(16, bench.options["problems"]))
    requests = [
        Request(item["prompt"], bench.options["longest"], Sampling(0, seed=number))
        for number, item in enumerate(items)
    ]
    # Rollbacks between two equal modes: greedy decoding writes the same tokens again.
    config = Config(criterion="random", window=bench.options["window"], concise_strength=0.0)

    def differing() -> dict[str, int]:
        mixed = complete(MixDecoder(lm, config), requests)
        adapter, lm.adapter = lm.adapter, None
        try:
            plain = complete(PlainDecoder(lm), requests)
        finally:
            lm.adapter = adapter
        return {
            "differing": sum(a.ids != b.ids for a, b in zip(mixed, plain, strict=True)),
            "discarded": sum(one.trace.tokens_discarded for one in mixed),
        }

    found = bench.once("two equal modes", differing)
    bench.check("answers that differ from greedy decoding when both modes are the base model",
                found["differing"], 0, "==", "identity",
                f"{found['discarded']} tokens were dropped and written again")  # fmt: skip


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
