"""Whether adapting repairs a shift, where it breaks the model, and whether the guard holds.

Arms, rates and seeds are the declared options, fixed before anything ran. Each seed has its own
stream and its own shifted copy of the source model; each arm goes through it online: an item's
score is that of the answer given before the model learned from the item's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmsmith.evaluation.bench import declare
from lmsmith.evaluation.items import Item
from lmsmith.evaluation.stats import mean_interval, paired_bootstrap
from lmsmith.methods.fg_ttl import real_model, trial
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.toy import Recipe, problems, source_model

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench

ARMS = (
    "fg-ttl",
    "selection",
    "temperature",
    "tent",
    "high-entropy",
    "random",
    "eata",
    "sar",
    "come",
    "tlm",
)
# The arms that the reproduction was registered with.
DIGEST_ARMS = tuple(arm for arm in ARMS if arm not in ("sar", "come"))
FROZEN = "frozen"
# Demands, fixed before any run: accuracy as a share.
NOT_BELOW, GAIN, DAMAGE, MILDER, HELD = -0.02, 0.03, 0.20, 0.10, -0.03

Scores = Mapping[str, Any]
# By rate, then by arm: a score a problem.
Found = Mapping[float, Mapping[str, Sequence[Scores]]]


@declare(
    models={size: ["smollm2-135m"] for size in ("smoke", "small", "full")},
    options={
        "smoke": {
            "arms": "fg-ttl,temperature,tent",
            "seeds": 1,
            "problems": 16,
            "rates": "1e-3,1e-1",
            "preset_rate": 1e-3,
            "training_problems": 4_000,
            "noise": 0.22,
            "source_problems": 8,
            "word_problems": 0,
            "memory_items": 0,
            "new_tokens": 32,
        },
        "small": {
            "arms": ",".join(DIGEST_ARMS),
            "seeds": 5,
            "problems": 96,
            "rates": "1e-6,1e-4,3e-4,1e-3,1.7e-3,3e-3,1e-2",
            "preset_rate": 3e-4,
            "training_problems": 48_000,
            "noise": 0.22,
            "source_problems": 32,
            "word_problems": 32,
            "memory_items": 500,
            "new_tokens": 96,
        },
        "full": {
            "arms": ",".join(ARMS),
            "seeds": 10,
            "problems": 320,
            "rates": "1e-6,1e-4,3e-4,1e-3,1.7e-3,3e-3,1e-2",
            "preset_rate": 3e-4,
            "training_problems": 48_000,
            "noise": 0.22,
            "source_problems": 96,
            "word_problems": 64,
            "memory_items": 500,
            "new_tokens": 128,
        },
    },
)
def bench(bench: Bench) -> None:
    """The tiny model over all arms and rates, then the mechanics on a real one."""
    bench.choose_threads()
    stage = _Stage(bench)
    frozen = stage.arm(FROZEN, None)
    rates = [float(rate) for rate in bench.options["rates"].split(",")]
    found = {rate: {arm: stage.arm(arm, rate) for arm in stage.arms} for rate in rates}
    for rate in rates:
        stage.table(f"rate {rate:g}", {FROZEN: frozen} | found[rate])
    _preset(bench, frozen, found)
    _damage(bench, stage, frozen, found)
    _figures(bench, frozen, found)
    stage.diagnose()
    if bench.options["word_problems"]:
        real_model.mechanics(bench)
    if bench.options["memory_items"]:
        real_model.memory(bench)


class _Stage:
    """The streams, the shifted models, and one arm at a time over them."""

    def __init__(self, bench: Bench) -> None:
        options = bench.options
        self.bench, self.size = bench, options["problems"]
        self.arms: list[str] = options["arms"].split(",")
        self.recipe = Recipe(problems=options["training_problems"])
        self.items = [
            Item(f"{seed}-{place}", {"seed": seed, "prompt": one.prompt, "answer": one.answer})
            for seed in range(options["seeds"])
            for place, one in enumerate(problems(self.size, bench.seed_for("stream", seed)))
        ]

    def arm(self, name: str, rate: float | None, guard: bool = False) -> list[dict[str, Any]]:
        """Scores of one arm on every stream; `rate` is none for the frozen model."""
        section = "" if rate is None else f"{rate:g}{' guarded' if guard else ''}"

        def score(batch: list[Item]) -> list[Scores]:
            config = None
            if rate is not None:
                config = FGTTLConfig(
                    objective=name,  # type: ignore[arg-type]
                    learning_rate=rate,
                    max_new_tokens=trial.LONGEST,
                    guard=guard,
                    seed=batch[0]["seed"],
                )
            return trial.online(
                source_model(self.recipe),
                batch,
                config,
                noise=self.bench.options["noise"],
                held_out=self.bench.options["source_problems"],
            )

        return self.bench.run(name, self.items, score, self.size, section)

    def diagnose(self) -> None:
        """Where in a step the selector looks, on the first seed's shifted model."""
        found = self.bench.once(
            "where it learns",
            lambda: trial.where(
                source_model(self.recipe), self.items[: self.size], self.bench.options["noise"]
            ),
        )
        self.bench.figure(
            "where",
            "What comes after the positions that Future-Gain selects",
            {part: {k: row[k] for k in ("eligible", "selected")} for part, row in found.items()},
            y_label="share of positions",
        )

    def table(self, section: str, arms: Mapping[str, Sequence[Scores]]) -> None:
        """Online accuracy of every arm beside the frozen model's, and what else it did."""
        cost = {arm: {name: _mean(rows, name) for name in trial.ALSO} for arm, rows in arms.items()}
        self.bench.table(
            section,
            "online accuracy",
            "share",
            {arm: _right(rows) for arm, rows in arms.items()},
            baseline=FROZEN,
            better="higher",
            cost=cost,
        )


def _preset(bench: Bench, frozen: Sequence[Scores], found: Found) -> None:
    """Demand 1: at the preset rate FG-TTL does no harm, and adapting is worth something."""
    rate = bench.options["preset_rate"]
    base = _right(frozen)
    gains = {
        arm: paired_bootstrap(_right(rows), base, "difference") for arm, rows in found[rate].items()
    }
    own = gains["fg-ttl"]
    bench.check(
        f"fg-ttl over frozen at the preset rate {rate:g}, low end",
        own.low,
        NOT_BELOW,
        ">=",
        "our demand 1",
        f"difference {own.value:+.3f} [{own.low:+.3f}, {own.high:+.3f}] of "
        f"{mean_interval(base).value:.3f}",
    )
    best = max(gains, key=lambda arm: gains[arm].value)
    few = bench.size == "smoke"
    bench.check(
        f"best arm over frozen at the preset rate {rate:g}",
        gains[best].value,
        -1.0 if few else GAIN,
        ">=",
        "plumbing: too few problems to judge"
        if few
        else "our demand 1: else the shift is badly chosen",
        f"{best}, [{gains[best].low:+.3f}, {gains[best].high:+.3f}]",
    )
    if "tent" in found[rate]:
        bench.table(
            f"fg-ttl against tent, rate {rate:g}",
            "online accuracy",
            "share",
            {arm: _right(found[rate][arm]) for arm in ("tent", "fg-ttl")},
            baseline="tent",
            better="higher",
        )


def _damage(
    bench: Bench,
    stage: _Stage,
    frozen: Sequence[Scores],
    found: Found,
) -> None:
    """Demands 2 and 3: where Tent breaks the model, and what the guard makes of three times it."""
    base = _right(frozen)
    rates = sorted(found)
    lost = {r: paired_bootstrap(_right(found[r]["tent"]), base, "difference") for r in rates}
    damaging = next((rate for rate in rates if lost[rate].value <= -DAMAGE), None)
    if damaging is None and bench.size == "smoke":
        return  # too few steps for any rate to do damage
    bench.check(
        "rate at which Tent loses 20 points",
        damaging,
        rates[-1],
        "<=",
        "our demand 2: the rates reach as far",
        ", ".join(f"{rate:g}: {lost[rate].value:+.3f}" for rate in rates),
    )
    if damaging is None:
        return
    milder = paired_bootstrap(
        _right(found[damaging]["temperature"]), _right(found[damaging]["tent"]), "difference"
    )
    bench.check(
        f"temperature alone over Tent at the damaging rate {damaging:g}",
        milder.value,
        MILDER,
        ">=",
        "our demand 2",
        f"[{milder.low:+.3f}, {milder.high:+.3f}]",
    )
    worst = 3 * damaging
    guarded = {arm: stage.arm(arm, worst, guard=True) for arm in stage.arms}
    stage.table(f"rate {worst:g} with the guard", {FROZEN: frozen} | guarded)
    held = {
        arm: paired_bootstrap(_right(rows), base, "difference") for arm, rows in guarded.items()
    }
    least = min(held, key=lambda arm: held[arm].value)
    bench.check(
        f"worst arm over frozen at {worst:g} with the guard",
        held[least].value,
        HELD,
        ">=",
        "our demand 3",
        f"{least}, [{held[least].low:+.3f}, {held[least].high:+.3f}]",
    )


def _figures(bench: Bench, frozen: Sequence[Scores], found: Found) -> None:
    def line(rows_at: Callable[[float], Sequence[Scores]]) -> dict[str, list[float]]:
        intervals = [mean_interval(_right(rows_at(rate))) for rate in found]
        return {
            "x": list(found),
            "y": [interval.value for interval in intervals],
            "low": [interval.low for interval in intervals],
            "high": [interval.high for interval in intervals],
        }

    arms = next(iter(found.values()))
    shown = [arm for arm in ("fg-ttl", "selection", "temperature", "tent") if arm in arms]
    bench.figure(
        "rates",
        "Where adapting helps, and where it destroys the model",
        {arm: line(lambda rate, arm=arm: found[rate][arm]) for arm in shown},  # type: ignore[misc]
        kind="lines",
        x_label="learning rate",
        y_label="online accuracy",
        x_log=True,
        reference=mean_interval(_right(frozen)).value,
        reference_label="frozen",
    )


def _right(rows: Sequence[Scores]) -> list[float]:
    return [float(row["right"]) for row in rows]


def _mean(rows: Sequence[Scores], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)
