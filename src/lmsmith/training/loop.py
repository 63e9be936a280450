"""One optimizer step after another: forward passes, gradient, clipping, update.

Not for: examples, folders, evaluation (`run`). Use a `Loop` alone where a method decides itself
what each step sees.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from lmsmith.errors import CapabilityError, TrainingError
from lmsmith.models.adapter import Adapter
from lmsmith.models.opening import resolve_dtype
from lmsmith.training.attention import same_when_recomputed
from lmsmith.training.batches import Batch
from lmsmith.training.loss import Loss, LossFunction, NextTokenLoss
from lmsmith.training.schedule import learning_rate
from lmsmith.training.settings import TrainSettings

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Step:
    """What an optimizer step came to.

    Attributes:
        step: Its number, from 1.
        loss: Mean over all that counted, before the update.
        gradient_norm: Of the mean loss, before clipping.
        learning_rate: That the update used.
        weight: What counted, over all processes: as a rule tokens.
        tokens: Tokens that went through the model, over all processes.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    weight: float
    tokens: int


class Loop:
    """A model, its optimizer and its loss, on as many processes as were launched.

    Attributes:
        model: The model.
        trained: What is trained: the model, or the adapter.
        optimizer: Its optimizer.
        done: Steps done.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainSettings,
        total: int,
        *,
        adapter: Adapter | None = None,
        loss: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        """Prepare a model.

        Args:
            model: What computes; its weights are frozen when there is an adapter.
            settings: Rate, precision, clipping.
            total: Steps in all, which the schedule needs.
            adapter: Train it instead of the model; it must be attached.
            loss: The loss; the next token's by default.
            optimizer: Makes an optimizer from parameter groups; AdamW by default.
        """
        self.model, self.settings, self.total, self.done = model, settings, total, 0
        self.trained: nn.Module = model if adapter is None else adapter
        if adapter is not None:
            model.requires_grad_(False)
        else:
            _full_precision(model)
        # What the caller froze stays frozen, unless that is everything.
        if not any(parameter.requires_grad for parameter in self.trained.parameters()):
            self.trained.requires_grad_(True)
        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            model.to(self.accelerator.device)
            self.trained.to(self.accelerator.device)
        self.device = next(model.parameters()).device
        self.parameters = [p for p in self.trained.parameters() if p.requires_grad]
        if settings.gradient_checkpointing:
            _checkpoint_gradients(model)
        pass_ = _Pass(model, adapter, loss or NextTokenLoss(model, settings.logits_chunk))
        self.optimizer = (optimizer or partial(adamw, settings=settings))(
            _groups(self.trained, settings)
        )
        self._pass: nn.Module = pass_
        if self.accelerator.num_processes > 1:
            self._pass = self.accelerator.prepare(pass_)
        self._precision = _autocast(settings, self.device)

    def step(self, batches: Sequence[Batch]) -> Step:
        """Take one step on the mean loss over all of these batches, on all processes.

        Args:
            batches: One a forward pass of this process; every process gives as many.

        Raises:
            TrainingError: The loss or its gradient is not a number; nothing was updated.
        """
        rate = learning_rate(self.done, self.total, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("rate_factor", 1.0)
        self._seed(self.done)
        self._pass.train()
        self.trained.train()
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(3, dtype=torch.float64)
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with nullcontext() if last else self.accelerator.no_sync(self._pass):
                with self._precision():
                    found = self._pass(batch.to(self.device))
                self.accelerator.backward(found.total)
            sums += torch.tensor([float(found.total.detach()), found.weight, len(batch.ids)])
        sums = self._over_processes(sums)
        loss, weight, tokens = sums.tolist()
        loss /= weight or 1.0
        norm = self._scale_gradient(weight)
        if not math.isfinite(loss) or not math.isfinite(norm):
            what = "loss" if not math.isfinite(loss) else "gradient"
            value = loss if what == "loss" else norm
            examples = sorted({example for batch in batches for example in batch.examples})
            raise TrainingError(
                f"the {what} is {value} at step {self.done + 1} (examples "
                f"{', '.join(map(str, examples[:16]))}{', ...' if len(examples) > 16 else ''}); "
                "lower learning_rate or look at these examples; the step was not taken"
            )
        if weight:
            self.optimizer.step()
        self.done += 1
        return Step(self.done, loss, norm, rate, weight, int(tokens))

    @torch.no_grad()
    def mean_loss(self, batches: Iterable[Batch]) -> float:
        """Mean loss over all these batches and processes, in evaluation mode."""
        module = getattr(self._pass, "module", self._pass)
        module.eval()
        self.trained.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            with self._precision():
                found = module(batch.to(self.device))
            sums += torch.tensor([float(found.total), found.weight])
        total, weight = self._over_processes(sums).tolist()
        return total / weight if weight else math.nan

    def _scale_gradient(self, weight: float) -> float:
        """Make the gradient that of the mean loss and clip it; its norm before clipping."""
        # Processes average their gradients, but the sum is wanted.
        factor = self.accelerator.num_processes / (weight or 1.0)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return 0.0
        norm = float(torch.nn.utils.get_total_norm(gradients)) * factor
        clip = self.settings.clip
        if clip is not None and norm > clip:
            factor *= clip / norm
        torch._foreach_mul_(gradients, factor)
        return norm

    def _over_processes(self, sums: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return sums
        return self.accelerator.reduce(sums.to(self.accelerator.device), "sum").cpu()

    def _seed(self, step: int) -> None:
        """Random numbers of this seed, step and process, which a resumed run draws again."""
        words = np.random.SeedSequence([self.settings.seed, step, self.accelerator.process_index])
        seed = int(words.generate_state(1, np.uint64)[0])
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


class _Pass(nn.Module):
    """A forward pass as one module, so that what wraps a module sees all of it."""

    def __init__(self, model: nn.Module, adapter: Adapter | None, loss: LossFunction) -> None:
        super().__init__()
        self.model, self.adapter, self.loss = model, adapter, loss

    def forward(self, batch: Batch) -> Loss:
        with nullcontext() if self.adapter is None else self.adapter.at(1.0):
            return self.loss(self.model, batch)


def adamw(groups: list[dict[str, Any]], settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with the run's settings."""
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas}
    return torch.optim.AdamW(groups, eps=settings.epsilon, fused=True, **options)


def _groups(module: nn.Module, settings: TrainSettings) -> list[dict[str, Any]]:
    """Parameters with weight decay and without: biases and norms have one dimension."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _full_precision(model: nn.Module) -> None:
    """Weights in float32: an update in bfloat16 smaller than 1/256 of a weight would be lost."""
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _autocast(settings: TrainSettings, device: torch.device) -> Callable[[], Any]:
    precision: Any = settings.precision
    dtype = resolve_dtype(precision, device)
    return partial(
        torch.autocast, device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16
    )


def _checkpoint_gradients(model: Any) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise CapabilityError("gradient_checkpointing", "a model that supports it", "none")
    config = model.config.get_text_config()
    options = {"use_reentrant": False, "context_fn": partial(same_when_recomputed, config)}
    # Its name from transformers 5.24 on; the old one warns.
    model.activation_checkpointing_enable(options)


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Leave the caller's random numbers as they are."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
