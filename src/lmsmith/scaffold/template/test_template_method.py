"""What must hold of `template-method`; run with `pytest` in the folder above."""

from __future__ import annotations

import pytest

from lmsmith.decoding.events import Decoder, Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.errors import ConfigError
from lmsmith.scaffold.template.config import TemplateMethodConfig
from lmsmith.scaffold.template.controller import sharpen
from lmsmith.scaffold.template.decoder import make
from lmsmith.testing import tiny_lm


def test_the_temperature_is_multiplied():
    assert sharpen(Sampling(temperature=0.8, seed=3), 0.5) == Sampling(temperature=0.4, seed=3)


def test_a_negative_factor_is_refused():
    with pytest.raises(ConfigError, match="factor"):
        TemplateMethodConfig(factor=-1.0)


def run(factor: float | None, sampling: Sampling) -> tuple[int, ...]:
    """What a tiny model draws after a prompt; plainly where there is no factor."""
    lm = tiny_lm("llama")
    decoder: Decoder = PlainDecoder(lm)
    if factor is not None:
        decoder = make([lm], TemplateMethodConfig(factor=factor))
    return complete(decoder, [Request("ab", max_tokens=12, sampling=sampling)])[0].ids


def test_factor_one_is_plain_decoding():
    sampling = Sampling(seed=0)
    assert run(1.0, sampling) == run(None, sampling)


def test_factor_zero_is_greedy():
    assert run(0.0, Sampling(seed=1)) == run(None, Sampling(temperature=0.0))
