"""The mechanics on a real model: what is selected, that nothing breaks, what it costs.

No claim of improvement is made here: a point of accuracy would take thousands of problems.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lmsmith.decoding.events import Sampling
from lmsmith.decoding.generate import generate
from lmsmith.display.progress import progress
from lmsmith.evaluation.items import Item, number_items
from lmsmith.evaluation.stats import paired_bootstrap
from lmsmith.methods.fg_ttl.adaptation import Adaptation, Answer, adapt
from lmsmith.methods.fg_ttl.config import FGTTLConfig, small
from lmsmith.methods.fg_ttl.forward import Text, read
from lmsmith.methods.fg_ttl.selection import select
from lmsmith.methods.fg_ttl.stream import read_items

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench
    from lmsmith.models import LM

# Batches after which memory must not grow any more: buffers and caches are warm then.
WARM = 8

_STORIES = (
    "{name} has {a} {thing}s and buys {b} more. Then {name} gives away {c}. "
    "How many {thing}s does {name} have now?",
    "A box holds {a} {thing}s. {name} has {c} boxes and {b} more {thing}s. "
    "How many {thing}s does {name} have in all?",
    "{name} picks {a} {thing}s on Monday, {b} on Tuesday and {c} on Wednesday. "
    "How many {thing}s is that?",
)
_RIGHT = (lambda a, b, c: a + b - c, lambda a, b, c: a * c + b, lambda a, b, c: a + b + c)


def word_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Short problems with one number as the answer: `prompt` and `answer`."""
    draw = random.Random(seed)
    made = []
    for place in range(count):
        kind = place % len(_STORIES)
        a, b, c = draw.randint(5, 20), draw.randint(3, 15), draw.randint(2, 5)
        story = _STORIES[kind].format(
            name=draw.choice(("Ann", "Ben", "Carla", "Dan")),
            thing=draw.choice(("apple", "marble", "stamp", "pencil")),
            a=a, b=b, c=c,
        )  # fmt: skip
        made.append({"prompt": story, "answer": _RIGHT[kind](a, b, c)})
    return made


def is_right(text: str, answer: int) -> bool:
    """Whether the last number of a text is the answer."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return bool(numbers) and int(numbers[-1]) == answer


def mechanics(bench: Bench) -> None:
    """FG-TTL over word problems beside the frozen model: selection, losses, accuracy, cost."""
    lm = bench.model(bench.models[0])
    items = number_items(word_problems(bench.options["word_problems"], bench.seed_for("words")))
    config = _config(bench.options["new_tokens"])

    def frozen(batch: list[Item]) -> list[Mapping[str, Any]]:
        done = generate(
            lm,
            [[{"role": "user", "content": item["prompt"]}] for item in batch],
            sampling=Sampling(0.0),
            max_tokens=config.max_new_tokens,
            batch_size=config.stream_batch,
        )
        return [
            {"right": is_right(one.text, item["answer"])}
            for one, item in zip(done, batch, strict=True)
        ]

    base = bench.run("frozen", items, frozen, len(items), "word problems")
    facts: dict[str, Any] = {}

    def adapted(batch: list[Item]) -> list[Mapping[str, Any]]:
        answers = _watched(lm, batch, config, facts)
        return [
            {"right": is_right(answer.text, item["answer"])}
            for answer, item in zip(answers, batch, strict=True)
        ]

    own = bench.run("fg-ttl", items, adapted, len(items), "word problems")
    found = bench.once("word problems", lambda: facts)
    right = {
        "frozen": [float(r["right"]) for r in base],
        "fg-ttl": [float(r["right"]) for r in own],
    }
    bench.table(
        "word problems",
        "online accuracy",
        "share",
        right,
        baseline="frozen",
        better="higher",
        cost={
            "frozen": {"tokens/s": found["tokens_per_second_frozen"]},
            "fg-ttl": {"tokens/s": found["tokens_per_second"]},
        },
    )
    drop = paired_bootstrap(right["fg-ttl"], right["frozen"], "difference")
    note = f"{found['selected']} of {found['valid']} valid positions in {found['texts']} answers"
    bench.check(
        "largest distance of what is selected before the entropy filter from floor(0.2 n)",
        found["miscount"], 0, "==", "definition", note,
    )  # fmt: skip
    bench.check(
        "least entropy of a selected position, nats",
        found["least_entropy"], config.entropy_threshold, ">", "definition",
    )  # fmt: skip
    bench.check("losses that are no number", found["bad_losses"], 0, "==", "mechanics")
    bench.check("norm of what was learned", found["moved"], 0.0, ">", "mechanics")
    bench.check(
        "accuracy over the frozen model's",
        drop.value, -0.1, ">=", "mechanics: no cliff",
        f"[{drop.low:+.3f}, {drop.high:+.3f}]; no claim of improvement",
    )  # fmt: skip


def _config(new_tokens: int) -> FGTTLConfig:
    return FGTTLConfig.parse(small().record() | {"max_new_tokens": new_tokens})


def _watched(lm: LM, batch: list[Item], config: FGTTLConfig, facts: dict[str, Any]) -> list[Answer]:
    """Predict and update by hand, looking at what is selected in between."""
    state = Adaptation(lm, config)
    prompts = [item["prompt"] for item in batch]
    items = list(read_items(lm, prompts, config, chat=True))
    answers: list[Answer] = []
    clock = {"predict": 0.0, "update": 0.0}
    facts |= {"valid": 0, "selected": 0, "texts": 0, "miscount": 0, "bad_losses": 0}
    least = math.inf
    with progress("fg-ttl word problems", len(items), unit="items") as task:
        for first in range(0, len(items), config.stream_batch):
            began = time.perf_counter()
            new = state.predict(items[first : first + config.stream_batch])
            clock["predict"] += time.perf_counter() - began
            least = min(least, _look(state, new, facts))
            began = time.perf_counter()
            record = state.update(new)
            clock["update"] += time.perf_counter() - began
            losses = [step["loss"] for step in record["steps"] if step["loss"] is not None]
            facts["bad_losses"] += sum(not math.isfinite(loss) for loss in losses)
            answers += new
            task.advance(len(new))
    tokens = sum(len(answer.ids) for answer in answers)
    moved = [
        (parameter.detach() - state.learner.initial[name]).norm()
        for name, parameter in state.learner.parameters.items()
    ]
    facts |= {
        "least_entropy": least,
        "moved": float(torch.stack(moved).norm()),
        "tokens_per_second_frozen": tokens / clock["predict"],
        "tokens_per_second": tokens / (clock["predict"] + clock["update"]),
        "rolled_back": state.rollbacks,
    }
    return answers


@torch.no_grad()
def _look(state: Adaptation, answers: Iterable[Answer], facts: dict[str, Any]) -> float:
    """Count what would be selected now; the least entropy of it."""
    least = math.inf
    threshold = state.config.entropy_threshold
    for answer in answers:
        rows = read(state.lm, [Text((*answer.prompt_ids, *answer.ids), len(answer.prompt_ids))])
        entropy = state.learner.entropies(rows)
        unfiltered = select(entropy, rows.starts, rows.lengths, entropy_threshold=-math.inf)
        chosen = select(entropy, rows.starts, rows.lengths, entropy_threshold=threshold)
        valid = int((unfiltered.gain > -math.inf).sum())
        wanted = max(1, int(0.2 * valid)) if valid else 0
        facts["texts"] += 1
        facts["valid"] += valid
        facts["selected"] += int(chosen.mask.sum())
        facts["miscount"] = max(facts["miscount"], abs(int(unfiltered.mask.sum()) - wanted))
        if chosen.mask.any():
            least = min(least, float(entropy[chosen.mask].min()))
    return least


def memory(bench: Bench) -> None:
    """Resident memory over a long stream: flat once it is warm."""
    lm = bench.model(bench.models[0])
    count = bench.options["memory_items"]
    config = _config(16)

    def measure() -> dict[str, Any]:
        import psutil

        process, sizes = psutil.Process(), []
        prompts = [one["prompt"] for one in word_problems(count, bench.seed_for("memory"))]
        tokens, began = 0, time.perf_counter()
        with progress("fg-ttl long stream", count, unit="items") as task:
            for answer in adapt(
                lm,
                prompts,
                config,
                chat=True,
                on_update=lambda record: sizes.append(process.memory_info().rss),
            ):
                tokens += len(answer.ids)
                task.advance()
        return {
            "megabytes": [size / 1e6 for size in sizes],
            "tokens_per_second": tokens / (time.perf_counter() - began),
        }

    found = bench.once("long stream", measure)
    sizes = found["megabytes"]
    # Means of windows: the allocator's ups and downs of single batches say nothing.
    early, late = (sum(part) / len(part) for part in (sizes[WARM : 2 * WARM], sizes[-WARM:]))
    bench.check(
        f"memory after {count} stream items over that after {WARM * config.stream_batch}",
        late / early,
        1.02,
        "<=",
        "the issue: memory is flat",
        f"{early:,.0f} MB, {late:,.0f} MB; {found['tokens_per_second']:.1f} tokens/s adapting",
    )
    bench.figure(
        "memory",
        f"Memory over a stream of {count} items",
        {lm.name: {"x": list(range(1, len(sizes) + 1)), "y": sizes}},
        kind="lines",
        x_label="batches of eight items",
        y_label="resident memory, MB",
    )
