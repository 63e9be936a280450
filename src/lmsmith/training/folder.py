"""A training run's folder: what identifies it, its log, its checkpoints, what it made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from lmsmith.errors import UsageError
from lmsmith.files import TEMPORARY, folder_atomic, lock_folder, storage_errors, write_atomic
from lmsmith.models.adapter import Adapter
from lmsmith.models.lm import LM
from lmsmith.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint

CONFIG, LOG, RESULT = "config.json", "log.jsonl", "result.json"
CHECKPOINTS, MODEL, ADAPTER = "checkpoints", "model", "adapter"
WEIGHTS = "model.safetensors"


class TrainFolder:
    """The folder, held by this run until it is closed; other processes of it only read."""

    def __init__(self, path: Path, config: Mapping[str, Any], main: bool = True) -> None:
        """Begin a run in a folder, or find the same run in it.

        Raises:
            UsageError: It holds something else, or a run with other settings, model or data.
            RunFolderBusyError: Another run is writing it.
            StorageError: It cannot be written.
        """
        self.path, self._main, self._lock = path, main, None
        if not main:
            return
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(path)
        try:
            self._open(config)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, config: Mapping[str, Any]) -> None:
        stored = self.path / CONFIG
        if stored.is_file():
            there = json.loads(stored.read_text(encoding="utf-8"))
            if there != config:
                raise UsageError(
                    f"{self.path} holds a run with other settings "
                    f"({_difference(there, config)}); give another folder"
                )
            return
        if any(not p.name.startswith((TEMPORARY, ".lock")) for p in self.path.iterdir()):
            raise UsageError(f"{self.path} is not empty and holds no training run")
        with storage_errors(self.path):
            write_atomic(stored, (json.dumps(config, indent=2) + "\n").encode())

    def __enter__(self) -> TrainFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def finished(self) -> bool:
        """Whether the run's result is written."""
        return (self.path / RESULT).is_file()

    def resume(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, list[dict[str, Any]]]:
        """Put the newest state into a module and its optimizer; steps done, and their log.

        Raises:
            ModelFileError: The checkpoint is corrupt.
        """
        if self.finished:
            _load(self.path, module)
            log = self._read_log()
            return len(log), log
        found = checkpoints(self.path / CHECKPOINTS)
        if not found:
            if self._main:
                (self.path / LOG).unlink(missing_ok=True)
            return 0, []
        state = load_checkpoint(found[-1], module, optimizer)
        # Steps after the checkpoint are done again, so their lines go.
        log = self._read_log()[: state["step"]]
        if self._main:
            with storage_errors(self.path):
                blob = "".join(json.dumps(row) + "\n" for row in log).encode()
                write_atomic(self.path / LOG, blob)
        return state["step"], log

    def write_log(self, row: Mapping[str, Any]) -> None:
        """Add a line to the log."""
        with storage_errors(self.path), (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def checkpoint(
        self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, keep: int
    ) -> None:
        """Write a checkpoint."""
        with storage_errors(self.path):
            folder = self.path / CHECKPOINTS
            folder.mkdir(exist_ok=True)
            save_checkpoint(folder, step, module, optimizer, {}, keep)

    def finish(
        self,
        lm: LM | None,
        module: nn.Module,
        adapter: Adapter | None,
        summary: Mapping[str, Any],
    ) -> None:
        """Write what the run made, and mark it as finished."""
        with storage_errors(self.path):
            save(self.path, lm, module, adapter)
            write_atomic(self.path / RESULT, (json.dumps(summary, indent=2) + "\n").encode())

    def _read_log(self) -> list[dict[str, Any]]:
        path = self.path / LOG
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        return [json.loads(line) for line in lines]


def save(path: Path, lm: LM | None, module: nn.Module, adapter: Adapter | None) -> None:
    """Write what was trained into a folder.

    An adapter goes to `adapter/` in PEFT's format, a transformers model with its tokenizer to
    `model/`, and a plain module to `model.safetensors`.
    """
    if adapter is not None:
        if lm is not None:
            adapter.settings.setdefault("base_model_name_or_path", lm.name)
        with folder_atomic(path / ADAPTER) as new:
            adapter.save(new)
    elif lm is not None:
        with folder_atomic(path / MODEL) as new:
            lm.model.save_pretrained(new)
            if lm.tokenizer is not None:
                lm.tokenizer.save_pretrained(new)
    else:
        temporary = path / f"{TEMPORARY}{WEIGHTS}"
        save_model(module, str(temporary))
        temporary.replace(path / WEIGHTS)


@torch.no_grad()
def _load(path: Path, module: nn.Module) -> None:
    """Put what `save` wrote back into what was trained."""
    if isinstance(module, Adapter):
        found = Adapter.load(path / ADAPTER).updates
        for name, update in module.updates.items():
            update.load_state_dict(found[name].state_dict())
    elif (path / MODEL).is_dir():
        from transformers import AutoModelForCausalLM

        saved = AutoModelForCausalLM.from_pretrained(path / MODEL, dtype="auto")
        module.load_state_dict(saved.state_dict())
    else:
        load_model(module, path / WEIGHTS)


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What differs between two configurations, in words."""
    if there.get("settings") != here.get("settings"):
        old, new = there.get("settings", {}), here["settings"]
        keys = [key for key in new if new[key] != old.get(key)]
        return "; ".join(f"{key}: {old.get(key)} there, {new[key]} here" for key in keys)
    key = "model" if there.get("model") != here["model"] else "data"
    return f"{key}: {there.get(key)} there, {here[key]} here"
