"""Named places in a model where activations are read and edited.

`embed` is what enters the first layer, `layers.N.resid_in` and `layers.N.resid_out` the residual
stream around a layer, `layers.N.attn_out` and `layers.N.mlp_out` what the layer's two halves add to
it (so `resid_in + attn_out + mlp_out == resid_out`), `final` the normalised output that the head
reads. Each is the input or output of one of the model's own modules; `FAMILIES` says of which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lmsmith.errors import CapabilityError, UnknownNameError, UsageError

Edit = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """Names of the modules whose outputs are the sites; those of halves are within a layer."""

    embed: str
    layers: str
    attention: str
    mlp: str
    final: str


_LLAMA = Family("embed_tokens", "layers", "self_attn", "mlp", "norm")
# These normalise what a half adds, so the addend is the norm's output.
_POST_NORM = Family(
    "embed_tokens", "layers", "post_attention_layernorm", "post_feedforward_layernorm", "norm"
)
_GPT2 = Family("drop", "h", "attn", "mlp", "ln_f")
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "gemma2": _POST_NORM,
    "gemma3_text": _POST_NORM,
    "olmo2": _POST_NORM,
    "gpt2": _GPT2,
}


def family_of(decoder: Any) -> Family:
    """The site map of a model's decoder, by its type or else by the names of its modules.

    Raises:
        CapabilityError: The model is not built like any family known here.
    """
    kind = decoder.config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind]
    for family in (_POST_NORM, _LLAMA, _GPT2):
        layers = getattr(decoder, family.layers, None)
        names = [name for name, _ in layers[0].named_children()] if layers else []
        outer = all(hasattr(decoder, name) for name in (family.embed, family.final))
        # A factor on what is added to the residual stream would break the sites' meaning.
        scaled = layers and hasattr(layers[0], "residual_multiplier")
        if outer and not scaled and {family.attention, family.mlp} <= set(names):
            if family is _LLAMA and any("post_" in n and "feed" in n for n in names):
                continue
            return family
    raise CapabilityError(
        "reading or editing activations",
        "a model whose sites are known",
        f"the type {kind!r}",
        f"known: {', '.join(FAMILIES)}",
    )


class Sites:
    """The sites of one model, and what is to happen at them."""

    def __init__(self, model: Any) -> None:
        self._decoder = model.get_decoder()
        self._captures: list[str] = []
        self._edits: list[dict[str, Edit]] = []
        self._reached: set[str] = set()

    @property
    def wanted(self) -> bool:
        """Whether anything is captured or edited now."""
        return bool(self._captures or any(self._edits))

    def names(self) -> list[str]:
        """All site names of the model."""
        count = len(getattr(self._decoder, family_of(self._decoder).layers))
        halves = ("resid_in", "attn_out", "mlp_out", "resid_out")
        return [
            "embed",
            *(f"layers.{n}.{half}" for n in range(count) for half in halves),
            "final",
        ]

    @contextmanager
    def capturing(self, sites: Sequence[str]) -> Iterator[None]:
        """Capture these sites in every forward within the context."""
        self._check(sites)
        before = self._captures
        self._captures = [*before, *(site for site in sites if site not in before)]
        try:
            yield
        finally:
            self._captures = before

    @contextmanager
    def editing(self, edits: Mapping[str, Edit]) -> Iterator[None]:
        """Edit these sites in every forward within the context."""
        self._check(list(edits))
        reached, self._reached = self._reached, set()
        self._edits.append(dict(edits))
        try:
            yield
            missed = sorted(set(edits) - self._reached)
            if missed:
                raise UsageError(f"the edit at {missed[0]} was never reached: nothing was fed")
        finally:
            self._edits.pop()
            self._reached |= reached

    @contextmanager
    def watched(self, lanes: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """Hooks for one forward; the dict fills with captures `[len(lanes), new, width]`.

        Args:
            lanes: Places in the model's batch of the rows that are meant, in their order.
        """
        captured: dict[str, Tensor] = {}

        def visit(site: str, activation: Tensor) -> Tensor | None:
            rows = activation[lanes]
            edits = [edit[site] for edit in self._edits if site in edit]
            for edit in edits:
                edited = edit(rows)
                if not isinstance(edited, Tensor) or edited.shape != rows.shape:
                    raise UsageError(
                        f"the edit at {site} must return a tensor of shape {tuple(rows.shape)}"
                    )
                rows = edited.to(activation.dtype)
            if site in self._captures:
                captured[site] = rows
            if not edits:
                return None
            self._reached.add(site)
            activation = activation.clone()
            activation[lanes] = rows
            return activation

        with ExitStack() as stack:
            for site in dict.fromkeys([*self._captures, *(s for e in self._edits for s in e)]):
                stack.callback(self._hook(site, visit).remove)
            yield captured

    def _hook(self, site: str, visit: Callable[[str, Tensor], Tensor | None]) -> Any:
        family = family_of(self._decoder)
        if site in ("embed", "final"):
            module = getattr(self._decoder, family.embed if site == "embed" else family.final)
        else:
            _, number, half = site.split(".")
            module = getattr(self._decoder, family.layers)[int(number)]
            if half == "resid_in":

                def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
                    edited = visit(site, args[0])
                    return None if edited is None else (edited, *args[1:])

                return module.register_forward_pre_hook(before)
            if half != "resid_out":
                module = getattr(module, family.attention if half == "attn_out" else family.mlp)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):
                edited = visit(site, output[0])
                return None if edited is None else (edited, *output[1:])
            return visit(site, output)

        return module.register_forward_hook(after)

    def _check(self, sites: Sequence[str]) -> None:
        known = self.names()
        for site in sites:
            if site not in known:
                raise UnknownNameError("site", site, known)
