"""The settings of `template-method`, each with its meaning, unit, default and source."""

from __future__ import annotations

from lmsmith.settings import Settings, setting


class TemplateMethodConfig(Settings):
    """How much sharper the distribution becomes."""

    factor: float = setting(
        0.5,
        "what the temperature is multiplied by; 1 is plain decoding and 0 is greedy",
        source="a choice of ours",
        ge=0,
    )
