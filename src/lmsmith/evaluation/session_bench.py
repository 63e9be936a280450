"""Is decoding through the Session as fast as transformers' own `generate`?

Both arms continue the same prompts greedily with the same model in the same process. They advance
in lockstep, a step each in turn, so that a busy moment of the machine hits both; a repeat's speed
is its median step, and the ratio is over all repeats, paired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from statistics import median
from threading import Semaphore, Thread
from typing import TYPE_CHECKING, Any

from lmsmith.evaluation.bench import Bench, declare
from lmsmith.evaluation.items import Item
from lmsmith.evaluation.texts import load_text, passages

if TYPE_CHECKING:
    from lmsmith.models import LM

GENERATE, SESSION = "generate", "session"
# Prompts and token count -> a generator that runs one step at each `next`, and the rows' new ids,
# which are complete when it is exhausted.
Steps = Callable[["LM", list[list[int]], int], tuple[Generator[None, None, None], list[list[int]]]]


@declare(
    models={size: ["smollm2-135m"] for size in ("smoke", "small", "full")},
    options={
        "smoke": {"tokens": 8, "prompt": 16, "repeats": 3, "batch": 4},
        "small": {"tokens": 25, "prompt": 64, "repeats": 7, "batch": 32},
        "full": {"tokens": 129, "prompt": 512, "repeats": 15, "batch": 32},
    },
)
def bench(bench: Bench) -> None:
    """Measure both arms at batch 1 and at the larger batch."""
    length, repeats = bench.options["prompt"], bench.options["repeats"]
    lm = bench.model(bench.models[0])
    texts = passages(load_text("python"), 8 * length, 64, bench.seed)
    prompts = [ids[:length] for text in texts if len(ids := lm.encode(text)) >= length]
    items = [Item(str(repeat), {"repeat": repeat}) for repeat in range(repeats)]
    exact = str(lm.dtype) == "torch.float32"

    for batch in (1, bench.options["batch"]):

        def measure(chosen: list[Item], batch: int = batch) -> list[dict[str, Any]]:
            at = chosen[0]["repeat"] * batch
            rows = [prompts[(at + i) % len(prompts)] for i in range(batch)]
            if not at:
                _lockstep(lm, rows, 2)
            return [_lockstep(lm, rows, bench.options["tokens"])]

        rows = bench.arms([GENERATE, SESSION], items, measure, section=f"batch {batch}")
        for metric, name in (("first", "time to first token"), ("step", "time a step")):
            values = {arm: [row[metric] for row in found] for arm, found in rows.items()}
            cost = {arm: {"tokens/s": batch * repeats / sum(v)} for arm, v in values.items()}
            table = bench.table(f"batch {batch}", name, "s", values, baseline=GENERATE, cost=cost)
        ratio = table[SESSION].ratio
        assert ratio is not None
        few = bench.size == "smoke"
        bench.check(
            f"speed of the Session over generate, batch {batch}",
            1 / ratio.value,
            0.7 if few else 1.0,
            ">=",
            source="plumbing: too few steps to judge" if few else "peer: transformers generate",
            note=f"95 % interval {1 / ratio.high:.3f} to {1 / ratio.low:.3f}",
        )
        bench.check(
            f"rows with the same greedy tokens, batch {batch}",
            sum(row["same"] for row in rows[SESSION]) / repeats,
            1.0 if exact else 0.75,
            ">=",
            source="identity" if exact else "half precision breaks near-ties differently",
        )


def _lockstep(lm: LM, prompts: list[list[int]], tokens: int) -> dict[str, dict[str, float]]:
    """Run both arms a step each in turn: seconds to the first token and of the median step."""
    arms: dict[str, Steps] = {GENERATE: _generate_steps, SESSION: _session_steps}
    runs = {arm: steps(lm, prompts, tokens) for arm, steps in arms.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    order = list(arms)
    with closing(runs[GENERATE][0]), closing(runs[SESSION][0]):
        for _ in range(tokens):
            for arm in order:
                began = time.perf_counter()
                next(runs[arm][0])
                seconds[arm].append(time.perf_counter() - began)
            order.reverse()
        for steps, _ in runs.values():
            next(steps, None)
    same = [a == b for a, b in zip(runs[GENERATE][1], runs[SESSION][1], strict=True)]
    found = {arm: {"first": s[0], "step": median(s[1:])} for arm, s in seconds.items()}
    found[SESSION]["same"] = sum(same) / len(same)
    return found


def _generate_steps(
    lm: LM, prompts: list[list[int]], tokens: int
) -> tuple[Generator[None, None, None], list[list[int]]]:
    """`generate` in a thread of its own that waits for its turn after every token."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    turn, done = Semaphore(0), Semaphore(0)
    ids: list[list[int]] = []
    state: dict[str, Any] = {"stop": False, "error": None}

    class Wait(StoppingCriteria):
        def __call__(self, *_: Any, **__: Any) -> torch.Tensor:
            done.release()
            turn.acquire()
            return torch.full((len(prompts),), state["stop"], device=lm.device)

    def work(threads: int) -> None:
        turn.acquire()
        try:
            torch.set_num_threads(threads)
            batch = torch.tensor(prompts, device=lm.device)
            settings = GenerationConfig(
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=lm.vocabulary,  # never drawn, so that both arms run equally long
                pad_token_id=0,
                repetition_penalty=1.0,
            )
            out = lm.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([Wait()]),
            )
            ids.extend(out[:, batch.shape[1] :].tolist())
        except BaseException as error:  # handed to the thread that waits
            state["error"] = error
        done.release()

    thread = Thread(target=work, args=(torch.get_num_threads(),), daemon=True)

    def steps() -> Generator[None, None, None]:
        thread.start()
        try:
            for _ in range(tokens):
                turn.release()
                done.acquire()
                if state["error"] is not None:
                    raise state["error"]
                yield
            turn.release()
        finally:
            state["stop"] = True
            turn.release()
            thread.join()

    return steps(), ids


def _session_steps(
    lm: LM, prompts: list[list[int]], tokens: int
) -> tuple[Generator[None, None, None], list[list[int]]]:
    """The plain decoder, which stands on the Session."""
    from lmsmith.decoding.events import Request, Sampling
    from lmsmith.decoding.plain import PlainDecoder

    ids: list[list[int]] = [[] for _ in prompts]

    def steps() -> Generator[None, None, None]:
        decoder = PlainDecoder(lm)
        greedy = Sampling(temperature=0)
        rows = {}
        for place, prompt in enumerate(prompts):
            request = Request(prompt, max_tokens=tokens, sampling=greedy, ignore_eos=True)
            rows[decoder.admit(request)] = place
        while decoder.active:
            for event in decoder.step():
                ids[rows[event.row]] += event.ids
            yield

    return steps(), ids
