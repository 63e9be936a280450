"""A training run from examples to a trained model, with its folder.

    lm = open_model("smollm2-135m")
    train(lm, "questions.jsonl", {"tune": "lora", "learning_rate": 2e-4}, out="runs/concise")

The folder holds `config.json` (what identifies the run), `log.jsonl` (a line a step),
`checkpoints/`, and at the end `model/` or `adapter/` and `result.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from lmsmith.display.progress import progress
from lmsmith.errors import InterruptedRunError, UsageError
from lmsmith.models.adapter import Adapter
from lmsmith.models.lm import LM
from lmsmith.training.batches import Batch, Order, collate, pack, share_out
from lmsmith.training.data import Tokens, encode, load_examples
from lmsmith.training.folder import TrainFolder
from lmsmith.training.loop import Loop, OptimizerFactory, own_random_numbers
from lmsmith.training.loss import LossFunction
from lmsmith.training.settings import TrainSettings

# Settings that have no effect on what is trained.
_FREE = ("checkpoint_every", "keep")

Examples = Sequence[Mapping[str, Any]] | str | Path


@dataclass(frozen=True)
class Trained:
    """What a run came to.

    Attributes:
        steps: Optimizer steps.
        log: One mapping a step: `step`, `loss`, `gradient_norm`, `learning_rate`, `tokens`,
            `seconds`, and `held_out` where it was measured.
        tokens: Tokens that went through the model, over all processes.
        skipped: Examples left out for their length.
        truncated: Examples cut to `max_length`.
        held_out: Mean loss on the held-out examples at the end, nats a token.
        folder: The run's folder.
        adapter: The trained adapter, attached to the model.
    """

    steps: int
    log: list[dict[str, Any]] = field(repr=False)
    tokens: int
    skipped: int
    truncated: int
    held_out: float | None = None
    folder: Path | None = None
    adapter: Adapter | None = field(default=None, repr=False)


def train(
    model: LM | nn.Module,
    examples: Examples,
    settings: TrainSettings | Mapping[str, Any] | None = None,
    *,
    held_out: Examples | None = None,
    out: str | Path | None = None,
    loss: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Trained:
    """Train a model, or a LoRA adapter for it, on examples.

    The model is trained in place and left as it was found: its dtype, its mode, and without
    gradients. A folder given as `out` makes the run resumable: the same call goes on from the
    newest checkpoint, to the same bits on a CPU, and returns at once when the run is finished.
    Under `accelerate launch` every process makes this same call.

    Args:
        model: An open model, or any causal module that maps ids `[examples, length]` to logits
            `[examples, length, vocabulary]` (with another `loss`, any module).
        examples: A list or data set of examples, as `lmsmith.training.data.encode` takes them, or
            a JSONL file.
        settings: What to train, and how.
        held_out: Examples to evaluate on.
        out: Folder of the run; without it nothing is written.
        loss: Another loss than the next token's.
        optimizer: Makes another optimizer than AdamW from parameter groups.

    Raises:
        UsageError: Wrong settings or examples, or a folder that holds another run.
        CapabilityError: The model lacks what the examples or settings need.
        TrainingError: The loss is not a number.
        InterruptedRunError: Ctrl-C; the folder keeps what the newest checkpoint holds.
        StorageError: The folder cannot be written.
    """
    settings = TrainSettings.parse(settings)
    lm = model if isinstance(model, LM) else None
    module: nn.Module = model.model if isinstance(model, LM) else model
    tokens = _tokens(examples, settings, lm)
    test = None if held_out is None else _tokens(held_out, settings, lm)
    plan = _Plan(tokens, settings)
    main = Accelerator().is_main_process
    with ExitStack() as stack:
        stack.enter_context(own_random_numbers())
        folder = None
        if out is not None:
            config = {
                "settings": _identity(settings),
                "model": _name(model),
                "data": _print(tokens),
            }
            folder = stack.enter_context(TrainFolder(Path(out), config, main))
        Accelerator().wait_for_everyone()
        adapter = _adapter(lm, module, settings) if settings.tune == "lora" else None
        if adapter is not None:
            stack.callback(adapter.eval)
        with _as_found(module):
            loop = Loop(
                module, settings, plan.steps, adapter=adapter, loss=loss, optimizer=optimizer
            )
            run = _Run(loop, plan, tokens, test, folder, lm, adapter)
            run.go()
        result = run.result()
        if folder is not None and main and not folder.finished:
            folder.finish(lm, loop.trained, adapter, _summary(result))
        Accelerator().wait_for_everyone()
        return result


class _Plan:
    """Which examples each step sees: a function of the step."""

    def __init__(self, tokens: Tokens, settings: TrainSettings) -> None:
        self.settings = settings
        self.lengths = tokens.lengths.tolist()
        self.units = [[place] for place in range(len(tokens))]
        if settings.packing:
            self.units = pack(self.lengths, settings.max_length or max(self.lengths))
        self.order = Order(len(self.units), settings.seed, settings.shuffle)
        # The last step may be a smaller one.
        self.places = math.ceil(settings.epochs * len(self.units))
        if settings.steps is not None:
            self.places = settings.steps * settings.batch_size
        self.steps = math.ceil(self.places / settings.batch_size)

    def members(self, step: int, process: int, processes: int) -> list[list[int]]:
        """The examples of each forward pass that a process makes in a step."""
        size = self.settings.batch_size
        chosen = self.order.slice(step * size, min((step + 1) * size, self.places))
        lengths = [sum(self.lengths[i] for i in self.units[unit]) for unit in chosen]
        micro = self.settings.micro_batch_size or size
        passes = share_out(chosen, lengths, processes, micro)[process]
        return [[i for unit in units for i in self.units[unit]] for units in passes]


class _Run:
    """The steps that are left, with what is written along the way."""

    def __init__(
        self,
        loop: Loop,
        plan: _Plan,
        tokens: Tokens,
        test: Tokens | None,
        folder: TrainFolder | None,
        lm: LM | None,
        adapter: Adapter | None,
    ) -> None:
        self.loop, self.plan, self.tokens, self.test = loop, plan, tokens, test
        self.folder, self.lm, self.adapter = folder, lm, adapter
        self.log: list[dict[str, Any]] = []

    def go(self) -> None:
        """Take the steps that are left."""
        loop, settings, folder = self.loop, self.plan.settings, self.folder
        main = loop.accelerator.is_main_process
        if folder is not None:
            loop.done, self.log = folder.resume(loop.trained, loop.optimizer)
        every = settings.checkpoint_every
        title = f"training {self.lm.name if self.lm else type(loop.model).__name__}"
        try:
            with progress(title, self.plan.steps, done=loop.done, unit="steps") as task:
                while loop.done < self.plan.steps:
                    row = self._step()
                    self.log.append(row)
                    if folder is not None and main:
                        folder.write_log(row)
                        if every and loop.done % every == 0:
                            folder.checkpoint(
                                loop.done, loop.trained, loop.optimizer, settings.keep
                            )
                    rate = row["tokens"] / row["seconds"]
                    task.note = f"loss {row['loss']:.3f}, {rate:,.0f} tokens/s"
                    task.advance()
        except KeyboardInterrupt:
            kept = "the same call goes on from the newest checkpoint"
            if folder is None or every is None:
                kept = "nothing is kept without a folder and checkpoint_every"
            raise InterruptedRunError(
                f"stopped at step {loop.done} of {self.plan.steps}; {kept}"
            ) from None

    def _step(self) -> dict[str, Any]:
        began = time.perf_counter()
        accelerator = self.loop.accelerator
        passes = self.plan.members(
            self.loop.done, accelerator.process_index, accelerator.num_processes
        )
        step = self.loop.step([collate(self.tokens, members) for members in passes])
        row = asdict(step) | {"seconds": time.perf_counter() - began}
        every = self.plan.settings.evaluate_every
        last = step.step == self.plan.steps
        if self.test is not None and (last or (every and step.step % every == 0)):
            row["held_out"] = self.loop.mean_loss(self._test_batches())
        return row

    def _test_batches(self) -> Iterator[Batch]:
        assert self.test is not None
        accelerator, settings = self.loop.accelerator, self.plan.settings
        shares = share_out(
            range(len(self.test)),
            self.test.lengths.tolist(),
            accelerator.num_processes,
            settings.micro_batch_size or settings.batch_size,
        )
        for members in shares[accelerator.process_index]:
            yield collate(self.test, members)

    def result(self) -> Trained:
        """What the run came to so far."""
        return Trained(
            steps=self.loop.done,
            log=self.log,
            tokens=sum(row["tokens"] for row in self.log),
            skipped=self.tokens.skipped,
            truncated=self.tokens.truncated,
            held_out=self.log[-1].get("held_out") if self.log else None,
            folder=None if self.folder is None else self.folder.path,
            adapter=self.adapter,
        )


def _tokens(examples: Examples, settings: TrainSettings, lm: LM | None) -> Tokens:
    if isinstance(examples, str | Path):
        examples = load_examples(examples)
    limit = settings.max_length
    if lm is None:
        return encode(examples, settings, None, limit)
    if limit is not None and limit > lm.context:
        raise UsageError(f"max_length is {limit:,}, but {lm.name} reads at most {lm.context:,}")
    return encode(examples, settings, lm, limit or lm.context, lm.vocabulary)


def _adapter(lm: LM | None, module: nn.Module, settings: TrainSettings) -> Adapter:
    """The adapter that is attached, to be trained further, or a fresh one."""
    if lm is not None and lm.adapter is not None:
        return lm.adapter
    adapter = Adapter.fresh(
        module,
        settings.lora_targets,
        settings.lora_rank,
        settings.seed,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
    )
    if lm is None:
        adapter.attach(module)
        return adapter
    return lm.load_adapter(adapter)


class _as_found:
    """Leave mode, dtypes and gradients of a module as they were before."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.training = self.module.training
        self.found = {
            name: (p.dtype, p.requires_grad) for name, p in self.module.named_parameters()
        }

    def __exit__(self, *_: object) -> None:
        if getattr(self.module, "is_activation_checkpointing", False):
            self.module.activation_checkpointing_disable()  # type: ignore[operator]
        for name, parameter in self.module.named_parameters():
            dtype, gradient = self.found[name]
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(gradient)
        self.module.train(self.training)


def _name(model: LM | nn.Module) -> str:
    if isinstance(model, LM):
        return model.name
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {size:,} parameters"


def _print(tokens: Tokens) -> str:
    """Short hash of the encoded examples, so that a run is not resumed on other data."""
    found = hashlib.sha256(tokens.ids.tobytes())
    found.update(tokens.counted.tobytes() + tokens.starts.tobytes())
    return found.hexdigest()[:16]


def _identity(settings: TrainSettings) -> dict[str, Any]:
    """The settings that a resumed run must share; what it keeps is its own affair."""
    record = settings.record()
    return {name: value for name, value in record.items() if name not in _FREE}


def _summary(result: Trained) -> dict[str, Any]:
    names = ("steps", "tokens", "skipped", "truncated", "held_out")
    return json.loads(json.dumps({name: getattr(result, name) for name in names}))
