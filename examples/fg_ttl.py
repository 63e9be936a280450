"""A model that adapts while it answers, what it learned from, and how to take that back.

Run it with: python examples/fg_ttl.py
"""

import lmsmith
from lmsmith.methods.fg_ttl import adapt, small

QUESTIONS = [
    "Ann has 7 apples and buys 5 more. How many apples does she have?",
    "A box holds 12 pencils. How many pencils do 3 boxes hold?",
    "",  # what cannot be answered is skipped, with the reason
    "Ben had 20 stamps and gave away 8. How many stamps are left?",
    "There are 6 rows of 4 chairs. How many chairs are there?",
]


def main() -> None:
    """Answer the questions in batches of two, learning from each batch before the next."""
    lm = lmsmith.open_model("smollm2-135m")
    settings = small().record() | {"stream_batch": 2, "max_new_tokens": 48}
    log: list[dict] = []
    for answer in adapt(lm, QUESTIONS, settings, chat=True, on_update=log.append):
        print(f"[{answer.id}] {answer.skipped or answer.text.strip()}")  # noqa: T201
    for record in log:
        learned = sum(len(p) for step in record["steps"] for p in step["positions"])
        state = record["rolled_back"] or "kept"
        print(f"batch {record['batch']}: learned from {learned} tokens, {state}")  # noqa: T201
    lm.adapter.save("adapted")  # a PEFT folder; open_model(..., adapter="adapted") goes on with it


if __name__ == "__main__":
    main()
