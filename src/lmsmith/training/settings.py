"""Settings of a training run."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from lmsmith.settings import Settings, setting

OURS = "our choice"
PEFT = "PEFT's default"
TORCH = "torch's default"


class TrainSettings(Settings):
    """What is trained, on how much at a time, and how fast.

    The batch is counted over all processes, so the same settings mean the same run on any number
    of them; what does not fit into one forward pass is accumulated.
    """

    tune: Literal["full", "lora"] = setting(
        "full", "train all weights, or a LoRA adapter over frozen ones", source=OURS
    )
    lora_rank: int = setting(8, "rank of the adapter", source=PEFT, ge=1)
    lora_alpha: float = setting(
        16.0, "the update is alpha / rank times B A", source="twice the rank, as is usual", gt=0
    )
    lora_dropout: float = setting(0.0, "dropout before A", source=PEFT, ge=0, lt=1)
    lora_targets: tuple[str, ...] = setting(
        ("all-linear",),
        "endings of module names such as q_proj; all-linear is every linear map but the head",
        source="QLoRA, arXiv 2305.14314, section 4",
    )

    epochs: float = setting(1.0, "passes over the examples", source=OURS, gt=0)
    steps: int | None = setting(None, "optimizer steps, instead of epochs", source=OURS, ge=1)
    batch_size: int = setting(
        8, "examples a step, over all processes", unit="examples", source=OURS, ge=1
    )
    micro_batch_size: int | None = setting(
        None, "examples a forward pass; None is the batch", unit="examples", source=OURS, ge=1
    )
    shuffle: bool = setting(True, "draw a new order every epoch", source=OURS)
    packing: bool = setting(
        False,
        "join examples to pieces of up to max_length; the batch then counts pieces",
        source="TRL's bfd strategy",
    )

    max_length: int | None = setting(
        None, "longest example; None is the model's context", unit="tokens", source=OURS, ge=2
    )
    too_long: Literal["error", "truncate", "skip"] = setting(
        "error", "what happens to a longer example", source=OURS
    )
    loss_on: Literal["completion", "last", "all"] = setting(
        "completion",
        "tokens that count: completions and replies, only the last reply, or all",
        source="TRL's default",
    )
    append_eos: bool = setting(True, "end completions and texts with EOS", source="TRL's default")

    learning_rate: float = setting(2e-5, "peak rate", source="TRL's default", gt=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = setting(
        "linear", "course of the rate after the warm-up", source="transformers' default"
    )
    warmup: float = setting(
        0.0, "share of the steps over which the rate rises", source=TORCH, ge=0, lt=1
    )
    decay: float = setting(
        0.2,
        "share of the steps over which wsd falls",
        source="Hägele et al., arXiv 2405.18392",
        gt=0,
        le=1,
    )
    final_rate: float = setting(
        0.0, "rate at the end as a share of the peak; not for constant", source=OURS, ge=0, le=1
    )
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW's averages", source=TORCH)
    epsilon: float = setting(1e-8, "AdamW's epsilon", source=TORCH, gt=0)
    weight_decay: float = setting(
        0.0, "AdamW's decay; not of biases and norms", source="transformers' default", ge=0
    )
    clip: float | None = setting(
        1.0, "largest norm of the gradient", source="transformers' default", gt=0
    )

    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "of matrix products; auto is bfloat16 where the device computes in it natively",
        source=OURS,
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations to save memory", source="transformers' default"
    )
    logits_chunk: int = setting(
        256, "positions whose logits exist at one time", unit="tokens", source="measured", ge=1
    )

    evaluate_every: int | None = setting(
        None, "steps between evaluations; None is only at the end", unit="steps", source=OURS, ge=1
    )
    checkpoint_every: int | None = setting(
        None, "steps between checkpoints; None is none", unit="steps", source=OURS, ge=1
    )
    keep: int = setting(2, "checkpoints to keep, the newest", source=OURS, ge=1)
    seed: int = setting(0, "seed of order, adapter and dropout", source=OURS, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> TrainSettings:
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} are together more than all steps"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}, but must be from 0 up to, not including, 1")
        return self
