"""A small bench that takes about a second, run as a process that tests stop and kill."""

import random
import sys
import time

from lmsmith.errors import LmsmithError
from lmsmith.evaluation import experiment
from lmsmith.evaluation.bench import Bench, Item, declare, run_bench

ITEMS = 64


@declare(
    models={"smoke": ["none"], "small": ["none", "other"]},
    options={"smoke": {"pause": 0.02, "offset": 1}, "small": {"pause": 0.0, "offset": 2}},
)
def bench(state: Bench) -> None:
    items = [Item(f"item {n}", {"n": n, "text": f"第{n}句\udc80 \u2028"}) for n in range(ITEMS)]
    offset = state.once("offset", lambda: {"offset": state.options["offset"]})["offset"]

    def score(arm: str, batch: list[Item]) -> list[dict[str, float]]:
        time.sleep(state.options["pause"])
        # Like padding in a real model, the rest of a batch shows in the last digits.
        shade = sum(item["n"] for item in batch) * 1e-9
        return [
            {
                "loss": offset + random.Random(state.seed_for(arm, item.id)).random() + shade,
                "text": item["text"],
            }
            for item in batch
        ]

    plain = state.run("plain", items, lambda batch: score("plain", batch), 3)
    both = state.arms(
        ["low", "high"],
        items,
        lambda batch: [
            {"low": low, "high": {"loss": low["loss"] * 2}} for low in score("low", batch)
        ],
        batch_size=5,
        section="shared",
    )
    losses = {"plain": plain, **both}
    found = state.table(
        "all",
        "loss",
        "nats",
        {arm: [row["loss"] for row in rows] for arm, rows in losses.items()},
        baseline="plain",
        cost={"high": {"calls": 2.0}},
    )
    state.check("high is twice low", found["high"].mean.value, 2, "<=", "identity", "never holds")
    state.check("ratio is positive", found["low"].ratio.value, 0.0, ">", "identity")
    state.figure("loss", "High loses twice", {arm: f.mean for arm, f in found.items()})


if __name__ == "__main__":
    experiment.FLUSH_SECONDS = 0.05  # so that kills find all states of the file
    try:
        run_bench("toy", out=sys.argv[1], bench=bench)
    except LmsmithError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
