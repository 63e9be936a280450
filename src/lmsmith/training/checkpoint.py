"""Everything a run needs to go on as if it had never stopped, without pickle.

A checkpoint is a folder `step-00000010` with `weights.safetensors` (what is trained, and buffers),
`optimizer.safetensors` and `state.json`. The order of examples, the learning rate and every random
number are functions of the seed and the step, so they need not be saved.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lmsmith.errors import ModelFileError
from lmsmith.files import TEMPORARY, folder_atomic

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_NAME = "step-"


def save_checkpoint(
    folder: Path,
    step: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint atomically, then delete all but the newest `keep`.

    Args:
        folder: Where checkpoints are.
        step: Steps done.
        module: What is trained.
        optimizer: Its optimizer, over parameters of `module`.
        state: What else to keep; JSON values.
        keep: Checkpoints to keep.
    """
    tensors, numbers = _optimizer_state(module, optimizer)
    with folder_atomic(folder / f"{_NAME}{step:08d}") as new:
        save_file(_weights(module), new / WEIGHTS)
        save_file(tensors, new / OPTIMIZER)
        text = json.dumps({"step": step, "optimizer": numbers, **state}, indent=2)
        (new / STATE).write_text(text + "\n", encoding="utf-8")
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first; remains of a crash are deleted."""
    for torn in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(torn, ignore_errors=True)
    return sorted(path for path in folder.glob(f"{_NAME}*") if (path / STATE).is_file())


def load_checkpoint(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Put a checkpoint into a module and its optimizer.

    Returns:
        What `save_checkpoint` was given as `state`, and `step`.

    Raises:
        ModelFileError: It is corrupt, or of another model or optimizer.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        weights, moments = load_file(path / WEIGHTS), load_file(path / OPTIMIZER)
        own = _weights(module)
        if weights.keys() != own.keys():
            raise ModelFileError(f"the checkpoint {path} is of another model")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        numbers = state.pop("optimizer")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelFileError(f"the checkpoint {path} cannot be read: {error}") from None
    _restore(module, optimizer, moments, numbers)
    return state


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """What training changes: trainable parameters, each once, and buffers that are saved."""
    shared = dict(module.named_parameters(remove_duplicate=False))
    kept = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    buffers = {n: t for n, t in module.state_dict().items() if n not in shared}
    return {name: tensor.contiguous() for name, tensor in (kept | buffers).items()}


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain numbers of the state, by `parameter//key`."""
    names = _names(module)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[id(parameter)]}//{key}"
            if isinstance(value, Tensor):
                tensors[name] = value.detach().contiguous()
            else:
                numbers[name] = value
    return tensors, numbers


def _restore(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
) -> None:
    parameters = dict(module.named_parameters())
    optimizer.state.clear()
    for full, value in {**tensors, **numbers}.items():
        name, _, key = full.rpartition("//")
        parameter = parameters[name]
        # A step count stays where the optimizer keeps it: on the CPU, or beside a fused kernel.
        moves = isinstance(value, Tensor) and (value.dim() or _fused(optimizer))
        optimizer.state[parameter][key] = value.to(parameter.device) if moves else value


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
