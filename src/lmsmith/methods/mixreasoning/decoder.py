"""MixReasoning as a Decoder: rows in different modes share every forward pass.

A row's mode is its adapter strength in the Session, which keeps a cache a strength and extends the
one that is entered by the tokens it lacks; a rollback crops both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmsmith.decoding.events import Event, Prompt, Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.decoding.plain import PREFILL_TOKENS
from lmsmith.decoding.rows import RowOutput
from lmsmith.decoding.sampling import generator_for, sample
from lmsmith.decoding.text import TokenText
from lmsmith.errors import CapabilityError, UsageError
from lmsmith.methods.mixreasoning import calibration, criteria
from lmsmith.methods.mixreasoning.config import MixReasoningConfig
from lmsmith.methods.mixreasoning.controller import Controller, Mode

if TYPE_CHECKING:
    from lmsmith.models import LM

KEYWORD_TOKENS = 8  # newest tokens in which keywords are looked for


def make(models: Sequence[LM], config: MixReasoningConfig) -> MixDecoder:
    """The card's decoder entry."""
    return MixDecoder(models[0], config)


@dataclass(frozen=True)
class _Token:
    id: int
    logprob: float
    mode: Mode
    mean: float


@dataclass
class _Row:
    output: RowOutput
    controller: Controller
    pending: list[int]  # tokens not yet fed: the prompt, then always the newest token
    sampling: Sampling
    generator: torch.Generator
    chance: Random
    end_ids: frozenset[int]
    ids: list[int] = field(default_factory=list)  # the answer so far
    held: list[_Token] = field(default_factory=list)  # its newest tokens, not yet let out
    closed: bool = False  # whether `until` has been written
    refilled: int = 0


class MixDecoder:
    """Draws tokens from the base model or from base and adapter, as the controller says.

    An Event's `info` has `mode` (`think` or `concise`) and `confidence`, the mean score when its
    newest token was drawn. A trace's `tokens_discarded` are those that rollbacks dropped; its notes
    have `generated` (kept and discarded), `thinking_share` of the kept tokens, `to_think` and
    `to_concise` (switches), and `refilled` (tokens computed again for the mode entered).

    Attributes:
        lm: The model.
        config: The settings.
        rule: The controller's rule, thresholds resolved.
        session: The Session that the rows live in; a row has the same id here and there.
    """

    def __init__(
        self,
        lm: LM,
        config: MixReasoningConfig | None = None,
        watch: Callable[[Controller], None] | None = None,
    ) -> None:
        """A decoder without rows.

        Args:
            lm: A model with an adapter.
            config: Settings.
            watch: Called with a row's controller after every score.

        Raises:
            CapabilityError: There is no adapter, or its alpha is not one number.
            UsageError: A threshold is open and there is no calibration.
        """
        self.lm = lm
        self.config = config or MixReasoningConfig()
        self.rule = criteria.make_rule(self.config, _calibrations(lm, self.config))
        self._strengths = {
            Mode.THINK: self.config.think_strength,
            Mode.CONCISE: _concise_strength(lm, self.config),
        }
        if lm.adapter is None and any(self._strengths.values()):
            raise CapabilityError("mixreasoning", "an adapter", "none", "give --adapter FOLDER")
        self.session = lm.session()
        self._texts = TokenText(lm.tokenizer)
        self._until = lm.encode(self.config.until, add_special=False) if self.config.until else []
        self._boundaries: dict[int, bool] = {}
        self._watch = watch
        self._rows: dict[int, _Row] = {}

    @property
    def active(self) -> int:
        """Number of rows still at work."""
        return len(self._rows)

    def admit(self, request: Request) -> int:
        """Take a request in; its prompt is computed with the next step.

        Raises:
            UsageError: A prompt that cannot be used, or a setting out of range. Nothing has
                changed then.
        """
        ids = self.lm.prompt_ids(request.prompt)
        row = self.session.add(strength=self._strengths[self.rule.start])
        try:
            room = self.lm.context - len(ids)
            output = RowOutput(row, request, self._texts, self.lm.eos_ids, len(ids), room)
        except UsageError:
            self.session.free(row)
            raise
        budget = int(self.config.generated_budget * output.limit)
        ends = frozenset(request.stop_ids)
        self._rows[row] = _Row(
            output=output,
            controller=Controller(self.rule, output.limit, budget),
            pending=ids,
            sampling=request.sampling,
            generator=generator_for(request.sampling),
            chance=Random(request.sampling.seed),
            end_ids=ends if request.ignore_eos else ends | self.lm.eos_ids,
        )
        return row

    def step(self) -> list[Event]:
        """One forward pass for all rows: each draws a token, or goes back to think."""
        events = [
            self._finished(row, state.output.end("length"))
            for row, state in list(self._rows.items())
            if state.controller.done
        ]
        if not self._rows:
            return events
        rows = list(self._rows.items())
        logits = self._logits(rows)  # [rows, vocabulary]
        drawing: list[int] = []  # places in `rows`
        for place, score in enumerate(criteria.signals(self.config, logits)):
            row, state = rows[place]
            if self._decide(row, state, score):
                drawing.append(place)
        if not drawing:
            return events
        states = [rows[place][1] for place in drawing]
        drawn = sample(
            logits if len(drawing) == len(rows) else logits[drawing],
            [state.sampling for state in states],
            [state.generator for state in states],
        )
        for place, one, logprob in zip(
            drawing, drawn.ids.tolist(), drawn.logprobs.tolist(), strict=True
        ):
            events += self._take(*rows[place], one, logprob)
        return events

    def retire(self, row: int) -> Event | None:
        """Cancel a row and free its caches; its last Event, or `None` if it had ended."""
        if row not in self._rows:
            return None
        return self._finished(row, self._rows[row].output.end("cancelled"))

    def _logits(self, rows: Sequence[tuple[int, _Row]]) -> Tensor:
        """Feed what is pending; logits after each row's last token, `[rows, vocabulary]`."""
        for row, state in rows:
            while len(state.pending) > PREFILL_TOKENS:
                self.session.feed({row: state.pending[:PREFILL_TOKENS]})
                del state.pending[:PREFILL_TOKENS]
                state.output.trace.forward_passes += 1
        step = self.session.feed({row: state.pending for row, state in rows})
        for row, state in rows:
            state.output.trace.forward_passes += 1
            state.refilled += step.caught_up[row]
        return step.logits

    def _decide(self, row: int, state: _Row, score: float) -> bool:
        """Let the controller see a score; whether the row draws from this distribution."""
        controller = state.controller
        mode = controller.mode
        drop = controller.observe(self._score(state, score), self._may_switch(state))
        if self._watch is not None:
            self._watch(controller)
        if controller.mode is not mode:
            self.session.set_strength(row, self._strengths[controller.mode])
        if drop is None:
            return True
        if drop:
            del state.held[-drop:], state.ids[-drop:]
        # The newest token left is fed once more: under the new strength, it is what comes next.
        self.session.crop(row, self.session.length(row) - drop - 1)
        state.pending = state.ids[-1:]
        return False

    def _score(self, state: _Row, signal: float) -> float:
        if self.config.criterion == "random":
            return criteria.chance(state.chance)
        if self.config.criterion == "keywords":
            newest = state.ids[-KEYWORD_TOKENS:]
            before, after = self.lm.decode(newest[:-1]), self.lm.decode(newest)
            return criteria.keyword_score(before, after, self.config.keywords)
        return signal

    def _may_switch(self, state: _Row) -> bool:
        if state.closed:
            return False
        if self.config.criterion != "random" or not self.config.boundary:
            return True
        newest = state.ids[-1] if state.ids else None
        if newest is None:
            return False
        if newest not in self._boundaries:
            self._boundaries[newest] = self.config.boundary in self.lm.decode([newest])
        return self._boundaries[newest]

    def _take(self, row: int, state: _Row, one: int, logprob: float) -> list[Event]:
        """Add a token to a row; Events of what can no longer be dropped."""
        controller = state.controller
        controller.emit()
        state.pending = [one]
        state.ids.append(one)
        state.held.append(_Token(one, logprob, controller.mode, controller.mean))
        if self._until and state.ids[-len(self._until) :] == self._until:
            state.closed = True
        last = controller.done or one in state.end_ids
        ready = len(state.held)
        if not (last or state.closed):
            ready -= controller.retractable
        events: list[Event] = []
        for token in state.held[:ready]:
            info = {"mode": token.mode.value, "confidence": token.mean}
            event = state.output.push((token.id,), (token.logprob,), info)
            if event is not None and event.trace is not None:
                return [*events, self._finished(row, event)]
            if event is not None:
                events.append(event)
        del state.held[:ready]
        return events

    def _finished(self, row: int, event: Event) -> Event:
        """Drop a row that has ended, and put the controller's counts into its trace."""
        state = self._rows.pop(row)
        self.session.free(row)
        controller, trace = state.controller, event.trace
        assert trace is not None
        trace.tokens_discarded = controller.generated - trace.tokens_kept
        trace.notes |= {
            "generated": controller.generated,
            "thinking_share": controller.thought / max(1, controller.kept),
            "to_think": controller.to_think,
            "to_concise": controller.to_concise,
            "refilled": state.refilled,
        }
        return event


def _calibrations(lm: LM, config: MixReasoningConfig) -> dict[str, calibration.Calibration]:
    folder = getattr(lm.adapter, "folder", None)
    if config.calibration:
        path = Path(config.calibration)
        if not path.is_file():
            raise UsageError(f"no file {path} with a calibration")
        return calibration.load(path)
    return calibration.load(folder / calibration.FILE) if folder is not None else {}


def _concise_strength(lm: LM, config: MixReasoningConfig) -> float:
    if config.concise_lora_alpha is None:
        return config.concise_strength
    settings = lm.adapter.settings if lm.adapter is not None else {}
    trained = settings.get("lora_alpha")
    if not trained or settings.get("alpha_pattern"):
        raise CapabilityError(
            "concise_lora_alpha", "one lora_alpha for all modules", "none", "set concise_strength"
        )
    return config.concise_lora_alpha / float(trained)


def window_scores(
    lm: LM,
    prompts: Sequence[Prompt],
    config: MixReasoningConfig,
    sampling: Sampling,
    max_tokens: int = 256,
    batch_size: int = 32,
) -> list[float]:
    """Mean scores of every full window while prompts are answered in concise mode.

    Args:
        lm: A model with an adapter.
        prompts: Prompts; no references are needed.
        config: Criterion, candidates, window and strength.
        sampling: How to draw; with a seed, the prompt at position i gets the seed plus i.
        max_tokens: Longest answer.
        batch_size: Most prompts at once.
    """
    found: list[float] = []

    def watch(controller: Controller) -> None:
        if controller.generated + 1 >= config.window:
            found.append(controller.mean)

    concise = config.model_copy(update={"mode": "concise", "calibration": ""})
    requests = [
        Request(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling
            if sampling.seed is None
            else replace(sampling, seed=(sampling.seed + place) % 2**64),
        )
        for place, prompt in enumerate(prompts)
    ]
    complete(MixDecoder(lm, concise, watch), requests, batch_size)
    return found
