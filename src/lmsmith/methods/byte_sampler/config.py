"""The settings of `byte-sampler`, each with its meaning, unit, default and source."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from lmsmith.errors import ConfigError
from lmsmith.settings import Settings, setting


class ByteSamplerConfig(Settings):
    """How a text is continued byte by byte."""

    mode: Literal["bytes", "continue"] = setting(
        "bytes",
        "`bytes` draws every byte from the byte-level distribution; `continue` draws one token "
        "that covers the end of the prompt and then ordinary tokens",
        source="official code: generate_batched, generate_pbp_batched",
    )
    leaves: Literal["unfiltered", "filtered"] = setting(
        "unfiltered",
        "whether the last token of a covering sequence must be valid after the one before it; "
        "`continue` always filters",
        source="official code: unfiltered by default for bytes, filtered for one-shot continuation",
    )
    combine: Literal["mix", "product", "proxy"] = setting(
        "mix",
        "how several models become one: mean of probabilities, product, or BASE+EXPERT+ANTIEXPERT",
        source="paper, sections 4.3 and 4.4",
    )
    power: float | None = setting(
        None, "exponent of each model in a product; none is 1/models", source="official code", gt=0
    )
    alpha: float = setting(
        1.0, "strength of proxy tuning; 0 is the base model alone", source="official code"
    )
    token_temperature: float = setting(
        1.0,
        "temperature of each token distribution before bytes are summed",
        source="official code: logprob_transforms",
        gt=0,
    )
    token_top_k: int = setting(
        0, "keep the k likeliest tokens before bytes are summed; 0 keeps all", unit="tokens",
        source="official code: logprob_transforms", ge=0,
    )  # fmt: skip
    token_top_p: float = setting(
        1.0,
        "nucleus of each token distribution before bytes are summed",
        source="official code: logprob_transforms",
        gt=0,
        le=1,
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.power is not None and self.combine != "product":
            raise ConfigError("power is set, but combine is not 'product'; drop one of the two")
        if self.alpha != 1 and self.combine != "proxy":
            raise ConfigError("alpha is set, but combine is not 'proxy'; drop one of the two")
        if self.mode == "continue":
            if self.combine == "proxy":
                raise ConfigError("mode 'continue' draws tokens of one model; use mode 'bytes'")
            if (self.token_temperature, self.token_top_k, self.token_top_p) != (1, 0, 1):
                raise ConfigError(
                    "mode 'continue' draws tokens by the request's own temperature, top-k and "
                    "top-p; use those in place of token_temperature, token_top_k and token_top_p"
                )
        return self
