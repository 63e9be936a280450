"""One update of the adapter: from answered texts to optimizer steps.

Not for: when to update (`adapt`), or whether to keep what came out (`guard`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmsmith.methods.fg_ttl import objectives
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.forward import Rows, Text, over_positions, read
from lmsmith.methods.fg_ttl.targets import Target, choose, weigh
from lmsmith.models import LM
from lmsmith.models.adapter import Adapter

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Learned:
    """What one optimizer step did.

    Attributes:
        texts: Places of the step's texts in the batch.
        positions: Selected positions of each, counted from the start of its prompt.
        loss: Nats; none when nothing was selected.
        gradient: Norm of the gradient before clipping.
        stepped: Whether the optimizer stepped.
    """

    texts: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]
    loss: float | None
    gradient: float
    stepped: bool


class Learner:
    """The adapter that learns, its optimizer, and what objectives remember between steps.

    Attributes:
        lm: The model; only its adapter changes.
        config: The settings.
        initial: The adapter's tensors before anything was learned.
        probabilities: EATA's running mean of distributions, `[vocabulary]`.
        loss_mean: SAR's running mean of its loss, nats.
        resets: How often SAR started over.
    """

    def __init__(self, lm: LM, config: FGTTLConfig, source: Sequence[Text] = ()) -> None:
        """Learn with the adapter that is attached to the model.

        Args:
            lm: The model.
            config: The settings.
            source: Texts from before the shift; with them EATA holds on to what mattered there.
        """
        assert lm.adapter is not None, "attach an adapter first"
        self.lm, self.config = lm, config
        self.parameters = dict(lm.adapter.named_parameters())
        for parameter in self.parameters.values():
            # Steps of 1e-5 are lost in sixteen bits.
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        self.initial = self.weights()
        self.fisher = self._fisher(source) if source and config.objective == "eata" else {}
        self.forget()

    # The adapter's tensors

    def weights(self) -> dict[str, Tensor]:
        """A copy of the adapter's tensors, by name."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def set_weights(self, weights: Weights) -> None:
        """Put tensors back in place."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def forget(self) -> None:
        """Start over with everything but the weights."""
        self.optimizer: torch.optim.Optimizer | None = None
        self.probabilities: Tensor | None = None
        self.loss_mean: float | None = None
        self.resets = 0

    @contextmanager
    def at(self, weights: Weights) -> Iterator[None]:
        """The adapter with other tensors, within the context."""
        mine = self.weights()
        self.set_weights(weights)
        try:
            yield
        finally:
            self.set_weights(mine)

    # Learning

    def learn(self, texts: Sequence[Text], seed: int) -> list[Learned]:
        """One batch: an optimizer step a micro-batch, in an order that the seed decides.

        Args:
            texts: Answered prompts.
            seed: Of the order and of random positions.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.optimizer is None or not self.config.persistent_optimizer:
            self.optimizer = self._new_optimizer()
        done = []
        for _ in range(self.config.epochs):
            order = list(range(len(texts)))
            if self.config.shuffle:
                order = torch.randperm(len(texts), generator=generator).tolist()
            for first in range(0, len(order), self.config.micro_batch):
                places = tuple(order[first : first + self.config.micro_batch])
                done.append(self._step(places, [texts[place] for place in places], generator))
        return done

    def _step(
        self, places: tuple[int, ...], texts: Sequence[Text], generator: torch.Generator
    ) -> Learned:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        loss, positions = self.backward(texts, generator)
        if loss is None and self.config.step_on_nothing:
            for parameter in self.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
        limit = self.config.clip or torch.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        # A step along something that is no number would end the adapter.
        steps = (loss is not None or self.config.step_on_nothing) and norm - norm == 0
        if steps:
            self.optimizer.step()
            self._recover()
        return Learned(places, positions, loss, norm, steps)

    def backward(
        self, texts: Sequence[Text], generator: torch.Generator
    ) -> tuple[float | None, tuple[tuple[int, ...], ...]]:
        """Put the gradient of the objective into the adapter's parameters.

        Args:
            texts: The texts of one step.
            generator: Draws the random positions.

        Returns:
            The loss in nats, none when nothing was selected, and the selected positions of each
            text.
        """
        if self.config.objective == "tlm":
            loss, positions = self._prompt_loss(texts)
        else:
            rows = read(self.lm, texts)
            target = self._target(rows, generator)
            positions = tuple(tuple(row.nonzero()[:, 0].tolist()) for row in target.mask.unbind())
            loss = self._loss(rows, target) if len(target.weights) else None
            if loss is not None and self.config.objective == "sar":
                loss = self._sharp_loss(loss, texts, target)
        if loss is None:
            return None, positions
        loss.backward()
        return float(loss.detach()), positions

    def _loss(self, rows: Rows, target: Target) -> Tensor:
        loss = (target.weights * self._uncertainty(rows, target)).sum()
        for name, importance in self.fisher.items():
            moved = self.parameters[name] - self.initial[name]
            loss = loss + self.config.fisher_alpha * (importance * moved.square()).sum()
        return loss

    def _target(self, rows: Rows, generator: torch.Generator) -> Target:
        vocabulary = self.lm.vocabulary
        entropy = self.entropies(rows)
        target = choose(entropy, rows.starts, rows.lengths, self.config, vocabulary, generator)
        if self.config.objective == "eata" and target.mask.any():
            new = self._new_to_eata(rows, target.mask)
            target = weigh(new, entropy, None, self.config, vocabulary)
        return target

    @torch.no_grad()
    def entropies(self, rows: Rows) -> Tensor:
        """Entropy of every position as the settings align it, `[rows, positions]` in nats."""
        places = torch.arange(rows.ids.shape[1], device=rows.ids.device)
        real = places < rows.lengths[:, None]
        found = torch.zeros(rows.ids.shape, device=rows.ids.device)
        found[real] = over_positions(
            self.lm, rows.hidden[real], objectives.entropy, chunk=self.config.logits_chunk
        )
        if self.config.align == "before":
            # Nothing produced the first token; its own successor's entropy stands in.
            found = torch.cat([found[:, :1], found[:, :-1]], dim=1)
        return found

    def _hidden(self, rows: Rows, mask: Tensor) -> Tensor:
        """States whose distributions belong to the selected positions, `[S, width]`."""
        row, position = mask.nonzero(as_tuple=True)
        if self.config.align == "before":
            position = (position - 1).clamp_min(0)
        return rows.hidden[row, position]

    def _uncertainty(self, rows: Rows, target: Target) -> Tensor:
        """What is minimised at each selected position, `[S]`."""
        hidden, chunk = self._hidden(rows, target.mask), self.config.logits_chunk
        if self.config.objective == "come":
            mass = self.config.come_mass or float(self.lm.vocabulary)
            return over_positions(
                self.lm, hidden, lambda z: objectives.opinion_entropy(z, mass), chunk=chunk
            )
        return over_positions(self.lm, hidden, objectives.entropy, target.temperatures, chunk=chunk)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.parameters.values()
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.config.learning_rate)
        return torch.optim.AdamW(parameters, lr=self.config.learning_rate, weight_decay=0.0)

    def restore_optimizer(self, tensors: Weights) -> None:
        """Put back a persistent optimizer's state: tensors named `<what>.<parameter>`."""
        if not tensors:
            return
        self.optimizer = self._new_optimizer()
        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = {
                key.removesuffix(f".{name}"): tensor
                for key, tensor in tensors.items()
                if key.endswith(f".{name}")
            }

    # The relatives

    def _prompt_loss(
        self, texts: Sequence[Text]
    ) -> tuple[Tensor | None, tuple[tuple[int, ...], ...]]:
        """TLM: the perplexity of hard prompts."""
        prompts = [Text(text.ids[: text.start], text.start) for text in texts]
        rows = read(self.lm, prompts)
        surprises = []
        for row, prompt in enumerate(prompts):
            hidden, targets = rows.hidden[row, : prompt.start - 1], rows.ids[row, 1 : prompt.start]
            surprise = over_positions(
                self.lm, hidden, objectives.cross_entropy, targets, chunk=self.config.logits_chunk
            )
            surprises.append(surprise.mean())  # not a number, so never hard, for a lone token
        perplexities = torch.stack(surprises)
        threshold, scale = self.config.tlm_threshold, self.config.tlm_scale
        hard = (perplexities > threshold).tolist()
        positions = tuple(
            tuple(range(1, prompt.start)) if learns else ()
            for prompt, learns in zip(prompts, hard, strict=True)
        )
        return objectives.tlm_loss(perplexities, threshold, scale), positions

    @torch.no_grad()
    def _new_to_eata(self, rows: Rows, mask: Tensor) -> Tensor:
        """EATA's second filter: positions whose distributions differ from the running mean."""
        hidden, chunk = self._hidden(rows, mask), self.config.logits_chunk
        new = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        mean = self.probabilities
        if mean is not None:
            likeness = over_positions(
                self.lm,
                hidden,
                lambda z: torch.cosine_similarity(mean[None], z.float().softmax(-1), dim=-1),
                chunk=chunk,
            )
            new = likeness.abs() < self.config.eata_redundancy
        kept = mask.clone()
        kept[mask] = new
        if new.any():
            total = torch.zeros(self.lm.vocabulary, device=hidden.device)

            def add(logits: Tensor) -> Tensor:
                total.add_(logits.float().softmax(-1).sum(0))
                return logits[:, 0]

            over_positions(self.lm, hidden[new], add, chunk=chunk)
            self.probabilities = objectives.fading_mean(mean, total / int(new.sum()))
        return kept

    def _sharp_loss(self, loss: Tensor, texts: Sequence[Text], target: Target) -> Tensor | None:
        """SAR's loss at the sharpest point nearby; none when nothing is reliable there.

        Its gradient there is the one that the optimizer gets here (sharpness-aware minimisation),
        so the adapter's tensors change between the two passes, and back before this returns.
        """
        here = self.weights()
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        step = self.config.sar_rho / (norm + 1e-12)
        there = {
            name: here[name] + gradient * step
            for name, gradient in zip(here, gradients, strict=True)
        }
        margin = self.config.sar_margin or objectives.sar_margin(self.lm.vocabulary)
        with self.at(there):
            uncertainty = self._uncertainty(read(self.lm, texts), target)
            reliable = uncertainty.detach() < margin
            if not reliable.any():
                return None
            sharp = uncertainty[reliable].mean()
            found = torch.autograd.grad(sharp, list(self.parameters.values()))
        self.loss_mean = objectives.fading_mean(self.loss_mean, float(sharp.detach()))
        # A loss of the same value whose gradient here is the one found there.
        linear = sum(
            (parameter * gradient).sum()
            for parameter, gradient in zip(self.parameters.values(), found, strict=True)
        )
        return sharp.detach() + linear - linear.detach()  # type: ignore[union-attr]

    def _recover(self) -> None:
        """SAR starts over when its running loss says that the model has collapsed."""
        if self.loss_mean is not None and self.loss_mean < self.config.sar_reset:
            self.set_weights(self.initial)
            resets = self.resets + 1
            self.forget()
            self.resets = resets
            self.optimizer = self._new_optimizer()

    def _fisher(self, source: Sequence[Text]) -> dict[str, Tensor]:
        """EATA's importance of each weight: mean squared gradient on the model's own labels."""
        total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for text in source:
            rows = read(self.lm, [text])
            surprise = over_positions(
                self.lm,
                rows.hidden[0],
                lambda z: objectives.cross_entropy(z, z.argmax(-1)),
                chunk=self.config.logits_chunk,
            ).mean()
            gradients = torch.autograd.grad(surprise, list(self.parameters.values()))
            for name, gradient in zip(total, gradients, strict=True):
                total[name] += gradient.square() / len(source)
        return total


def new_adapter(lm: LM, config: FGTTLConfig) -> Adapter:
    """An adapter that changes nothing yet: A drawn as PEFT does, B zero.

    Raises:
        UsageError: The model has none of the modules that the settings name.
    """
    return Adapter.fresh(lm.model, config.targets, config.rank, config.seed, config.lora_alpha)


def adapter_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name, to name an adapter's state in a log."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor: Any = weights[name].detach().float().cpu().contiguous()
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
