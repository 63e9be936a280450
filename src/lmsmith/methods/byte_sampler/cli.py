"""The verbs of `lmsmith byte-sampler`: score a text, show its covering tree, check a tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from lmsmith.display.console import show, show_facts, show_json
from lmsmith.errors import UsageError

Json = Annotated[bool, Parameter(name="--json", negative=())]

app = App(name="byte-sampler", help="Continue a text at any byte; combine models by their bytes.")


@app.command
def score(
    model: str,
    text: str = "",
    *,
    file: Path | None = None,
    combine: str = "mix",
    alpha: float = 1.0,
    leaves: str = "unfiltered",
    dtype: str = "auto",
    device: str = "auto",
    json: Json = False,
) -> None:
    """Log-probability of a text, a byte at a time.

    Args:
        model: A model, or several joined by `+`, combined as `--combine` says.
        text: The text; `-` reads standard input.
        file: Read the text from a file instead.
        combine: `mix`, `product`, or `proxy` for BASE+EXPERT+ANTIEXPERT.
        alpha: Strength of proxy tuning.
        leaves: `filtered` leaves out token sequences that the tokenizer never writes.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: Such as `cpu` or `cuda:1`; `auto` is the first accelerator.
        json: Print one JSON document.
    """
    import math

    import torch

    from lmsmith.methods.byte_sampler import combine as combiners
    from lmsmith.methods.byte_sampler.config import ByteSamplerConfig
    from lmsmith.methods.byte_sampler.reader import ByteReader
    from lmsmith.methods.byte_sampler.scoring import byte_logprobs
    from lmsmith.methods.byte_sampler.scoring import score as score_texts
    from lmsmith.models import open_model

    ByteSamplerConfig.parse({"combine": combine, "leaves": leaves, "alpha": alpha})
    data = _text(text, file)
    names = model.split("+")
    if combine == "proxy" and len(names) != 3:
        raise UsageError("--combine proxy takes three models: BASE+EXPERT+ANTIEXPERT")
    vectors: list[tuple[str, torch.Tensor]] = []
    for name in names:
        reader = ByteReader(
            open_model(name, dtype=dtype, device=device), filtered=leaves == "filtered"
        )
        vectors.append((name, score_texts(reader, [data])[0]))
    if len(names) > 1:
        each = [vector for _, vector in vectors]
        if combine == "proxy":
            vectors.append((combine, combiners.proxy(each[0], each[1], each[2], alpha)))
        else:
            vectors.append((combine, getattr(combiners, combine)(torch.stack(each))))
    found: list[dict[str, Any]] = []
    for name, vector in vectors:
        values = byte_logprobs(vector, data)
        found.append(
            {
                "model": name,
                "bytes": len(data),
                "logprob_nats": float(values.sum()),
                "bits_per_byte": float(-values.mean() / math.log(2)),
                "byte_logprobs": values.tolist(),
            }
        )
    if json:
        show_json(found)
        return
    from lmsmith.display.tables import Table

    show(
        Table(
            ["model", "bytes", "log-probability (nats)", "bits a byte"],
            [[r["model"], r["bytes"], r["logprob_nats"], r["bits_per_byte"]] for r in found],
            "Log-probability, a byte at a time",
        )
    )


@app.command
def tree(
    model: str,
    text: str = "",
    *,
    file: Path | None = None,
    json: Json = False,
) -> None:
    """The covering tree of a text: which token sequences may go on from its end.

    Args:
        model: A model; only its tokenizer is used.
        text: The text; `-` reads standard input.
        file: Read the text from a file instead.
        json: Print one JSON document.
    """
    from lmsmith.methods.byte_sampler.tree import CoveringTree
    from lmsmith.methods.byte_sampler.vocabulary import ByteTokens
    from lmsmith.models import load_tokenizer

    tokens = ByteTokens.from_tokenizer(load_tokenizer(model))
    covering = CoveringTree(tokens)
    covering.push(_text(text, file))
    rows: list[dict[str, Any]] = []
    for head in covering.heads():
        path, node = [], head.node
        while node is not covering.root and node.parent is not None:
            path.append(node.token)
            node = node.parent
        low, high = tokens.range(head.walked)
        rows.append(
            {
                "branch": [_spell(tokens, token) for token in reversed(path)],
                "walked": head.walked.decode("utf-8", "backslashreplace"),
                "tokens": int(high - low),
            }
        )
    trunk = [_spell(tokens, token) for token in covering.trunk]
    if json:
        show_json({"trunk": trunk, "heads": rows})
        return
    from lmsmith.display.tables import Table

    show_facts({"trunk": " | ".join(trunk) or "nothing is certain yet"})
    show(
        Table(
            ["after the trunk", "begun token", "tokens that fit"],
            [
                [" | ".join(row["branch"]) or "(nothing)", row["walked"] or "(none)", row["tokens"]]
                for row in rows
            ],
            "Where the text may go on",
        ),
    )


@app.command
def check(model: str, *, pairs: int = 20_000, json: Json = False) -> None:
    """Whether a model's tokenizer can be read as bytes, and a self-test of it.

    Args:
        model: A model; only its tokenizer is used.
        pairs: Adjacent token pairs to compare with the tokenizer itself.
        json: Print one JSON document.
    """
    from lmsmith.methods.byte_sampler.vocabulary import ByteTokens
    from lmsmith.models import load_tokenizer

    tokens = ByteTokens.from_tokenizer(load_tokenizer(model))
    wrong = tokens.self_test(pairs)
    found = {
        "kind": tokens.kind,
        "tokens": tokens.size,
        "special": len(tokens.special_ids),
        "proper merges": tokens.proper,
        "pairs decided by": "the tokenizer" if tokens.reencode else "its merges",
        "pairs tested": pairs,
        "wrong pairs": wrong,
    }
    if json:
        show_json(found)
    else:
        show_facts(found)
    if wrong:
        raise UsageError(f"{wrong} of {pairs} pairs differ from the tokenizer; report this")


def _text(text: str, file: Path | None) -> bytes:
    if file is not None:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
    elif text == "-":
        data = sys.stdin.buffer.read()
    else:
        # Half a character on the command line arrives with surrogates in its place.
        data = text.encode("utf-8", "surrogateescape")
    if not data:
        raise UsageError("the text is empty; give one, or a --file")
    return data


def _spell(tokens: Any, token: int) -> str:
    data = tokens.spelling[token] or tokens.added.get(token) or f"<{token}>".encode()
    return data.decode("utf-8", "backslashreplace")
