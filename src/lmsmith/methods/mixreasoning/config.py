"""The settings of `mixreasoning`, each with its meaning, unit, default and source."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from lmsmith.errors import ConfigError
from lmsmith.settings import Settings, setting

OURS = "a choice of ours"
VERSION_1 = "version 1 of the paper, from summaries; value a choice of ours"


class MixReasoningConfig(Settings):
    """When an answer is thought through and when it is brief."""

    mode: Literal["mix", "think", "concise"] = setting(
        "mix", "both modes, or one of them throughout", source="paper, section 4: baselines"
    )
    criterion: Literal[
        "confidence",
        "max-probability",
        "margin",
        "entropy",
        "entropy-v1",
        "keywords",
        "random",
        "reverse",
    ] = setting(
        "confidence",
        "what decides: windowed token confidence, another signal in its place, version 1's entropy "
        "rule, trigger words, chance, or confidence the wrong way round",
        source="paper, equations 2 to 5; the others are its ablation",
    )
    candidates: int = setting(
        20, "k: tokens whose log-probabilities are averaged", unit="tokens",
        source="DeepConf's code; the paper does not say", ge=2,
    )  # fmt: skip
    window: int = setting(
        16, "m: scores averaged, least tokens between switches, and 1 + tokens dropped on a switch "
        "to thinking", unit="tokens", source="paper, section 4", ge=1,
    )  # fmt: skip

    low: float | None = setting(
        None,
        "tau_low: below it concise gives way to thinking; from the calibration when None",
        unit="nats",
        source="paper: swept over 12, 15, 18, 20 for its models",
    )
    high: float | None = setting(
        None,
        "tau_high: above it thinking gives way to concise; `low` plus the gap when None",
        unit="nats",
        source="paper: tau_low + 2",
    )
    percentile: float = setting(
        20.0, "percentile of concise-mode window scores that becomes tau_low", unit="%",
        source="paper, appendix: 10 to 40", gt=0, lt=100,
    )  # fmt: skip
    gap: float | None = setting(
        None,
        "tau_high less tau_low; None is 0.4 standard deviations of the calibration, or 2 without",
        unit="nats",
        source="paper: 2 at a spread of about 5",
        ge=0,
    )
    calibration: str = setting(
        "", "file with thresholds; empty is the one beside the adapter", source=OURS
    )

    start: Literal["think", "concise"] = setting(
        "think", "the first mode", source="paper, algorithm 1"
    )
    think_strength: float = setting(
        0.0, "adapter strength while thinking; 0 is the base model", source="paper: alpha 0"
    )
    concise_strength: float = setting(
        1.0,
        "adapter strength while concise; 1 is the adapter as trained",
        source="paper: alpha 64, which is what it was trained with",
    )
    concise_lora_alpha: float | None = setting(
        None,
        "the concise strength as a LoRA alpha, instead: divided by the one it was trained with",
        source="paper's unit: 64 and 32",
        gt=0,
    )
    generated_budget: float = setting(
        2.0,
        "most tokens drawn, dropped ones included, as a multiple of max_tokens; below 2 it can end "
        "an answer early",
        source=OURS,
        ge=1,
    )
    until: str = setting(
        "",
        "text after which the mode no longer changes, such as </think>; empty is never",
        source=OURS,
    )

    keywords: tuple[str, ...] = setting(
        ("Wait", "Hmm", "Alternatively"),
        "words in whose wake thinking is on, for the criterion keywords",
        source="paper, ablation",
    )
    share: float = setting(
        0.5, "probability of thinking at each decision, for the criterion random", source=OURS,
        ge=0, le=1,
    )  # fmt: skip
    boundary: str = setting(
        "",
        "random decides only after a token with this text, and drops nothing; empty is anywhere",
        source=OURS,
    )
    t_up: float = setting(
        0.5, "entropy-v1: think above this normalised entropy", source=VERSION_1, ge=0, le=1
    )
    t_down: float = setting(
        0.2, "entropy-v1: be brief again below this one", source=VERSION_1, ge=0, le=1
    )
    window_before: int = setting(
        8, "entropy-v1: tokens dropped before the uncertain one", unit="tokens",
        source=VERSION_1, ge=0,
    )  # fmt: skip
    window_after: int = setting(
        8, "entropy-v1: tokens thought on after it, at least", unit="tokens",
        source=VERSION_1, ge=0,
    )  # fmt: skip
    norm: Literal["candidates", "vocabulary"] = setting(
        "candidates",
        "entropy-v1: entropy of the candidates over log k, or of all tokens over log |V|",
        source=VERSION_1,
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.low is not None and self.high is not None and self.high < self.low:
            raise ConfigError(f"high is {self.high}, but must be at least low, {self.low}")
        if self.high is not None and self.low is None:
            raise ConfigError("high is set without low; give both, or gap")
        if self.high is not None and self.gap is not None:
            raise ConfigError("high and gap are both set; drop one of the two")
        if self.t_down > self.t_up:
            raise ConfigError(f"t_down is {self.t_down}, but must be at most t_up, {self.t_up}")
        if self.criterion == "keywords" and not (self.keywords and all(self.keywords)):
            raise ConfigError("criterion keywords needs at least one keyword, none of them empty")
        units = self.criterion in ("max-probability", "margin", "entropy")
        if units and self.low is not None and self.high is None and self.gap is None:
            # The gap's default is in nats of confidence.
            raise ConfigError(f"criterion {self.criterion} with low needs high or gap as well")
        return self


def paper() -> MixReasoningConfig:
    """The paper's main setting: m = 16, tau_low = 18 (the middle of its sweep), tau_high = 20."""
    return MixReasoningConfig(low=18.0, high=20.0)
