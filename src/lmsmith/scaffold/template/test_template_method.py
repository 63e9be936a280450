"""What must hold of `template-method`; run with `pytest` in the folder above."""

from __future__ import annotations

import pytest

from lmsmith.decoding.events import Sampling
from lmsmith.decoding.generate import generate
from lmsmith.errors import ConfigError
from lmsmith.testing import tiny_lm

from .config import TemplateMethodConfig
from .controller import sharpen
from .decoder import make


def test_the_temperature_is_multiplied():
    assert sharpen(Sampling(temperature=0.8, seed=3), 0.5) == Sampling(temperature=0.4, seed=3)


def test_a_negative_factor_is_refused():
    with pytest.raises(ConfigError, match="factor"):
        TemplateMethodConfig(factor=-1.0)


def test_factor_one_is_plain_decoding():
    lm = tiny_lm("llama")
    run = {"sampling": Sampling(seed=0), "max_tokens": 12}
    same = generate(lm, ["ab"], decoder=make([lm], TemplateMethodConfig(factor=1.0)), **run)
    assert [c.ids for c in same] == [c.ids for c in generate(lm, ["ab"], **run)]


def test_factor_zero_is_greedy():
    lm = tiny_lm("llama")
    cold = make([lm], TemplateMethodConfig(factor=0.0))
    greedy = generate(lm, ["ab"], sampling=Sampling(temperature=0), max_tokens=12)
    done = generate(lm, ["ab"], decoder=cold, sampling=Sampling(seed=1), max_tokens=12)
    assert done[0].ids == greedy[0].ids
