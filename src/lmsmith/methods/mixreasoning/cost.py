"""What switching costs: the time of a token, and the throughput of rows in mixed modes.

Ratios of interleaved repeats in one process; absolute times are notes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.methods.mixreasoning.config import MixReasoningConfig
from lmsmith.methods.mixreasoning.decoder import MixDecoder
from lmsmith.models.adapter import Adapter

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench
    from lmsmith.models import LM


def cost(bench: Bench, lm: LM) -> None:
    """Time a token beside plain LoRA decoding, and the throughput of a batch in mixed modes.

    Args:
        bench: The bench; `timed_tokens` and `repeats` say how much is timed.
        lm: The model; without an adapter it gets a random one for as long as it is timed.
    """
    if lm.adapter is not None:
        _timed(bench, lm)
        return
    adapter = Adapter.random(lm.model, ["all-linear"], rank=8, seed=0, scale=0.002)
    lm.load_adapter(adapter)
    try:
        _timed(bench, lm)
    finally:
        adapter.detach()
        lm.adapter = None


def _timed(bench: Bench, lm: LM) -> None:
    tokens = bench.options["timed_tokens"]
    config = MixReasoningConfig(criterion="random", share=0.5, window=8, candidates=5)
    prompt = lm.encode("A37B05C10D48>")

    def steady(decoder: Any, rows: int) -> list[float]:
        """Seconds of each step without re-prefills."""
        for number in range(rows):
            decoder.admit(Request(prompt, tokens, Sampling(seed=number), ignore_eos=True))
        decoder.step()
        seconds = []
        while decoder.active == rows:
            before = decoder.session.tokens_computed
            began = time.perf_counter()
            decoder.step()
            took = time.perf_counter() - began
            if decoder.session.tokens_computed - before == rows:
                seconds.append(took)
        for row in list(decoder.session.rows):
            decoder.retire(row)
        return seconds

    def whole(rows: int) -> float:
        """Kept tokens a second, re-prefills and discarded tokens paid for."""
        requests = [
            Request(prompt, tokens, Sampling(seed=number), ignore_eos=True)
            for number in range(rows)
        ]
        began = time.perf_counter()
        done = complete(MixDecoder(lm, config), requests, rows)
        return sum(one.trace.tokens_kept for one in done) / (time.perf_counter() - began)

    def timed() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"mix": [], "plain": [], "one": [], "sixteen": []}
        for repeat in range(bench.options["repeats"] + 1):
            # Each pair takes turns, so that a busy moment hits both alike.
            for name in ("mix", "plain") if repeat % 2 else ("plain", "mix"):
                decoder = MixDecoder(lm, config) if name == "mix" else PlainDecoder(lm)
                steps = steady(decoder, 1)
                if repeat and steps:
                    found[name].append(sorted(steps)[len(steps) // 2])
            one, sixteen = whole(1), whole(16)
            if repeat:
                found["one"].append(one)
                found["sixteen"].append(sixteen)
        return found

    found = bench.once(f"cost on {lm.name}", timed)
    middle = {name: sorted(values)[len(values) // 2] for name, values in found.items()}
    bench.check(
        "time a token over plain LoRA decoding, re-prefills excluded",
        middle["mix"] / middle["plain"], 1.10, "<=", "issue",
        f"{lm.name}: {1e3 * middle['mix']:.1f} and {1e3 * middle['plain']:.1f} ms, medians",
    )  # fmt: skip
    bench.check(
        "throughput of 16 rows in mixed modes over one row",
        middle["sixteen"] / middle["one"], 6.0, ">=", "issue",
        f"{lm.name}: {middle['sixteen']:.1f} and {middle['one']:.1f} kept tokens a second",
    )  # fmt: skip
