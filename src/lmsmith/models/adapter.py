"""Low-rank adapters whose strength is chosen a row (LoRA, Hu et al., arXiv 2106.09685).

The update of a linear map is `strength * scaling * B A x`: strength 0 is the base model, 1 the
adapter as trained. Files are PEFT's: `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmsmith.errors import CapabilityError, LmsmithError, ModelFileError, UsageError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


class LowRank(nn.Module):
    """One linear map's update.

    Attributes:
        down: `[rank, inputs]`, PEFT's A.
        up: `[outputs, rank]`, PEFT's B.
        alpha: PEFT's lora_alpha.
        scaling: Factor of the product at strength 1.
        dropout: Share of the inputs that training drops.
    """

    def __init__(
        self,
        down: Tensor,
        up: Tensor,
        alpha: float,
        rslora: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.down, self.up, self.alpha = nn.Parameter(down), nn.Parameter(up), alpha
        rank = down.shape[0]
        self.scaling = alpha / (math.sqrt(rank) if rslora else rank)

    def forward(self, x: Tensor) -> Tensor:
        """The update at strength 1: `[..., inputs]` -> `[..., outputs]`."""
        if self.dropout and self.training:
            x = nn.functional.dropout(x, self.dropout)
        # The low-rank product is the small one, so the factor goes there.
        low = nn.functional.linear(x.to(self.down.dtype), self.down) * self.scaling
        return nn.functional.linear(low, self.up)


class Adapter(nn.Module):
    """Updates of some of a model's linear maps; its parameters can be trained.

    Attributes:
        updates: By the full name of the module each belongs to.
        settings: What PEFT's `adapter_config.json` says, or will say.
        strength: What the hooks apply now: a number, a tensor `[rows]`, or `None` for nothing.
    """

    def __init__(self, updates: Mapping[str, LowRank], settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.updates = dict(updates)
        self.settings = dict(settings)
        self.strength: float | Tensor | None = None
        self._modules_in_order = nn.ModuleList(self.updates.values())
        self._hooks: list[Any] = []

    @classmethod
    def random(
        cls,
        model: nn.Module,
        targets: Sequence[str],
        rank: int,
        seed: int,
        alpha: float | None = None,
        scale: float = 0.05,
    ) -> Adapter:
        """An adapter with both factors random, so that it changes the model.

        Args:
            model: The model it is for.
            targets: Endings of module names, such as `q_proj`.
            rank: Rank of every update.
            seed: Seed of the values.
            alpha: PEFT's lora_alpha; twice the rank by default.
            scale: Standard deviation of the values.

        Raises:
            UsageError: No linear map of the model has such a name.
        """
        adapter = cls.fresh(model, targets, rank, seed, alpha=alpha)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for update in adapter.updates.values():
                for matrix in (update.down, update.up):
                    matrix.copy_(torch.randn(matrix.shape, generator=generator) * scale)
        return adapter

    @classmethod
    def fresh(
        cls,
        model: nn.Module,
        targets: Sequence[str],
        rank: int,
        seed: int,
        alpha: float | None = None,
        dropout: float = 0.0,
    ) -> Adapter:
        """An adapter to train: A random, B zero, so that it changes nothing yet; float32.

        Args:
            model: The model it is for.
            targets: Endings of module names, such as `q_proj`; `all-linear` is every linear map
                but the head.
            rank: Rank of every update.
            seed: Seed of A, drawn as PEFT draws it.
            alpha: PEFT's lora_alpha; twice the rank by default.
            dropout: Share of an update's inputs that training drops.

        Raises:
            UsageError: No linear map of the model has such a name.
        """
        generator = torch.Generator().manual_seed(seed)
        alpha = 2.0 * rank if alpha is None else alpha
        head = getattr(model, "get_output_embeddings", lambda: None)()
        updates = {}
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear | Conv1D) or module is head:
                continue
            if "all-linear" in targets or _matches(name, targets):
                inputs, outputs = _shape(module)
                down = torch.empty(rank, inputs)
                nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
                up = torch.zeros(outputs, rank)
                updates[name] = LowRank(down, up, alpha, dropout=dropout)
        if not updates:
            raise UsageError(f"no linear module of the model is named like {list(targets)}")
        if "all-linear" in targets:
            targets = sorted({name.rpartition(".")[2] for name in updates})
        settings = {
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": dropout,
            "target_modules": list(targets),
        }
        return cls(updates, settings).to(next(model.parameters()).device)

    @classmethod
    def load(cls, folder: str | Path) -> Adapter:
        """Read a PEFT folder.

        Raises:
            ModelFileError: A file is missing or corrupt, or its tensors do not pair up.
            CapabilityError: The adapter is of a kind that is not a plain low-rank update.
        """
        folder = Path(folder)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ModelFileError(f"{folder} is not an adapter folder: it has no {name}")
        try:
            settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS_FILE)
        except (ValueError, SafetensorError) as error:
            raise ModelFileError(f"the adapter in {folder} is corrupt: {error}") from None
        try:
            return cls(_updates(folder, settings, tensors), settings)
        except LmsmithError:
            raise
        except (AttributeError, IndexError, TypeError, ValueError, re.error) as error:
            raise ModelFileError(f"the adapter in {folder} is corrupt: {error}") from None

    def save(self, folder: str | Path) -> None:
        """Write a PEFT folder; the configuration comes last, so half a folder never loads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, update in self.updates.items():
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = update.down.detach().cpu().contiguous()
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = update.up.detach().cpu().contiguous()
        save_file(tensors, folder / WEIGHTS_FILE)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "bias": "none",
            "inference_mode": True,
            **self.settings,
        }
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")

    def attach(self, model: nn.Module) -> None:
        """Hook every update to its module of `model`, whose weights stay as they are.

        An update moves to where its module is; beside float32 weights it becomes float32 too.

        Raises:
            CapabilityError: The model lacks a module, or has one of another shape.
        """
        modules = dict(model.named_modules())
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for name, update in self.updates.items():
            module = modules.get(name)
            shape = (update.down.shape[1], update.up.shape[0])
            if not isinstance(module, nn.Linear | Conv1D) or module is head:
                raise CapabilityError(f"the adapter's {name}", "a linear layer of a block", "none")
            if _shape(module) != shape:
                raise CapabilityError(
                    f"the adapter's {name}",
                    f"a map from {shape[0]} to {shape[1]}",
                    "one from {} to {}".format(*_shape(module)),
                )
        self.detach()
        for name, update in self.updates.items():
            weight = modules[name].weight
            wide = torch.float32 if weight.dtype == torch.float32 else None
            update.to(weight.device, wide)
            self._hooks.append(modules[name].register_forward_hook(self._hook(update)))

    def detach(self) -> None:
        """Take the hooks off again."""
        while self._hooks:
            self._hooks.pop().remove()

    @contextmanager
    def at(self, strength: float | Tensor) -> Iterator[None]:
        """Apply the adapter in forwards within the context.

        Args:
            strength: One for all rows of the batch, or a tensor `[rows]`.
        """
        before, self.strength = self.strength, strength
        try:
            yield
        finally:
            self.strength = before

    def _hook(self, update: LowRank) -> Any:
        def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            strength = self.strength
            if strength is None:
                return None
            change = update(args[0])
            if isinstance(strength, Tensor):
                strength = strength.view(-1, *[1] * (output.dim() - 1))
            if isinstance(strength, Tensor) or strength != 1.0:
                change = change * strength
            return output + change.to(output.dtype)

        return add


def _updates(
    folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, LowRank]:
    """The updates that a PEFT folder's files describe; broken files raise whatever they may."""
    _refuse_other_kinds(settings)
    updates = {}
    for key in sorted(tensors):
        name = key.removeprefix(_PREFIX)
        if name.endswith(".lora_A.weight"):
            name = name.removesuffix(".lora_A.weight")
            up = tensors.get(key.replace(".lora_A.", ".lora_B."))
            if up is None or up.shape[1] != tensors[key].shape[0]:
                raise ModelFileError(f"the adapter in {folder} lacks the B matrix of {name}")
            alpha = _for_module(settings.get("alpha_pattern"), name, settings["lora_alpha"])
            rslora = bool(settings.get("use_rslora"))
            updates[name] = LowRank(tensors[key], up, float(alpha), rslora)
        elif not name.endswith(".lora_B.weight"):
            raise CapabilityError("an adapter", "plain LoRA matrices", f"the tensor {name}")
    return updates


def _refuse_other_kinds(settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise CapabilityError("an adapter", "the kind LORA", f"the kind {kind}")
    if settings.get("bias", "none") != "none":
        raise CapabilityError("an adapter", "bias 'none'", f"bias {settings['bias']!r}")
    for key in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias"):
        if settings.get(key):
            raise CapabilityError("an adapter", "plain low-rank updates", f"{key} in its settings")
    if "lora_alpha" not in settings:
        raise ModelFileError(f"{CONFIG_FILE} has no lora_alpha")


def _for_module(patterns: Mapping[str, float] | None, name: str, default: float) -> float:
    """The value of the first pattern that names the module or the end of its name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _matches(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _shape(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """Inputs and outputs of a linear map; GPT-2's keeps its weight transposed."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
