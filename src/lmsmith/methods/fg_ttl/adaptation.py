"""The stream: answer a batch, learn from it, go on; and what is kept of it.

    for answer in adapt(lm, ["2 + 2 =", ...], FGTTLConfig(learning_rate=1e-4)):
        print(answer.text)

Not for: what an update does (`learner`), or how collapse is seen (`guard`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import Completion, complete
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.errors import ModelFileError, UsageError
from lmsmith.files import folder_atomic
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.forward import Text
from lmsmith.methods.fg_ttl.guard import repetition, signs, trouble
from lmsmith.methods.fg_ttl.journal import Journal
from lmsmith.methods.fg_ttl.learner import Learner, adapter_hash, new_adapter
from lmsmith.methods.fg_ttl.stream import Item, read_items
from lmsmith.models import LM
from lmsmith.models.adapter import Adapter

_TENSORS, _STATE = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Answer:
    """What became of one stream item.

    Attributes:
        place: The item's place in the stream, from 0.
        id: Its name.
        batch: The batch it was answered in, from 0; learning from batches before it, and from
            no other, shaped the answer.
        text: The answer.
        ids: Its token ids, the end token included.
        prompt_ids: Those of the prompt.
        finish_reason: `stop`, `length`, or `skipped`.
        skipped: Why there is no answer; empty if there is one.
    """

    place: int
    id: str
    batch: int
    text: str = ""
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    finish_reason: str = "skipped"
    skipped: str = ""


class Adaptation:
    """A model that adapts: `predict` a batch, `update` on its answers, and so on.

    The model's own weights never change; `lm.adapter` does.

    Attributes:
        lm: The model, with the adapter attached.
        config: The settings.
        batch: Batches learned from so far.
        learner: What holds the adapter's tensors and the optimizer.
        rollbacks: How often the guard has rolled the adapter back.
    """

    def __init__(
        self,
        lm: LM,
        config: FGTTLConfig | Mapping[str, Any] | None = None,
        *,
        adapter: Adapter | None = None,
        source: Iterable[Any] = (),
    ) -> None:
        """Attach an adapter to the model and begin.

        Args:
            lm: The model.
            config: The settings, or a mapping of them.
            adapter: Begin with this one; a fresh one that changes nothing without.
            source: Prompts from before the shift, which EATA's penalty protects.

        Raises:
            ConfigError: A setting that does not exist or is not allowed.
            UsageError: The model has none of the modules that are to be adapted.
        """
        self.lm, self.config = lm, FGTTLConfig.parse(config)
        own = self.config
        lm.load_adapter(adapter or new_adapter(lm, own))
        texts = [
            Text(item.prompt_ids, len(item.prompt_ids))
            for item in read_items(lm, source, own)
            if not item.skipped
        ]
        self.learner = Learner(lm, own, texts)
        self._start()

    def _start(self) -> None:
        self.batch = self.rollbacks = 0
        self.learner.forget()
        self._good = self.learner.initial  # what the last healthy batch was answered with
        self._unadapted = [0.0, 0.0]  # repetition of the unadapted model: sum, batches
        self._note = ""  # trouble found while predicting, for the log

    def reset(self) -> None:
        """Back to how it began, the optimizer's and the guard's memory included."""
        self.learner.set_weights(self.learner.initial)
        self._start()

    # Predict, then update

    def predict(self, items: Sequence[Item]) -> list[Answer]:
        """Answer items with the adapter as it is; nothing is learned.

        If the guard is on and the answers repeat themselves, the adapter is rolled back and the
        items are answered again before anything is given out.
        """
        ready = [item for item in items if not item.skipped]
        done = self._complete(ready)
        if self.config.guard and ready:
            done = self._without_loops(ready, done)
        found = dict(zip([item.place for item in ready], done, strict=True))
        return [self._answer(item, found.get(item.place)) for item in items]

    def update(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Learn from answers, and roll back if that went wrong.

        Returns:
            The batch's entry of the audit log: prompt and answer tokens, adapter hashes before
            and after, selected positions and loss of every step, the guard's signs, and why the
            adapter was rolled back, if it was.
        """
        began = time.perf_counter()
        kept = [answer for answer in answers if not answer.skipped]
        texts = [Text((*a.prompt_ids, *a.ids), len(a.prompt_ids)) for a in kept]
        before = self.learner.weights()
        seed = self.config.seed * 1_000_003 + self.batch
        steps = self.learner.learn(texts, seed) if texts else []
        found, reason = None, ""
        if self.config.guard and any(step.stepped for step in steps):
            found = signs(self.learner, texts)
            reason = trouble(found, self.config)
        if reason:
            self._roll_back(before)
        note, self._note = self._note, ""
        record = {
            "batch": self.batch,
            "answers": [asdict(answer) for answer in answers],
            "adapter_before": adapter_hash(before),
            "adapter_after": adapter_hash(self.learner.weights()),
            "steps": [asdict(step) for step in steps],
            "signs": asdict(found) if found else None,
            "rolled_back": "; ".join(filter(None, [note, reason])),
            "sar_resets": self.learner.resets,
            "seconds": time.perf_counter() - began,
        }
        self._good = before if not reason else self._good
        self.batch += 1
        return record

    def learn_prompts(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """TLM's offline setting: learn from a whole stream's prompts before any is answered."""
        records = []
        ready = [item for item in items if not item.skipped]
        size = self.config.stream_batch
        for first in range(0, len(ready), size):
            answers = [
                Answer(item.place, item.id, -1, prompt_ids=item.prompt_ids, finish_reason="")
                for item in ready[first : first + size]
            ]
            records.append(self.update(answers))
        self.batch = 0
        return records

    def _complete(self, items: Sequence[Item]) -> list[Completion]:
        requests = [
            Request(
                item.prompt_ids,
                max_tokens=self.config.max_new_tokens,
                sampling=Sampling(self.config.temperature, seed=self.config.seed + item.place),
            )
            for item in items
        ]
        return complete(PlainDecoder(self.lm), requests, max(1, len(requests)))

    def _without_loops(self, items: Sequence[Item], done: list[Completion]) -> list[Completion]:
        """Answers of the newest adapter whose answers do not repeat themselves."""
        current = self.learner.weights()
        for older in (self._good, self.learner.initial):
            unadapted = _same(current, self.learner.initial)
            share = repetition([one.ids for one in done])
            if unadapted:
                self._unadapted[0] += share
                self._unadapted[1] += 1
                break
            usual = self._unadapted[0] / max(1.0, self._unadapted[1])
            if share <= usual + self.config.guard_repetition:
                break
            self._note = (
                f"{share:.0%} of the answers' 4-grams are repeated, {usual:.0%} before learning"
            )
            self._roll_back(older)
            current = older
            done = self._complete(items)
        return done

    def _roll_back(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.learner.set_weights(weights)
        self.learner.optimizer = None  # its momentum points where it went wrong
        self.rollbacks += 1

    def _answer(self, item: Item, done: Completion | None) -> Answer:
        if done is None:
            return Answer(item.place, item.id, self.batch, skipped=item.skipped)
        return Answer(
            item.place,
            item.id,
            self.batch,
            done.text,
            done.ids,
            item.prompt_ids,
            done.trace.finish_reason,
        )

    # Keeping it

    def save(self, folder: str | Path) -> None:
        """Write everything that the next batch depends on; the adapter is a PEFT folder."""
        learner = self.learner
        tensors = {f"initial.{name}": tensor for name, tensor in learner.initial.items()}
        tensors |= {f"good.{name}": tensor for name, tensor in self._good.items()}
        if learner.probabilities is not None:
            tensors["probabilities"] = learner.probabilities
        if self.config.persistent_optimizer and learner.optimizer is not None:
            for name, parameter in learner.parameters.items():
                for key, value in learner.optimizer.state[parameter].items():
                    tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
        state = {
            "batch": self.batch,
            "rollbacks": self.rollbacks,
            "unadapted": self._unadapted,
            "loss_mean": learner.loss_mean,
            "sar_resets": learner.resets,
        }
        with folder_atomic(Path(folder)) as temporary:
            assert self.lm.adapter is not None
            self.lm.adapter.save(temporary)
            # Clones: tensors of one state may share memory, which the format refuses.
            save_file(
                {name: tensor.cpu().clone() for name, tensor in tensors.items()},
                temporary / _TENSORS,
            )
            (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: str | Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            ModelFileError: A file is missing or damaged.
            UsageError: It was saved for another adapter than these settings make.
        """
        folder, learner = Path(folder), self.learner
        saved = dict(Adapter.load(folder).named_parameters())
        try:
            tensors = load_file(folder / _TENSORS)
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelFileError(f"the state in {folder} cannot be read: {error}") from None
        shapes = {name: p.shape for name, p in learner.parameters.items()}
        if {name: p.shape for name, p in saved.items()} != shapes:
            raise UsageError(
                f"{folder} holds an adapter of other modules or another rank than these settings "
                "make; restore it with the settings it was saved with"
            )
        learner.forget()
        learner.set_weights(saved)
        learner.initial = _part(tensors, "initial.", self.lm.device)
        self._good = _part(tensors, "good.", self.lm.device)
        if "probabilities" in tensors:
            learner.probabilities = tensors["probabilities"].to(self.lm.device)
        learner.restore_optimizer(_part(tensors, "optimizer.", self.lm.device))
        learner.loss_mean, learner.resets = state["loss_mean"], state["sar_resets"]
        self.batch, self.rollbacks = state["batch"], state["rollbacks"]
        self._unadapted = state["unadapted"]


def adapt(
    lm: LM,
    stream: Iterable[Any],
    config: FGTTLConfig | Mapping[str, Any] | None = None,
    *,
    adapter: Adapter | None = None,
    source: Iterable[Any] = (),
    chat: bool = False,
    folder: str | Path | None = None,
    on_update: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[Answer]:
    """Answer a stream with a model that learns from it, batch by batch.

    A batch's answers are given out before the model learns from them, so no answer depends on its
    own batch or a later one. An item that is empty, over-long or malformed is given out as skipped.

    Args:
        lm: The model; afterwards its adapter is what was learned.
        stream: Prompts, or mappings with one; see `stream`. Taken as it is needed.
        config: The settings, or a mapping of them.
        adapter: Begin with this one; a fresh one without.
        source: Prompts from before the shift, for EATA.
        chat: Put plain text into the model's chat template.
        folder: Keep the audit log and the adapter here, and go on from there if a run was stopped:
            what was answered before is given out again, not computed again.
        on_update: Called with each batch's entry of the audit log.

    Yields:
        One answer an item, in the stream's order.

    Raises:
        ConfigError: A setting that does not exist or is not allowed.
        UsageError: The model has nothing to adapt, or the folder holds another run.
    """
    state = Adaptation(lm, config, adapter=adapter, source=source)
    items = read_items(lm, stream, state.config, chat)
    return run(state, items, Journal(folder, state) if folder is not None else None, on_update)


def run(
    state: Adaptation,
    items: Iterator[Item],
    journal: Journal | None = None,
    on_update: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[Answer]:
    """The loop of `adapt` over items that are read already."""
    try:
        if state.config.mode == "offline":
            everything = list(items)
            if journal is None or not journal.resumed:
                for record in state.learn_prompts(everything):
                    if on_update is not None:
                        on_update(record)
                if journal is not None:
                    journal.begin()
            items = iter(everything)
        if journal is not None:
            for row in journal.replay(items):
                yield Answer(**row)
        while batch := _next_batch(items, state.config.stream_batch):
            answers = state.predict(batch)
            yield from answers
            if state.config.mode == "offline":
                record = {"batch": state.batch, "answers": [asdict(a) for a in answers]}
                state.batch += 1
            else:
                record = state.update(answers)
            if journal is not None:
                journal.keep(record)
            if on_update is not None:
                on_update(record)
        if journal is not None:
            journal.finish()
    finally:
        if journal is not None:
            journal.close()


def _next_batch(items: Iterator[Item], size: int) -> list[Item]:
    """The next items, of which `size` can be answered, or what is left of the stream."""
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        size -= not item.skipped
        if not size:
            break
    return batch


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _part(
    tensors: Mapping[str, torch.Tensor], prefix: str, device: torch.device
) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): tensor.to(device)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
