"""How many CPU threads torch uses for a command."""

from __future__ import annotations


def set_threads(threads: int | None = None) -> None:
    """Set torch's thread count, or measure which one is fastest on this machine right now.

    On a small or busy machine one thread can be several times faster than all of them; one quick
    comparison sees that.
    """
    import torch

    from lmsmith.evaluation.environment import fastest_threads

    torch.set_num_threads(fastest_threads(repeats=1) if threads is None else threads)
