"""Losses: what a step minimises, and the cross-entropy that never holds all logits.

A loss function takes the model and a `Batch` and returns a `Loss`. The step minimises the sum of
the totals over the sum of the weights, over all forward passes and processes of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmsmith.errors import CapabilityError
from lmsmith.training.attention import packed_attention
from lmsmith.training.batches import Batch

# Largest difference from the model's own logits, as a share of their range, that rounding explains.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
_HALF_ROUNDING = 0.1


class Loss(NamedTuple):
    """What a loss function returns for a batch.

    Attributes:
        total: `[]`; the sum over what counts in the batch, with its graph.
        weight: What the total is a sum over: as a rule the number of tokens that count.
    """

    total: Tensor
    weight: float


LossFunction = Callable[[nn.Module, Batch], Loss]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scales: Tensor | None = None,
    chunk: int = 256,
) -> Tensor:
    """Sum of the cross-entropies of a linear head, in memory of a few positions' logits.

    Gradients are computed along with the loss, chunk by chunk, so logits are neither kept nor
    computed again. Softmax and sum are in float32 at least, whatever the inputs are.

    Args:
        hidden: `[tokens, width]`; final hidden states.
        weight: `[vocabulary, width]`; the head.
        targets: `[tokens]`.
        bias: `[vocabulary]`; the head's.
        softcap: Bound of the logits: `softcap * tanh(logits / softcap)` (Gemma).
        scales: `[tokens]`; factor of each token's loss, a constant; 1 when `None`.
        chunk: Tokens whose logits exist at one time.

    Returns:
        `[]`; the sum in nats, float32 at least.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, scales, softcap, chunk)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scales: Tensor | None,
        softcap: float | None,
        chunk: int,
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        needs = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=exact) if needs[2] else None
        total = torch.zeros((), dtype=exact, device=hidden.device)
        # One buffer serves all chunks; a fresh one each would cost more than the softmax in it.
        shape = (min(chunk, len(targets)), len(weight))
        buffer = torch.empty(shape, dtype=exact, device=hidden.device)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            h, target = hidden[part], targets[part, None]
            logits = functional.linear(h, weight, bias).to(exact)
            if softcap is not None:
                logits = logits.div_(softcap).tanh_()
                slope = 1 - logits.square()
                logits *= softcap
            logp = torch.log_softmax(logits, 1, out=buffer[: len(h)])
            scale = None if scales is None else scales[part, None]
            nll = -logp.gather(1, target)
            total += (nll if scale is None else nll * scale).sum()
            if not any(needs):
                continue
            d_logits = logp.exp_()
            d_logits.scatter_add_(1, target, -torch.ones_like(nll))
            if scale is not None:
                d_logits *= scale
            if softcap is not None:
                d_logits *= slope
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None and exact == hidden.dtype:
                d_weight.addmm_(d_logits.T, h)
            elif d_weight is not None:
                d_weight += d_logits.T @ h
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> Any:
        gradients = [
            None if gradient is None else (gradient * d_total).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None, None, None


class NextTokenLoss:
    """The causal language-model loss, for transformers models and plain modules.

    A transformers model gets a batch as one row without padding, and its head is run, in chunks,
    only where a token counts. Whether that gives this model's own logits is tried out once, on a
    few tokens; a model of another build gets padded rows and its own head instead. A plain module
    maps ids `[examples, longest]` to logits `[examples, longest, vocabulary]`, causally.

    Attributes:
        packed: Whether batches go in without padding.
    """

    def __init__(self, model: nn.Module, chunk: int = 256) -> None:
        self.chunk = chunk
        self._softcap: float | None = None
        config: Any = getattr(model, "config", None)
        if hasattr(config, "get_text_config"):
            self._softcap = getattr(config.get_text_config(), "final_logit_softcapping", None)
        self.packed = _is_transformers(model) and self._same_logits(model)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """The sum of the negative log-likelihoods of the tokens that count, in nats."""
        weight = float(len(batch.targets))
        if self.packed:
            hidden = hidden_states(model, batch)[batch.predictors]
            head: Any = model.get_output_embeddings()  # type: ignore[operator]
            total = chunked_cross_entropy(
                hidden,
                head.weight,
                batch.targets,
                bias=getattr(head, "bias", None),
                softcap=self._softcap,
                chunk=self.chunk,
            )
            return Loss(total, weight)
        logits = batch.unpadded(_logits(model, batch.padded()))[batch.predictors].float()
        return Loss(functional.cross_entropy(logits, batch.targets, reduction="sum"), weight)

    @torch.no_grad()
    def _same_logits(self, model: Any) -> bool:
        """Whether body, packed attention and head give what the model gives example by example."""
        head = model.get_output_embeddings()
        lengths = (4, 3)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(len(head.weight), (sum(lengths),), generator=generator)
        batch = Batch(ids.to(model.device), torch.ones_like(ids, dtype=torch.bool), lengths, (0, 1))
        training = model.training
        model.eval()
        try:
            own = [_logits(model, part[None])[0] for part in batch.ids.split(lengths)]
            got = functional.linear(hidden_states(model, batch), head.weight, head.bias)
        except (CapabilityError, TypeError, AttributeError, RuntimeError):
            return False
        finally:
            model.train(training)
        if self._softcap is not None:
            got = torch.tanh(got / self._softcap) * self._softcap
        wanted = torch.cat(own)
        share = (got - wanted).abs().max() / wanted.std()
        return bool(share < _ROUNDING.get(wanted.dtype, _HALF_ROUNDING))


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """Final hidden states `[tokens, width]` of a transformers model, each example on its own.

    Raises:
        CapabilityError: The model cannot take examples end to end.
    """
    with packed_attention(model.config.get_text_config()):
        found = model.base_model(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            lengths=batch.lengths,
        )
    return found.last_hidden_state[0]


def _is_transformers(model: Any) -> bool:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return isinstance(head, nn.Linear) and hasattr(model, "base_model")


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    options = {"use_cache": False} if _is_transformers(model) else {}
    output = model(ids, **options)
    return output if isinstance(output, Tensor) else output.logits
