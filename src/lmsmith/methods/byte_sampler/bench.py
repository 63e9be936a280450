"""What byte-level sampling gains at prompt boundaries, what it costs, and whether it is exact."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmsmith.decoding.events import Request, Sampling
from lmsmith.display.progress import progress
from lmsmith.evaluation.bench import declare
from lmsmith.evaluation.items import Item
from lmsmith.evaluation.texts import load_text, passages
from lmsmith.methods.byte_sampler import combine
from lmsmith.methods.byte_sampler.boundaries import beam, boundaries, gap
from lmsmith.methods.byte_sampler.config import ByteSamplerConfig
from lmsmith.methods.byte_sampler.decoder import ByteDecoder
from lmsmith.methods.byte_sampler.reader import ByteReader, normalise
from lmsmith.methods.byte_sampler.scoring import byte_logprobs, score

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench
    from lmsmith.models import LM

_PROMPTS = (
    "The quick brown fox jumps over the la",
    "def fibonacci(n):\n    if n < 2:\n        retu",
    "Water boils at a temperature of one hund",
    "import os\n\nfor name in os.listd",
)


@declare(
    models={
        "smoke": ["smollm2-135m"],
        "small": ["qwen2.5-coder-0.5b", "smollm2-135m"],
        "full": ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"],
    },
    options={
        "smoke": {
            "texts": "python,manual",
            "cuts": 16,
            "before": 80,
            "before_chinese": 30,
            "ensemble_texts": 0,
            "ensemble_chars": 100,
            "beam_cuts": 1,
            "sampled_bytes": 16,
            "exact_bytes": 24,
            "pairs": 2_000,
        },
        "small": {
            "texts": "python,english,chinese",
            "cuts": 300,
            "before": 80,
            "before_chinese": 30,
            "ensemble_texts": 16,
            "ensemble_chars": 300,
            "beam_cuts": 12,
            "sampled_bytes": 64,
            "exact_bytes": 76,
            "pairs": 100_000,
        },
        "full": {
            "texts": "python,english,chinese",
            "cuts": 2_000,
            "before": 80,
            "before_chinese": 30,
            "ensemble_texts": 64,
            "ensemble_chars": 1_000,
            "beam_cuts": 64,
            "sampled_bytes": 256,
            "exact_bytes": 76,
            "pairs": 100_000,
        },
    },
)
def bench(bench: Bench) -> None:
    """Prompt boundaries, cost, exactness and ensembles, in that order."""
    lm = bench.model(bench.models[0])
    reader = ByteReader(lm)
    boundaries(bench, reader)
    _cost(bench, lm)
    beam(bench, reader)
    _exactness(bench)
    if bench.options["ensemble_texts"] and len(set(bench.models)) > 1:
        _ensemble(bench, [lm, bench.model(bench.models[1])])
    _tokenizers(bench)


def _cost(bench: Bench, lm: LM) -> None:
    """Forward calls and tokens a byte while sampling, and the time outside the model."""

    def sample_some(prompts: Sequence[str]) -> dict[str, float]:
        decoder = ByteDecoder([lm], ByteSamplerConfig())
        for number, prompt in enumerate(prompts):
            decoder.admit(
                Request(
                    prompt,
                    max_tokens=bench.options["sampled_bytes"] + 1,
                    sampling=Sampling(seed=number),
                    ignore_eos=True,
                )
            )
        decoder.step()  # reads the prompts
        session = decoder.readers[0].session
        calls, tokens = session.forward_calls, session.tokens_computed
        inside, started, made = session.forward_seconds, time.perf_counter(), 0
        steps = 0
        with progress(
            f"byte-sampler sampling {len(prompts)}", bench.options["sampled_bytes"]
        ) as task:
            while decoder.active:
                made += decoder.active
                decoder.step()
                steps += 1
                task.advance()
        seconds = time.perf_counter() - started
        return {
            "calls": (session.forward_calls - calls) / steps,
            "tokens": (session.tokens_computed - tokens) / made,
            "outside": 1 - (session.forward_seconds - inside) / seconds,
            "ms_a_byte": 1e3 * seconds / made,
        }

    one = bench.once("sampling, batch 1", lambda: sample_some(_PROMPTS[:1]))
    many = bench.once("sampling, batch 16", lambda: sample_some(_PROMPTS * 4))
    bench.check(
        "forward calls a byte",
        max(one["calls"], many["calls"]),
        1.0,
        "<=",
        "the paper's cost class",
    )
    bench.check(
        "new tokens a byte and row",
        max(one["tokens"], many["tokens"]),
        1.5,
        "<=",
        "official code: about one new token a byte",
    )
    bench.check(
        "share of wall time outside the model's forward, batch 1",
        one["outside"],
        0.15,
        "<=",
        "our bar for a 0.5B model",
        f"{one['ms_a_byte']:.0f} ms a byte alone, {many['ms_a_byte']:.0f} in a batch of 16 (share "
        f"{many['outside']:.2f})",
    )


def _exactness(bench: Bench) -> None:
    """Cached against fresh at every byte; a model with itself; proxy tuning switched off."""
    # In half precision the same sums in another order differ by more than the bar.
    lm = bench.model(bench.models[0], dtype="float32")
    text = "naïve café: 12345 don't  stop\r\n\tif x:\n        return 'héllo 世界 🙂'\n".encode()
    text = text[: bench.options["exact_bytes"]]

    def cached_and_fresh() -> dict[str, float]:
        reader, worst = ByteReader(lm), {"probability": 0.0, "nats": 0.0}
        row = reader.open([text[:4]], start=True)
        with progress("byte-sampler cached and fresh", len(text) - 4) as task:
            for index in range(4, len(text)):
                if index > 4:
                    reader.push(row, text[index - 1 : index])
                cached = normalise(reader.next_bytes([row]))[0]
                again = reader.open([text[:index]], start=True)
                fresh = normalise(reader.next_bytes([again]))[0]
                reader.close(again)
                difference = float((cached.exp() - fresh.exp()).abs().max())
                worst["probability"] = max(worst["probability"], difference)
                worst["nats"] = max(worst["nats"], gap(cached, fresh))
                task.advance()
        return worst

    worst = bench.once("cached and fresh", cached_and_fresh)
    bench.check(
        "cached against fresh at every byte: largest difference of the next-byte vector",
        worst["probability"],
        1e-4,
        "<=",
        "identity",
        f"probabilities in float32; {worst['nats']:.1e} nats where a byte has more than one in a "
        "million",
    )
    small = bench.model(bench.models[-1], dtype="float32")
    teams = {
        "mixed with itself": ([lm, lm], ByteSamplerConfig()),
        "multiplied with itself": ([lm, lm], ByteSamplerConfig(combine="product")),
        "with proxy tuning of alpha 0": (
            [lm, small, small],
            ByteSamplerConfig(combine="proxy", alpha=0.0),
        ),
    }
    count = min(12, bench.options["sampled_bytes"] // 4)
    for name, (team, config) in teams.items():
        bench.check(
            f"a model {name} samples the same bytes: largest difference",
            bench.once(name, lambda team=team, config=config: _beside(lm, team, config, count)),  # type: ignore[misc]
            1e-5,
            "<=",
            "identity",
            "of the log-probability of a sampled byte, in nats",
        )


def _beside(lm: LM, team: Sequence[LM], config: ByteSamplerConfig, count: int) -> float:
    """Largest difference of what a model and a team sample, in nats; 1e9 where bytes differ."""
    found: list[list[tuple[int, float]]] = []
    for decoder in (ByteDecoder([lm]), ByteDecoder(team, config)):
        for number, prompt in enumerate(_PROMPTS):
            decoder.admit(
                Request(prompt, max_tokens=count, sampling=Sampling(seed=number), ignore_eos=True)
            )
        drawn: list[tuple[int, int, float]] = []
        while decoder.active:
            for event in decoder.step():
                drawn += [
                    (event.row, byte, logprob)
                    for byte, logprob in zip(event.ids, event.logprobs, strict=True)
                ]
        found.append([(byte, logprob) for _, byte, logprob in sorted(drawn, key=lambda d: d[0])])
    alone, together = found
    if [byte for byte, _ in alone] != [byte for byte, _ in together]:
        return 1e9
    return max(abs(a - b) for (_, a), (_, b) in zip(alone, together, strict=True))


def _ensemble(bench: Bench, models: Sequence[LM]) -> None:
    """Bits a byte of each model and of both together, on texts scored 16 in one pass."""
    readers = {lm.name: ByteReader(lm) for lm in models}
    for name in [n for n in bench.options["texts"].split(",") if n != "chinese"]:
        drawn = passages(
            load_text(name),
            bench.options["ensemble_chars"],
            bench.options["ensemble_texts"],
            bench.seed_for("ensemble", name),
        )
        items = [Item(f"{name}-{i}", {"text": text}) for i, text in enumerate(drawn)]
        names = [*readers, "mix", "product"]
        scores = bench.arms(
            names, items, lambda batch: _score_texts(readers, batch), 16, f"ensemble {name}"
        )
        bench.table(
            f"ensemble, {name}",
            "held-out text",
            "bits a byte",
            {arm: [row["bits"] for row in scores[arm]] for arm in names},
            baseline=models[0].name,
            weights=[row["bytes"] for row in scores["mix"]],
        )


def _score_texts(
    readers: Mapping[str, ByteReader], batch: list[Item]
) -> list[Mapping[str, Mapping[str, Any]]]:
    texts = [item["text"].encode() for item in batch]
    each = {name: score(reader, texts) for name, reader in readers.items()}
    scores: list[Mapping[str, Mapping[str, Any]]] = []
    for index, text in enumerate(texts):
        stacked = torch.stack([found[index] for found in each.values()])
        vectors = {name: found[index] for name, found in each.items()}
        vectors |= {"mix": combine.mix(stacked), "product": combine.product(stacked)}
        scores.append(
            {
                name: {
                    "bits": float(-byte_logprobs(vector, text).mean() / math.log(2)),
                    "bytes": len(text),
                }
                for name, vector in vectors.items()
            }
        )
    return scores


def _tokenizers(bench: Bench) -> None:
    """Pair validity against the tokenizer itself, on sampled adjacent pairs."""
    from lmsmith.methods.byte_sampler.vocabulary import ByteTokens
    from lmsmith.models import load_tokenizer

    names = [bench.models[0]]
    if bench.size != "smoke":
        names = ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"]
    pairs = bench.options["pairs"]

    def test(name: str) -> dict[str, Any]:
        tokens = ByteTokens.from_tokenizer(load_tokenizer(name))
        return {"wrong": tokens.self_test(pairs), "reencode": tokens.reencode}

    for name in names:
        found = bench.once(f"pairs {name}", lambda name=name: test(name))  # type: ignore[misc]
        bench.check(
            f"{name}: wrong pairs of {pairs:,}",
            found["wrong"],
            0,
            "==",
            "the tokenizer",
            "every pair is asked of the tokenizer" if found["reencode"] else "by merges alone",
        )
