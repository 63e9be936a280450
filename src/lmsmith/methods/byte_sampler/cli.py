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
    json: Json = False,
) -> None:
    """Log-probability of a text, a byte at a time.

    Args:
        model: A model, or several joined by `+`, combined as `--combine` says.
        text: The text; `-` reads standard input.
        file: Read the text from a file instead.
        combine: `mix` or `product`, for several models.
        json: Print one JSON document.
    """
    import math

    import torch

    from lmsmith.errors import UnknownNameError
    from lmsmith.methods.byte_sampler import combine as combiners
    from lmsmith.methods.byte_sampler.reader import ByteReader
    from lmsmith.methods.byte_sampler.scoring import byte_logprobs
    from lmsmith.methods.byte_sampler.scoring import score as score_texts
    from lmsmith.models import open_model

    if combine not in ("mix", "product"):
        raise UnknownNameError("way to combine", combine, ["mix", "product"])
    data = _text(text, file)
    each = {}
    for name in model.split("+"):
        reader = ByteReader(open_model(name))
        each[name] = score_texts(reader, [data])[0]
    vectors = dict(each)
    if len(each) > 1:
        vectors[combine] = getattr(combiners, combine)(torch.stack(list(each.values())))
    rows = {name: byte_logprobs(vector, data) for name, vector in vectors.items()}
    summary = {
        name: {
            "bytes": len(data),
            "logprob_nats": float(values.sum()),
            "bits_per_byte": float(-values.mean() / math.log(2)),
        }
        for name, values in rows.items()
    }
    if json:
        for name, values in rows.items():
            summary[name]["byte_logprobs"] = values.tolist()  # type: ignore[assignment]
        show_json(summary)
        return
    from lmsmith.display.tables import Table

    show(
        Table(
            ["model", "bytes", "log-probability (nats)", "bits a byte"],
            [
                [name, row["bytes"], row["logprob_nats"], row["bits_per_byte"]]
                for name, row in summary.items()
            ],
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
        data = text.encode()
    if not data:
        raise UsageError("the text is empty; give one, or a --file")
    return data


def _spell(tokens: Any, token: int) -> str:
    data = tokens.spelling[token] or tokens.added.get(token) or f"<{token}>".encode()
    return data.decode("utf-8", "backslashreplace")
