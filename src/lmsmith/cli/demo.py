"""`lmsmith demo`: the main job on real input, in a minute."""

from __future__ import annotations

from lmsmith.display.console import show, show_json

# Each ends inside a word, which is where a tokenizer's choice of tokens misleads a model.
PROMPTS = (
    "The capital of Australia is Canb",
    "for i in ran",
    "Water boils at one hundred degrees Cels",
    "The opposite of expensive is inexp",
)


def demo(*, model: str = "smollm2-135m", length: int = 24, json: bool = False) -> None:
    """Show prompts cut inside a word, continued plainly and byte by byte.

    Args:
        model: The model to show it on.
        length: Bytes of each continuation; a third as many tokens for the plain one.
        json: Print one JSON document and nothing else.
    """
    from lmsmith import Sampling, generate, open_model
    from lmsmith.cli.threads import set_threads

    set_threads()
    lm = open_model(model)
    prompts = list(PROMPTS)
    greedy = Sampling(temperature=0.0)
    plain = generate([lm], prompts, sampling=greedy, max_tokens=max(1, length // 3))
    byte = generate([lm], prompts, method="byte-sampler", sampling=greedy, max_tokens=length)
    rows = [
        {"prompt": prompt, "plain": a.text, "byte-sampler": b.text}
        for prompt, a, b in zip(prompts, plain, byte, strict=True)
    ]
    if json:
        show_json({"model": model, "rows": rows})
        return
    from lmsmith.display.tables import Table

    show(
        Table(
            ["prompt, cut inside a word", "plain decoding goes on", "byte-sampler goes on"],
            [
                [row["prompt"], _visible(row["plain"]), _visible(row["byte-sampler"])]
                for row in rows
            ],
            title=f"{model}, greedy",
            styles={"byte-sampler goes on": "best"},
        )
    )


def _visible(text: str) -> str:
    """Text in one line, quoted so that leading spaces are seen."""
    return f"«{text}»".replace("\n", "⏎")
