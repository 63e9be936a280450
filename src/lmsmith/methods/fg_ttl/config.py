"""The settings of `fg-ttl`, each with its meaning, unit, default and source, and its presets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import model_validator

from lmsmith.errors import ConfigError, UnknownNameError
from lmsmith.settings import Settings, setting

CODE = "official code"
OURS = "our choice"

Objective = Literal[
    "fg-ttl",
    "selection",
    "temperature",
    "tent",
    "high-entropy",
    "random",
    "eata",
    "sar",
    "come",
    "tlm",
]


class FGTTLConfig(Settings):
    """What an adapting model learns from, how strongly, and when it is rolled back."""

    objective: Objective = setting(
        "fg-ttl",
        "what is minimised: all of FG-TTL, only its selection, only its temperature, all tokens "
        "(tent), the most uncertain or random ones, or one of EATA, SAR, COME, TLM",
        source=CODE,
    )
    mode: Literal["online", "offline"] = setting(
        "online",
        "predict each batch and then learn from it, or learn from the whole stream's prompts "
        "first (offline, TLM only)",
        source=CODE,
    )

    # The stream
    stream_batch: int = setting(
        8, "items answered before each update", unit="items", source=f"{CODE}: tta_batch_size", ge=1
    )
    prompt_tokens: int = setting(
        1024, "longest prompt", unit="tokens", source=f"{CODE}: cutoff_len", ge=1
    )
    too_long: Literal["skip", "cut"] = setting(
        "skip", "a longer prompt is skipped and reported, or cut at its end", source=OURS
    )
    max_new_tokens: int = setting(8192, "longest answer", unit="tokens", source=CODE, ge=1)
    temperature: float = setting(0.0, "of the answers' sampling; 0 is greedy", source=CODE, ge=0)

    # The adapter
    rank: int = setting(8, "rank of the LoRA adapter", source=CODE, ge=1)
    lora_alpha: float = setting(
        16.0, "the adapter's update is alpha / rank times B A", source=CODE, gt=0
    )
    targets: tuple[str, ...] = setting(
        ("q_proj", "v_proj", "qkv_proj", "c_attn"),
        "endings of the modules that are adapted; those the model has of them",
        source=f"{CODE}: q_proj and v_proj, or the fused qkv_proj; c_attn is GPT-2's name of it",
        min_length=1,
    )

    # The update
    learning_rate: float = setting(
        7.5e-6,
        "constant rate",
        source=f"{CODE}: the value it ships most often; see official_code() for each",
        ge=0,
    )
    optimizer: Literal["adamw", "sgd"] = setting("adamw", "what steps", source=CODE)
    persistent_optimizer: bool = setting(
        False, "keep the optimizer's state from batch to batch", source=CODE
    )
    clip: float | None = setting(
        1.0, "largest norm of the gradient", source="transformers' default", gt=0
    )
    epochs: int = setting(1, "passes over a batch's answers", source=CODE, ge=1)
    micro_batch: int = setting(
        1,
        "answers a step; gain weights are shared among them",
        unit="answers",
        source=CODE,
        ge=1,
    )
    shuffle: bool = setting(True, "learn from a batch's answers in a random order", source=CODE)
    step_on_nothing: bool = setting(
        False,
        "step with a zero gradient when nothing was selected, which moves weights by momentum",
        source=f"{OURS}; the official code does step",
    )
    seed: int = setting(
        0, "seed of adapter, order, sampling and random selection", source=OURS, ge=0
    )

    # Future-Gain guided token selection
    align: Literal["after", "before"] = setting(
        "after",
        "the entropy of a token is that of the distribution after reading it, or of the one that "
        "produced it",
        source=CODE,
    )
    local_window: int = setting(
        6, "positions over which volatility is measured", unit="tokens", source=CODE, ge=2
    )
    gamma: float = setting(1.0, "window size at a volatility of one nat", source=CODE, gt=0)
    n_min: int = setting(2, "shortest window", unit="tokens", source=CODE, ge=1)
    n_max: int = setting(10, "longest window", unit="tokens", source=CODE, ge=1)
    top_p: float = setting(
        0.2, "share of eligible positions that is selected", source=CODE, gt=0, le=1
    )
    top_k: int | None = setting(None, "select this many instead", unit="tokens", source=CODE, ge=1)
    entropy_threshold: float = setting(
        1e-3, "selected positions at or below it are dropped again", unit="nats", source=CODE
    )
    whole_windows: bool = setting(
        True, "a position needs both its windows inside the text", source=CODE
    )

    # Risk-aware adaptation
    alpha: float = setting(
        0.5, "temperature is 1 + alpha times entropy", source=f"{CODE}: temperature_alpha", ge=0
    )
    tau: float = setting(
        1.0, "weights are softmax(gain / tau)", source=f"{CODE}: gain_softmax_temp", gt=0
    )

    # The relatives
    eata_margin: float | None = setting(
        None, "EATA learns below this entropy; none is (ln vocabulary) / 2 - 1", unit="nats",
        source="official code of EATA", gt=0,
    )  # fmt: skip
    eata_redundancy: float = setting(
        0.05, "EATA skips what is closer than this (cosine) to its running mean",
        source="official code of EATA", gt=0,
    )  # fmt: skip
    fisher_alpha: float = setting(
        2000.0,
        "EATA's penalty on moving what matters for source prompts, if there are some",
        source="official code of EATA",
        ge=0,
    )
    sar_margin: float | None = setting(
        None, "SAR learns below this entropy; none is 0.4 ln vocabulary", unit="nats",
        source="official code of SAR", gt=0,
    )  # fmt: skip
    sar_rho: float = setting(
        0.05, "SAR's step towards the sharpest point", source="official code of SAR", gt=0
    )
    sar_reset: float = setting(
        0.2, "SAR starts over when its running loss is below", unit="nats",
        source="official code of SAR", ge=0,
    )  # fmt: skip
    come_mass: float | None = setting(
        None, "COME's uncertainty mass; none is the vocabulary's size",
        source="official code of COME: 1000, the classes of ImageNet", gt=0,
    )  # fmt: skip
    tlm_threshold: float = setting(
        3.0, "TLM learns prompts above this", unit="nats a token", source="official code of TLM"
    )
    tlm_scale: float = setting(
        0.1, "TLM's weight at the threshold", source="official code of TLM", gt=0
    )

    # The guard
    guard: bool = setting(True, "roll the adapter back when the model collapses", source=OURS)
    guard_kl: float = setting(
        0.1,
        "most KL(adapted || base) over a batch's texts",
        unit="nats a token",
        source="measured on the bench's pilot seeds",
        gt=0,
    )
    guard_entropy: float = setting(
        0.2,
        "least entropy over a batch's texts, as a share of the base model's",
        source="measured on the bench's pilot seeds",
        ge=0,
        lt=1,
    )
    guard_repetition: float = setting(
        0.2,
        "most rise of the share of repeated 4-grams in answers over what the unadapted model had",
        source="measured on the bench's pilot seeds",
        gt=0,
        le=1,
    )

    logits_chunk: int = setting(
        256, "positions whose logits exist at one time", unit="tokens", source=OURS, ge=1
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.n_min > self.n_max:
            raise ConfigError(f"n_min is {self.n_min}, but n_max is {self.n_max}; raise n_max")
        if self.mode == "offline" and self.objective != "tlm":
            raise ConfigError(
                f"mode 'offline' learns from prompts alone, which {self.objective!r} cannot; use "
                "objective 'tlm' or mode 'online'"
            )
        return self


# Learning rate and gain temperature that the official code ships: tuned on each test stream itself.
_SHIPPED = {
    "llama-3.1-8b": {
        "gsm8k": (1e-8, 0.8),
        "math-500": (7.5e-6, 0.8),
        "collegemath": (1e-8, 0.8),
        "aime24": (7.5e-6, 1.0),
        "minerva": (7.5e-6, 0.8),
        "olympiad": (5e-6, 0.8),
    },
    "qwen2.5-7b": {
        "gsm8k": (1e-5, 1.0),
        "math-500": (7.5e-6, 1.0),
        "collegemath": (1e-7, 0.8),
        "aime24": (1e-7, 0.8),
        "minerva": (7.5e-6, 1.0),
        "olympiad": (1e-6, 1.0),
    },
    "phi-4-14b": {
        "gsm8k": (1e-5, 1.2),
        "math-500": (5e-6, 0.8),
        "collegemath": (1.5e-5, 1.2),
        "aime24": (7.5e-6, 1.0),
        "minerva": (7.5e-6, 1.0),
        "olympiad": (5e-6, 0.8),
    },
}


def official_code(model: str = "", data: str = "") -> FGTTLConfig:
    """The official code's run: no guard, long prompts cut, a step even when nothing is selected.

    Args:
        model: `llama-3.1-8b`, `qwen2.5-7b` or `phi-4-14b`; with `data`, the learning rate and
            gain temperature that the code ships for the two, instead of the defaults.
        data: `gsm8k`, `math-500`, `collegemath`, `aime24`, `minerva` or `olympiad`.

    Raises:
        UnknownNameError: No such model or data set is shipped.
    """
    shared: dict[str, Any] = {"guard": False, "too_long": "cut", "step_on_nothing": True}
    if not (model or data):
        return FGTTLConfig(**shared)
    if model not in _SHIPPED:
        raise UnknownNameError("model of the official code", model, _SHIPPED)
    if data not in _SHIPPED[model]:
        raise UnknownNameError("data set of the official code", data, _SHIPPED[model])
    rate, tau = _SHIPPED[model][data]
    alpha = 1.0 if (model, data) == ("phi-4-14b", "gsm8k") else 0.5
    return FGTTLConfig(**shared, learning_rate=rate, tau=tau, alpha=alpha)


def small(objective: Objective = "fg-ttl", learning_rate: float = 1e-4) -> FGTTLConfig:
    """Answers of at most 256 tokens and a rate for models of a few hundred million parameters."""
    return FGTTLConfig(objective=objective, learning_rate=learning_rate, max_new_tokens=256)


PRESETS: dict[str, Callable[[], FGTTLConfig]] = {"official_code": official_code, "small": small}
