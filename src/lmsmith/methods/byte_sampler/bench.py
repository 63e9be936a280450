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
from lmsmith.evaluation.stats import mean_interval, paired_bootstrap
from lmsmith.evaluation.texts import load_text, passages
from lmsmith.methods.byte_sampler import combine
from lmsmith.methods.byte_sampler.baselines import BeamCover, arms
from lmsmith.methods.byte_sampler.config import ByteSamplerConfig
from lmsmith.methods.byte_sampler.decoder import ByteDecoder
from lmsmith.methods.byte_sampler.reader import ByteReader, normalise
from lmsmith.methods.byte_sampler.scoring import byte_logprobs, score
from lmsmith.methods.byte_sampler.tree import CoveringTree

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench
    from lmsmith.models import LM

ARMS = ("plain", "healing", "byte")

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
    _boundaries(bench, reader)
    _cost(bench, lm)
    _beam(bench, reader)
    _exactness(bench, lm)
    if bench.options["ensemble_texts"] and len(bench.models) > 1:
        _ensemble(bench, [lm, bench.model(bench.models[1])])
    _tokenizers(bench)


def _boundaries(bench: Bench, reader: ByteReader) -> None:
    """Bits of the first byte of the next character, at cuts at random characters."""
    names = bench.options["texts"].split(",")
    bits: dict[str, dict[str, list[float]]] = {}
    whole: dict[str, list[float]] = {arm: [] for arm in ARMS}  # where a token ends anyway
    for name in names:
        items = _cuts(bench, name, bench.options["cuts"], "cuts")
        scores = bench.arms(ARMS, items, lambda batch: _score_cuts(reader, batch), 16, name)
        bits[name] = {arm: [row["bits"] for row in scores[arm]] for arm in ARMS}
        accuracy = {arm: [float(row["right"]) for row in scores[arm]] for arm in ARMS}
        nodes = sum(row["nodes"] for row in scores["byte"]) / len(items)
        found = bench.table(
            name,
            "next byte after a cut",
            "bits",
            bits[name],
            baseline="plain",
            cost={
                arm: {
                    "accuracy": sum(accuracy[arm]) / len(items),
                    "live nodes": nodes if arm == "byte" else 1.0 + (arm == "healing"),
                }
                for arm in ARMS
            },
        )
        against = paired_bootstrap(bits[name]["byte"], bits[name]["healing"], "difference")
        for arm in ARMS:
            whole[arm] += [b for b, row in zip(bits[name][arm], scores["byte"], strict=True)
                           if row["boundary"]]  # fmt: skip
        ratio = found["byte"].ratio
        bench.check(
            f"{name}: bits over plain tokenization",
            ratio.value if ratio else None,
            0.5,
            "<=",
            "pilot on Qwen2.5-Coder-0.5B: at least half of plain's bits saved",
            _inside(bits[name], [row["boundary"] for row in scores["byte"]]),
        )
        bench.check(
            f"{name}: bits over healing, low end of the paired difference",
            against.low,
            0.0,
            "<=",
            "pilot: no worse than healing within the paired interval",
            f"difference {against.value:+.3f} [{against.low:+.3f}, {against.high:+.3f}] bits",
        )
    latin = [name for name in names if name != "chinese"]
    pooled = {arm: [b for name in latin for b in bits[name][arm]] for arm in ARMS}
    ratio = paired_bootstrap(pooled["byte"], pooled["healing"], "ratio")
    bench.check(
        f"{' and '.join(latin)} pooled: bits over healing",
        ratio.value,
        0.9,
        "<=",
        "pilot: at least 10 % fewer bits than healing",
        f"95 % interval [{ratio.low:.3f}, {ratio.high:.3f}]",
    )
    if whole["byte"]:
        bench.table(
            "cuts where a token ends anyway, all texts",
            "next byte",
            "bits",
            whole,
            baseline="plain",
        )
    ends = _only_ends(bench, reader, names)
    gaps = bench.run("only end", ends, lambda batch: _score_ends(reader, batch), 16, "only end")
    bench.check(
        "equal to plain at cuts where nothing but a token boundary is possible",
        max((row["gap"] for row in gaps), default=None),
        1e-4,
        "<=",
        "identity",
        f"largest difference in nats at {len(ends)} cuts",
    )
    bench.figure(
        "boundary",
        "A prompt cut anywhere: plain tokenization loses most of what the model knows",
        {name: {arm: mean_interval(bits[name][arm]) for arm in ARMS} for name in names},
        y_label="bits of the next byte",
    )


def _inside(bits: Mapping[str, Sequence[float]], boundary: Sequence[bool]) -> str:
    """Where the difference comes from: cuts inside a token, apart from those where one ends."""
    inside = [number for number, ends in enumerate(boundary) if not ends]
    if not inside:
        return ""
    plain, byte = (sum(bits[arm][n] for n in inside) / len(inside) for arm in ("plain", "byte"))
    return (
        f"{len(inside) / len(boundary):.0%} of the cuts are inside a token: {plain:.2f} to "
        f"{byte:.2f} bits there; at the others a token ends anyway and all arms know the same"
    )


def _cuts(bench: Bench, name: str, count: int, purpose: str) -> list[Item]:
    # A Chinese character carries about as much as three Latin ones.
    before = bench.options["before_chinese" if name == "chinese" else "before"]
    drawn = passages(load_text(name), before + 1, count, bench.seed_for(purpose, name))
    return [
        Item(f"{name}-{number}", {"prefix": text[:-1], "next": text[-1]})
        for number, text in enumerate(drawn)
    ]


def _only_ends(
    bench: Bench, reader: ByteReader, names: Sequence[str], most: int = 32
) -> list[Item]:
    """Cuts after which no token can reach across: the byte model must equal plain tokenization."""
    found: list[Item] = []
    for name in names:
        for item in _cuts(bench, name, 40 * most, "ends"):
            tree = CoveringTree(reader.tokens)
            tree.push(reader.tokens.normalize(item["prefix"]).encode())
            if tree.trunk and reader.only_end(tree):
                found.append(item)
            if len(found) == most:
                return found
    return found


def _score_ends(reader: ByteReader, batch: list[Item]) -> list[Mapping[str, Any]]:
    rows = _open(reader, batch)
    found = arms(reader, rows)
    for row in rows:
        reader.close(row)
    return [
        {"gap": _gap(byte, plain)}
        for byte, plain in zip(found["byte"], found["plain"], strict=True)
    ]


def _open(reader: ByteReader, batch: list[Item]) -> list[int]:
    return [
        reader.open([reader.tokens.normalize(item["prefix"]).encode()], start=True)
        for item in batch
    ]


def _score_cuts(reader: ByteReader, batch: list[Item]) -> list[Mapping[str, Mapping[str, Any]]]:
    rows = _open(reader, batch)
    found = arms(reader, rows)
    scores: list[Mapping[str, Mapping[str, Any]]] = []
    for index, (item, row) in enumerate(zip(batch, rows, strict=True)):
        target = item["next"].encode()[0]
        entry: dict[str, dict[str, Any]] = {}
        for arm in ARMS:
            vector = found[arm][index]
            entry[arm] = {
                "bits": float(-vector[target] / math.log(2)),
                "right": int(vector.argmax()) == target,
            }
        ids = reader.lm.encode(item["prefix"], add_special=False)
        longer = reader.lm.encode(item["prefix"] + item["next"], add_special=False)
        entry["byte"] |= {
            "nodes": len(reader.tree(row).live_nodes()),
            "boundary": longer[: len(ids)] == ids,
        }
        scores.append(entry)
        reader.close(row)
    return scores


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference in nats where either gives a byte more than one in a million."""
    likely = torch.maximum(one, other) > math.log(1e-6)
    return float((one - other)[likely].abs().max())


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


def _beam(bench: Bench, reader: ByteReader, width: int = 5, steps: int = 16) -> None:
    """What a beam over all covers costs for the same next byte."""
    name = bench.options["texts"].split(",")[0]
    items = _cuts(bench, name, bench.options["beam_cuts"], "beam")

    def score_beam(batch: list[Item]) -> list[Mapping[str, Mapping[str, Any]]]:
        scores: list[Mapping[str, Mapping[str, Any]]] = []
        for item in batch:
            prefix, target = item["prefix"].encode(), item["next"].encode()[0]
            head, tail = prefix[:-steps], prefix[-steps:]
            start = [reader.start_id, *reader.lm.encode(head.decode(), add_special=False)]
            beam = BeamCover(reader, start, width)
            for byte in tail:
                beam.push(byte)
            found = beam.next_bytes()
            beam.close()
            row = reader.open([head], start=True)
            reader.next_bytes([row])
            before = reader.session.tokens_computed
            for byte in tail:
                reader.push(row, bytes([byte]))
                covering = normalise(reader.next_bytes([row]))[0]
            used = reader.session.tokens_computed - before
            reader.close(row)
            scores.append(
                {
                    "beam": {
                        "bits": float(-found[target] / math.log(2)),
                        "tokens": beam.tokens / steps,
                    },
                    "byte": {
                        "bits": float(-covering[target] / math.log(2)),
                        "tokens": used / steps,
                    },
                }
            )
        return scores

    scores = bench.arms(("beam", "byte"), items, score_beam, 1, f"beam {name}")
    bench.table(
        f"{name}, last {steps} bytes streamed",
        "next byte, beam of 5 covers",
        "bits",
        {arm: [row["bits"] for row in scores[arm]] for arm in scores},
        baseline="beam",
        cost={
            arm: {"tokens a byte": sum(row["tokens"] for row in rows) / len(rows)}
            for arm, rows in scores.items()
        },
    )


def _exactness(bench: Bench, lm: LM) -> None:
    """Cached against fresh at every byte; a model with itself; proxy tuning switched off."""
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
                gap = float((cached.exp() - fresh.exp()).abs().max())
                worst["probability"] = max(worst["probability"], gap)
                worst["nats"] = max(worst["nats"], _gap(cached, fresh))
                task.advance()
        return worst

    gaps = bench.once("cached and fresh", cached_and_fresh)
    bench.check(
        "cached against fresh at every byte: largest difference of the next-byte vector",
        gaps["probability"],
        1e-4 if lm.dtype in (torch.float32, torch.float64) else 0.1,
        "<=",
        "identity",
        f"probabilities; {gaps['nats']:.1e} nats where a byte has more than one in a million",
    )
    vectors = score(ByteReader(lm), [text])[0]
    bench.check(
        "a model mixed with itself: largest difference",
        bench.once(
            "self mix",
            lambda: max(
                _gap(combine.mix(torch.stack([vectors, vectors])), vectors),
                _gap(combine.product(torch.stack([vectors, vectors])), vectors),
            ),
        ),
        1e-5,
        "<=",
        "identity",
    )
    bench.check(
        "proxy tuning with alpha 0: largest difference",
        bench.once(
            "proxy 0",
            lambda: float(
                (combine.proxy(vectors, vectors.roll(1, 0), vectors, 0.0).exp() - vectors.exp())
                .abs()
                .max()
            ),
        ),
        0.0,
        "<=",
        "identity",
    )


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
    from lmsmith.models.known import load_tokenizer

    names = [bench.models[0]]
    if bench.size != "smoke":
        names = ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m"]
    for name in names:
        wrong = bench.once(
            f"pairs {name}",
            lambda name=name: ByteTokens.from_tokenizer(load_tokenizer(name)).self_test(  # type: ignore[misc]
                bench.options["pairs"]
            ),
        )
        bench.check(
            f"{name}: wrong pairs of {bench.options['pairs']:,}", wrong, 0, "==", "the tokenizer"
        )
