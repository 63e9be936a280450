"""Prompts cut at a random character: what each arm knows of the next byte, and what it costs.

Part of the bench; see `bench.py` for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmsmith.evaluation.items import Item
from lmsmith.evaluation.stats import mean_interval, paired_bootstrap
from lmsmith.evaluation.texts import load_text, passages
from lmsmith.methods.byte_sampler.baselines import BeamCover, arms
from lmsmith.methods.byte_sampler.reader import ByteReader, normalise
from lmsmith.methods.byte_sampler.tree import CoveringTree

if TYPE_CHECKING:
    from lmsmith.evaluation.bench import Bench

ARMS = ("plain", "healing", "byte")
# Characters after a cut, which only tell where the text's own tokens end.
_AFTER = 40


def boundaries(bench: Bench, reader: ByteReader) -> None:
    """Bits of the first byte of the next character, at cuts at random characters."""
    names = bench.options["texts"].split(",")
    bits: dict[str, dict[str, list[float]]] = {}
    whole: dict[str, list[float]] = {arm: [] for arm in ARMS}  # where the text's own token ends
    for name in names:
        items = _cuts(bench, name, bench.options["cuts"], "cuts")
        scores = bench.arms(ARMS, items, lambda batch: _score_cuts(reader, batch), 16, name)
        bits[name] = {arm: [row["bits"] for row in scores[arm]] for arm in ARMS}
        ends = [row["boundary"] for row in scores["byte"]]
        for arm in ARMS:
            whole[arm] += [b for b, end in zip(bits[name][arm], ends, strict=True) if end]
        cost = {
            arm: {"accuracy": sum(row["right"] for row in rows) / len(items)}
            for arm, rows in scores.items()
        }
        cost["byte"]["live nodes"] = sum(row["nodes"] for row in scores["byte"]) / len(items)
        found = bench.table(
            name, "next byte after a cut", "bits", bits[name], baseline="plain", cost=cost
        )
        ratio = found["byte"].ratio
        bench.check(
            f"{name}: bits as a share of plain tokenization's",
            ratio.value if ratio else None,
            0.5,
            "<=",
            "pilot on Qwen2.5-Coder-0.5B: at least half of plain's bits saved",
            _inside(bits[name], ends),
        )
        against = paired_bootstrap(bits[name]["byte"], bits[name]["healing"], "difference")
        bench.check(
            f"{name}: bits minus healing's, low end of the paired interval",
            against.low,
            0.0,
            "<=",
            "pilot: no worse than healing within the paired interval",
            f"difference {against.value:+.3f} [{against.low:+.3f}, {against.high:+.3f}] bits",
        )
    _pooled(bench, {name: bits[name] for name in names if name != "chinese"})
    if whole["byte"]:
        bench.table(
            "cuts where a token of the text ends, all texts",
            "next byte",
            "bits",
            whole,
            baseline="plain",
        )
    _equal_at_ends(bench, reader, names)
    bench.figure(
        "boundary",
        "What a model knows of the next byte after a cut at any character",
        {name: {arm: mean_interval(bits[name][arm]) for arm in ARMS} for name in names},
        y_label="bits of the next byte",
    )


def _pooled(bench: Bench, bits: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Against healing, on the texts whose words are longer than one step back."""
    if not bits:
        return
    byte, healing = (
        [b for each in bits.values() for b in each[arm]] for arm in ("byte", "healing")
    )
    ratio = paired_bootstrap(byte, healing, "ratio")
    bench.check(
        f"{' and '.join(bits)} pooled: bits as a share of healing's",
        ratio.value,
        0.9,
        "<=",
        "pilot: at least 10 % fewer bits than healing",
        f"95 % interval [{ratio.low:.3f}, {ratio.high:.3f}]",
    )


def _inside(bits: Mapping[str, Sequence[float]], ends: Sequence[bool]) -> str:
    """Where the difference comes from: cuts inside a token of the text, apart from the others."""

    def mean(arm: str, wanted: bool) -> float:
        found = [b for b, end in zip(bits[arm], ends, strict=True) if end == wanted]
        return sum(found) / len(found) if found else math.nan

    return (
        f"{1 - sum(ends) / len(ends):.0%} of the cuts are inside a token of the text: "
        f"{mean('plain', False):.2f} to {mean('byte', False):.2f} bits there, "
        f"{mean('plain', True):.2f} to {mean('byte', True):.2f} at the others"
    )


def _cuts(bench: Bench, name: str, count: int, purpose: str) -> list[Item]:
    # A Chinese character carries about as much as three Latin ones.
    before = bench.options["before_chinese" if name == "chinese" else "before"]
    seed = bench.seed_for(purpose, name)
    drawn = passages(load_text(name), before + 1 + _AFTER, count, seed)
    return [
        Item(
            f"{name}-{number}",
            {"prefix": text[:before], "next": text[before], "after": text[before + 1 :]},
        )
        for number, text in enumerate(drawn)
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
        entry: dict[str, dict[str, Any]] = {
            arm: {
                "bits": float(-found[arm][index][target] / math.log(2)),
                "right": int(found[arm][index].argmax()) == target,
            }
            for arm in ARMS
        }
        ids = reader.lm.encode(item["prefix"], add_special=False)
        text = item["prefix"] + item["next"] + item["after"]
        entry["byte"] |= {
            "nodes": len(reader.tree(row).live_nodes()),
            "boundary": reader.lm.encode(text, add_special=False)[: len(ids)] == ids,
        }
        scores.append(entry)
        reader.close(row)
    return scores


def _equal_at_ends(bench: Bench, reader: ByteReader, names: Sequence[str], most: int = 32) -> None:
    """After cuts that no token can reach across, the byte model must be plain tokenization."""
    found: list[Item] = []
    for name in names:
        for item in _cuts(bench, name, 40 * most, "ends"):
            if len(found) == most:
                break
            tree = CoveringTree(reader.tokens)
            tree.push(reader.tokens.normalize(item["prefix"]).encode())
            if tree.trunk and reader.only_end(tree):
                found.append(item)

    def score_ends(batch: list[Item]) -> list[Mapping[str, Any]]:
        rows = _open(reader, batch)
        byte = normalise(reader.next_bytes(rows))
        for row in rows:
            reader.close(row)
        return [
            {"gap": gap(vector, _plain(reader, item["prefix"]))}
            for vector, item in zip(byte, batch, strict=True)
        ]

    gaps = bench.run("only end", found, score_ends, 16, "only end")
    bench.check(
        "equal to plain at cuts where nothing but a token boundary is possible",
        max((row["gap"] for row in gaps), default=None),
        1e-4,
        "<=",
        "identity",
        f"largest difference in nats at {len(found)} cuts, from a forward pass without a Session",
    )


def _plain(reader: ByteReader, prefix: str) -> torch.Tensor:
    """The first byte of the next token after a prompt's tokens, without Session or tree."""
    lm = reader.lm
    ids = torch.tensor([[reader.start_id, *lm.encode(prefix, add_special=False)]])
    with torch.inference_mode():
        logits = lm.model(ids.to(lm.device)).logits[0, -1]
    logprobs = torch.log_softmax(logits.float(), -1)
    masses = reader.buckets.masses(logprobs[None])[0] + reader.buckets.ending(logprobs)
    return normalise(masses.log().cpu())


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference in nats where either gives a byte more than one in a million."""
    likely = torch.maximum(one, other) > math.log(1e-6)
    return float((one - other)[likely].abs().max())


def beam(bench: Bench, reader: ByteReader, width: int = 5, streamed: int = 16) -> None:
    """What a beam over all covers costs for the same next byte."""
    name = bench.options["texts"].split(",")[0]
    items = _cuts(bench, name, bench.options["beam_cuts"], "beam")

    def score_beam(batch: list[Item]) -> list[Mapping[str, Mapping[str, Any]]]:
        return [_stream(reader, item, width, streamed) for item in batch]

    scores = bench.arms(("beam", "byte"), items, score_beam, 1, f"beam {name}")
    bench.table(
        f"{name}, last {streamed} characters streamed",
        f"next byte, beam of {width} covers",
        "bits",
        {arm: [row["bits"] for row in scores[arm]] for arm in scores},
        baseline="beam",
        cost={
            arm: {"tokens a byte": sum(row["tokens"] for row in rows) / len(rows)}
            for arm, rows in scores.items()
        },
    )


def _stream(
    reader: ByteReader, item: Item, width: int, streamed: int
) -> dict[str, dict[str, float]]:
    """Both arms read the same prefix byte by byte, from where its tokens are certain."""
    text = reader.tokens.normalize(item["prefix"])
    head, tail = text[:-streamed].encode(), text[-streamed:].encode()
    target = item["next"].encode()[0]

    row = reader.open([head], start=True)
    tree = reader.tree(row)
    certain = sum(len(reader.tokens.spelling[token] or b"") for token in tree.trunk[1:])
    search = BeamCover(reader, tree.trunk, width)
    for byte in head[certain:]:
        search.push(byte)
    before = search.tokens
    for byte in tail:
        search.push(byte)
    found = {"beam": (search.next_bytes(), search.tokens - before)}
    search.close()

    reader.next_bytes([row])
    before = reader.session.tokens_computed
    for byte in tail:
        reader.push(row, bytes([byte]))
        covering = normalise(reader.next_bytes([row]))[0]
    found["byte"] = (covering, reader.session.tokens_computed - before)
    reader.close(row)
    return {
        arm: {"bits": float(-vector[target] / math.log(2)), "tokens": tokens / len(tail)}
        for arm, (vector, tokens) in found.items()
    }
