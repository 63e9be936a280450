"""Examples as token ids, and which of their tokens count.

Not for: their order and grouping into batches (`batches`), or items to measure on
(`lmsmith.evaluation.items`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmsmith.display.progress import track
from lmsmith.errors import CapabilityError, UsageError
from lmsmith.training.settings import TrainSettings

if TYPE_CHECKING:
    from lmsmith.models import LM

# Examples are encoded this many at a time: the tokenizer works on them in parallel.
_BATCH = 512
_KINDS = ("input_ids", "messages", "prompt", "text")
# A piece of an example: its text or ids, and whether its tokens count.
_Piece = tuple[str | Sequence[int], bool | Sequence[bool]]


@dataclass(frozen=True)
class Tokens:
    """Encoded examples, end to end.

    Attributes:
        ids: `[tokens]`, int32.
        counted: `[tokens]`; whether predicting the token counts. Never the first of an example.
        starts: `[examples + 1]`; where each begins, and the end.
        sources: `[examples]`; the place of each among the examples given.
        skipped: Examples left out for their length.
        truncated: Examples cut to the longest length.
    """

    ids: np.ndarray
    counted: np.ndarray
    starts: np.ndarray
    sources: np.ndarray
    skipped: int = 0
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        piece = slice(self.starts[index], self.starts[index + 1])
        return self.ids[piece], self.counted[piece]

    @property
    def lengths(self) -> np.ndarray:
        """`[examples]`."""
        return np.diff(self.starts)


def load_examples(path: str | Path) -> list[dict[str, Any]]:
    """Read a JSONL file of examples; `encode` says what one is.

    Raises:
        UsageError: No such file, or a line that is no example; the message names the line.
    """
    path = Path(path)
    examples = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    example = json.loads(line)
                except ValueError as error:
                    raise UsageError(f"{path} line {number} is not JSON: {error}") from None
                _kind(example, f"{path} line {number}")
                examples.append(example)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    return examples


def encode(
    examples: Sequence[Mapping[str, Any]],
    settings: TrainSettings,
    lm: LM | None = None,
    max_length: int | None = None,
    vocabulary: int | None = None,
) -> Tokens:
    """Turn examples into token ids.

    An example is a mapping with `text`; or `prompt` and `completion`; or `messages`, a
    conversation in which the assistant's replies count; or `input_ids`, with a `loss_mask` of the
    same length or without, and then all count. Prompt and completion are encoded apart and
    joined, exactly as the model meets them when it generates. Other keys are ignored.

    Args:
        examples: The examples.
        settings: What counts, and what happens to long ones.
        lm: Whose tokenizer and chat template are used; not needed for `input_ids`.
        max_length: Longest example in tokens; no limit when `None`.
        vocabulary: Ids must be below it; unchecked when `None`.

    Raises:
        UsageError: No examples; one of them is malformed, too long or without a token that counts.
        CapabilityError: Text without a tokenizer, messages without a chat template.
    """
    if not len(examples):
        raise UsageError("there are no examples to train on; the data set is empty")
    ids: list[np.ndarray] = []
    counted: list[np.ndarray] = []
    sources: list[int] = []
    skipped = truncated = 0
    for source, (row, counts) in enumerate(_encoded(examples, settings, lm)):
        counts[:1] = False
        _check(row, counts, f"example {source}", vocabulary)
        if max_length is not None and len(row) > max_length:
            if settings.too_long == "error":
                raise UsageError(
                    f"example {source} has {len(row):,} tokens, more than max_length "
                    f"{max_length:,}; raise it, or set too_long to truncate or skip"
                )
            if settings.too_long == "skip" or not counts[:max_length].any():
                skipped += 1
                continue
            truncated += 1
        ids.append(row[:max_length])
        counted.append(counts[:max_length])
        sources.append(source)
    if not ids:
        raise UsageError(f"all {skipped} examples are longer than max_length {max_length}")
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    return Tokens(
        np.concatenate(ids), np.concatenate(counted), starts, np.array(sources), skipped, truncated
    )


def _check(ids: np.ndarray, counted: np.ndarray, where: str, vocabulary: int | None) -> None:
    if not counted.any():
        raise UsageError(
            f"{where} has no token to learn: nothing of it counts, or it is a single token"
        )
    wrong = ids[(ids < 0) | (ids >= (vocabulary or np.inf))]
    if len(wrong):
        limit = "up" if vocabulary is None else f"to {vocabulary - 1}"
        raise UsageError(f"{where} holds the id {wrong[0]}; ids are from 0 {limit}")


def _encoded(
    examples: Sequence[Mapping[str, Any]], settings: TrainSettings, lm: LM | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and what counts of each example, in order."""
    for start in track(range(0, len(examples), _BATCH), "encoding examples", unit="batches"):
        stop = min(start + _BATCH, len(examples))
        pieces = [_pieces(examples[place], place, settings, lm) for place in range(start, stop)]
        texts = list(dict.fromkeys(t for row in pieces for t, _ in row if isinstance(t, str)))
        encoded: dict[str, list[int]] = {}
        if texts:
            assert lm is not None and lm.tokenizer is not None
            found = lm.tokenizer(texts, add_special_tokens=False)["input_ids"]
            encoded = dict(zip(texts, found, strict=True))
        for row in pieces:
            yield _join(row, encoded)


def _join(row: list[_Piece], encoded: Mapping[str, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids: list[int] = []
    counted: list[bool] = []
    for content, counts in row:
        new = encoded[content] if isinstance(content, str) else content
        ids.extend(new)
        counted.extend([counts] * len(new) if isinstance(counts, bool) else counts)
    return np.array(ids, dtype=np.int32), np.array(counted, dtype=bool)


def _kind(example: Any, where: str) -> str:
    if not isinstance(example, Mapping):
        raise UsageError(f"{where} is not an object with named fields")
    for kind in _KINDS:
        if kind in example:
            if kind == "prompt" and "completion" not in example:
                raise UsageError(f"{where} has a prompt but no completion")
            return kind
    raise UsageError(
        f"{where} has none of text, prompt and completion, messages, input_ids; "
        f"it has {', '.join(map(str, example)) or 'nothing'}"
    )


def _pieces(example: Any, place: int, settings: TrainSettings, lm: LM | None) -> list[_Piece]:
    where = f"example {place}"
    kind = _kind(example, where)
    if kind == "input_ids":
        return [_ids(example, where)]
    if lm is None or lm.tokenizer is None:
        raise CapabilityError(f"{where}, which is text,", "a tokenizer", "none", "give input_ids")
    everything = settings.loss_on == "all"
    if kind == "messages":
        return _conversation(example["messages"], where, settings, lm)
    start: list[_Piece] = [([lm.bos_id], False)] if lm.adds_bos and lm.bos_id is not None else []
    end: list[_Piece] = []
    if settings.append_eos and lm.tokenizer.eos_token_id is not None:
        end = [([lm.tokenizer.eos_token_id], True)]
    if kind == "text":
        return [*start, (_text(example, "text", where), True), *end]
    prompt, completion = (_text(example, name, where) for name in ("prompt", "completion"))
    return [*start, (prompt, everything), (completion, True), *end]


def _text(example: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(example[name], str):
        raise UsageError(f"{where}: {name} is {type(example[name]).__name__}, not text")
    return example[name]


def _ids(example: Mapping[str, Any], where: str) -> _Piece:
    found = np.asarray(example["input_ids"])
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UsageError(f"{where}: input_ids are not a list of whole numbers")
    ids = found.astype(np.int32).tolist()
    mask = example.get("loss_mask")
    if mask is None:
        return ids, True
    if len(mask) != len(ids):
        raise UsageError(f"{where} has {len(ids)} input_ids but a loss_mask of {len(mask)}")
    return ids, [bool(counts) for counts in mask]


def _conversation(messages: Any, where: str, settings: TrainSettings, lm: LM) -> list[_Piece]:
    """A conversation cut where replies begin and end, each in the model's chat template.

    A reply counts up to the token that ends its turn; what a template puts behind that (a line
    break) is not the model's to say.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise UsageError(f"{where}: messages are not a list of objects with role and content")
    replies = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not replies:
        raise UsageError(f"{where} has no message of the role assistant to learn from")
    if settings.loss_on == "last":
        replies = replies[-1:]
    whole = _render(lm, messages, where)
    pieces: list[_Piece] = []
    done = 0
    for reply in replies:
        before = _render(lm, messages[:reply], where, ask=True)
        after = whole if reply == len(messages) - 1 else _render(lm, messages[: reply + 1], where)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            raise UsageError(
                f"{where}: the chat template of {lm.name} writes message {reply} differently once "
                "others follow or a reply is asked for; split the conversation, one reply each, "
                "and set loss_on to last"
            )
        pieces.append((whole[done : len(before)], settings.loss_on == "all"))
        pieces.append(_reply(lm, whole[len(before) : len(after)]))
        done = len(after)
    pieces.append((whole[done:], settings.loss_on == "all"))
    return [piece for piece in pieces if len(piece[0])]


def _reply(lm: LM, text: str) -> _Piece:
    ids = lm.encode(text, add_special=False)
    ends = [place for place, token in enumerate(ids) if token in lm.eos_ids]
    until = ends[-1] + 1 if ends else len(ids)
    return ids, [place < until for place in range(len(ids))]


def _render(lm: LM, messages: Sequence[Any], where: str, ask: bool = False) -> str:
    from jinja2 import TemplateError

    if "chat" not in lm.offers:
        raise CapabilityError(f"{where}, a conversation,", "a chat template", "none")
    assert lm.tokenizer is not None
    try:
        return str(
            lm.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=ask, tokenize=False
            )
        )
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{where}: the chat template of {lm.name} does not take these messages: {error}"
        ) from None
