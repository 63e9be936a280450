"""From final hidden states to logits, exactly as the model itself does it, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's own head: `[..., width]` -> `[..., vocabulary]`.

    Args:
        model: A transformers model with an output embedding.
        hidden: Final hidden states, any number of them; logits are all that is large here, so
            callers choose how many exist at one time.
    """
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden)
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    scale = getattr(config, "logit_scale", None)
    if scale is not None:
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        logits = logits / divisor
    return logits
