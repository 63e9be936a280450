"""Is training as fast as TRL's SFTTrainer, in no more memory?

All arms train copies of one model on the same examples in the same order, batch and precision:
the loop that everyone writes (padded rows, the model's own loss, AdamW), TRL where it is installed
(`pip install 'lmsmith[peers]'`), and ours. They advance in lockstep, a step each in turn, so that a
busy moment of the machine hits all; memory is measured in a process of its own for each.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Semaphore, Thread
from typing import TYPE_CHECKING, Any

from lmsmith.errors import MissingDependencyError
from lmsmith.evaluation.bench import Bench, declare
from lmsmith.evaluation.texts import load_text, passages

if TYPE_CHECKING:
    from lmsmith.models import LM

PLAIN, TRL, OURS = "plain loop", "TRL SFTTrainer", "lmsmith"
# Trains a copy of its own; calls the function after every step with the step's loss.
Trainer = Callable[["LM", list[dict[str, Any]], dict[str, Any], Callable[[float], None]], None]
# Rank and targets of the LoRA arms: FG-TTL's, and PEFT's usual ones.
RANK, TARGETS = 8, ("q_proj", "v_proj")


@declare(
    models={size: ["smollm2-135m"] for size in ("smoke", "small", "full")},
    options={
        "smoke": {"steps": 3, "batch": 2, "tokens": 24, "memory": False, "precision": "auto"},
        "small": {"steps": 8, "batch": 8, "tokens": 192, "memory": True, "precision": "auto"},
        "full": {"steps": 30, "batch": 16, "tokens": 1024, "memory": True, "precision": "auto"},
    },
)
def bench(bench: Bench) -> None:
    """Measure full and LoRA training, on examples of one length and of many."""
    few = bench.size == "smoke"
    if not few and not find_spec("trl"):
        raise MissingDependencyError("trl", "peers")
    lm = bench.model(bench.models[0], dtype="float32")
    arms = [PLAIN, *([TRL] if find_spec("trl") else []), OURS]
    peer = TRL if TRL in arms else PLAIN
    for section, tune, ragged in (
        ("full, one length", "full", False),
        ("full, prompts and many lengths", "full", True),
        ("LoRA, prompts and many lengths", "lora", True),
    ):
        task = {**bench.options, "tune": tune, "ragged": ragged, "seed": bench.seed}
        examples = _examples(lm, task)
        tokens = sum(len(example["input_ids"]) for example in examples) / task["steps"]

        def measure(
            examples: list[dict[str, Any]] = examples, task: dict[str, Any] = task
        ) -> dict[str, Any]:
            return _lockstep(lm, examples, task, arms)

        found = bench.once(section, measure)
        # The first step pays for what is prepared once.
        seconds = {arm: found[arm]["seconds"][1:] for arm in arms}
        table = bench.table(
            section,
            "time a step",
            "s",
            seconds,
            baseline=peer,
            cost={arm: {"tokens/s": tokens * len(s) / sum(s)} for arm, s in seconds.items()},
        )
        ratio = table[OURS].ratio
        assert ratio is not None
        bench.check(
            f"throughput over {peer}: {section}",
            1 / ratio.value,
            0.5 if few else 1.0,
            ">=",
            source="plumbing: too few steps to judge" if few else f"peer: {peer}",
            note=f"95 % interval {1 / ratio.high:.3f} to {1 / ratio.low:.3f}"
            + ("" if TRL in arms else "; TRL is not installed"),
        )
        losses = {arm: found[arm]["losses"] for arm in arms}
        pairs = [(a, b) for arm in arms for a, b in zip(losses[arm], losses[OURS], strict=True)]
        bench.check(
            f"largest difference between the arms' losses: {section}",
            max(abs(a - b) for a, b in pairs),
            0.002 if _precision(lm, task) == "float32" else 0.05,
            "<=",
            source="identity: same model, data, batch, optimizer",
        )
        if bench.options["memory"]:
            _memory(bench, section, lm, task, arms, peer)


def _memory(
    bench: Bench, section: str, lm: LM, task: dict[str, Any], arms: list[str], peer: str
) -> None:
    grown = {
        arm: bench.once(f"memory of {arm}: {section}", partial(_child, arm, lm.name, task))
        for arm in arms
    }
    values = {arm: [value] for arm, value in grown.items()}
    bench.table(f"{section}: memory", "peak above the open model", "MB", values)
    bench.check(
        f"peak memory over {peer}'s: {section}",
        grown[OURS] / grown[peer],
        1.0,
        "<=",
        source=f"peer: {peer}",
    )


def _examples(lm: LM, task: dict[str, Any]) -> list[dict[str, Any]]:
    """As many examples as all steps take: of one length, or of an eighth up to all of it."""
    most, count = task["tokens"], task["steps"] * task["batch"]
    draw = random.Random(task["seed"])
    texts = passages(load_text("python"), 8 * most, 2 * count, task["seed"])
    rows = [ids[:most] for ids in map(lm.encode, texts) if len(ids) >= most][:count]
    if task["ragged"]:
        rows = [row[: draw.randint(most // 8, most)] for row in rows]
    prompts = [len(row) // 2 if task["ragged"] else 0 for row in rows]
    return [
        {"input_ids": row, "loss_mask": [0] * prompt + [1] * (len(row) - prompt)}
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def _precision(lm: LM, task: dict[str, Any]) -> str:
    from lmsmith.models.opening import resolve_dtype

    return str(resolve_dtype(task["precision"], lm.device)).removeprefix("torch.")


class _Turns:
    """A training in a thread of its own that stops after every step until it is called again."""

    def __init__(
        self, arm: str, lm: LM, examples: list[dict[str, Any]], task: dict[str, Any]
    ) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._go, self._done = Semaphore(0), Semaphore(0)
        self._error: BaseException | None = None
        self._abandoned = False
        work = (arm, lm, examples, task)
        self._thread = Thread(target=self._work, args=work, daemon=True)

    def _work(self, arm: str, lm: LM, examples: list[dict[str, Any]], task: dict[str, Any]) -> None:
        import torch

        def stepped(loss: float) -> None:
            self.losses.append(loss)
            self._done.release()
            self._go.acquire()
            if self._abandoned:
                raise KeyboardInterrupt

        self._go.acquire()
        try:
            torch.set_num_threads(self._threads)
            _TRAINERS[arm](lm, examples, task, stepped)
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        self._done.release()

    def finish(self) -> None:
        """The rest of the trainer's work after the last step."""
        self.step()
        self._thread.join()

    def abandon(self) -> None:
        """End the thread where it is: one that is inside torch at exit takes the process down."""
        self._abandoned = True
        if self._thread.ident:
            self._go.release()
            self._thread.join()

    def step(self) -> None:
        """One more step."""
        import torch

        began = time.perf_counter()
        if not self._thread.ident:
            self._threads = torch.get_num_threads()
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        self.seconds.append(time.perf_counter() - began)


def _lockstep(
    lm: LM, examples: list[dict[str, Any]], task: dict[str, Any], arms: list[str]
) -> dict[str, Any]:
    """Seconds and loss of every step of every arm, a step each in turn."""
    runs = {arm: _Turns(arm, _copy(lm), examples, task) for arm in arms}
    order = list(arms)
    try:
        for _ in range(task["steps"]):
            for arm in order:
                runs[arm].step()
            order.append(order.pop(0))
        found = {
            arm: {"seconds": run.seconds[:], "losses": run.losses[:]} for arm, run in runs.items()
        }
        for run in runs.values():
            run.finish()
    finally:
        for run in runs.values():
            run.abandon()
    return found


def _copy(lm: LM) -> LM:
    from lmsmith.models import LM

    return LM(copy.deepcopy(lm.model), lm.tokenizer, lm.name)


def _plain(
    lm: LM, examples: list[dict[str, Any]], task: dict[str, Any], stepped: Callable[[float], None]
) -> None:
    """The loop that everyone writes, with PEFT where it is asked for."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    model: Any = lm.model.requires_grad_(True).train()
    if task["tune"] == "lora":
        model = _peft(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-5, weight_decay=0.0)
    half = _precision(lm, task) == "bfloat16"
    size = task["batch"]
    for start in range(0, len(examples), size):
        rows = [torch.tensor(e["input_ids"]) for e in examples[start : start + size]]
        masks = [torch.tensor(e["loss_mask"]).bool() for e in examples[start : start + size]]
        labels = [torch.where(mask, row, -100) for row, mask in zip(rows, masks, strict=True)]
        ids = pad_sequence(rows, batch_first=True).to(lm.device)
        seen = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(lm.device)
        wanted = pad_sequence(labels, batch_first=True, padding_value=-100).to(lm.device)
        with torch.autocast(lm.device.type, torch.bfloat16, enabled=half):
            loss = model(input_ids=ids, attention_mask=seen, labels=wanted).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stepped(loss.item())


def _peft(model: Any) -> Any:
    """PEFT's adapter with the weights that ours begins with."""
    import peft

    from lmsmith.models.adapter import Adapter

    start = Adapter.fresh(model, TARGETS, RANK, seed=0)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS))
    wrapped = peft.get_peft_model(model, config)
    for name, update in start.updates.items():
        theirs = wrapped.get_parameter(f"base_model.model.{name}.lora_A.default.weight")
        theirs.data.copy_(update.down.data)
    return wrapped


def _ours(
    lm: LM, examples: list[dict[str, Any]], task: dict[str, Any], stepped: Callable[[float], None]
) -> None:
    from lmsmith.training import train

    settings = {
        "tune": task["tune"],
        "lora_rank": RANK,
        "lora_targets": TARGETS,
        "batch_size": task["batch"],
        "steps": task["steps"],
        "schedule": "constant",
        "shuffle": False,
        "precision": task["precision"],
    }
    train(lm, examples, settings, on_step=lambda row: stepped(row["loss"]))


def _trl(
    lm: LM, examples: list[dict[str, Any]], task: dict[str, Any], stepped: Callable[[float], None]
) -> None:
    """TRL at its defaults, but for what the other arms do not do either."""
    warnings.simplefilter("ignore")
    import datasets
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Report(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                stepped(float(logs["loss"]))

    datasets.disable_progress_bars()
    rows = [{"input_ids": e["input_ids"], "completion_mask": e["loss_mask"]} for e in examples]
    with TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_steps=task["steps"],
            per_device_train_batch_size=task["batch"],
            train_sampling_strategy="sequential",
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            max_length=None,
            completion_only_loss=True,
            gradient_checkpointing=False,
            bf16=_precision(lm, task) == "bfloat16",
            use_cpu=lm.device.type == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model: Any = lm.model.requires_grad_(True)
        trainer = SFTTrainer(
            model=_peft(model) if task["tune"] == "lora" else model,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=lm.tokenizer,
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


_TRAINERS: dict[str, Trainer] = {PLAIN: _plain, TRL: _trl, OURS: _ours}


# Memory, in a process of its own


def _child(arm: str, model: str, task: dict[str, Any]) -> float:
    """Peak memory of an arm's first two steps above that of the open model, in MB."""
    code = f"from {__name__} import report_memory; report_memory()"
    done = subprocess.run(
        [sys.executable, "-c", code, arm, model, json.dumps({**task, "steps": 2})],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arm} failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])


def report_memory() -> None:
    """Print what `_child` wants; the arm, model and task are the command's arguments."""
    arm, name, text = sys.argv[1:4]
    task = json.loads(text)
    from lmsmith.models import open_model

    lm = open_model(name, dtype="float32")
    examples = _examples(lm, task)
    if find_spec("trl"):  # what is imported is no one's training
        import trl  # noqa: F401
    before = _memory_now("VmRSS")
    _TRAINERS[arm](lm, examples, task, lambda _: None)
    print(_memory_now("VmHWM") - before)  # noqa: T201 - read by the parent


def _memory_now(name: str) -> float:
    """A field of this process's memory in MB; its peak where the system has no such file."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
