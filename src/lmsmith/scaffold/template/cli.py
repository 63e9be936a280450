"""Its own commands: `lmsmith template-method VERB`."""

from __future__ import annotations

import sys

from cyclopts import App

from lmsmith.decoding.events import Sampling

from .config import TemplateMethodConfig
from .controller import sharpen

app = App(name="template-method", help="Plain decoding at a fraction of the temperature.")


@app.command
def temperature(asked: float, /, *, factor: float = 0.5) -> None:
    """Print the temperature that is used when another one is asked for."""
    config = TemplateMethodConfig(factor=factor)
    used = sharpen(Sampling(temperature=asked), config.factor).temperature
    sys.stdout.write(f"{used:g}\n")
