"""A model with its tokenizer, and what it offers.

Not for: opening one (`opening`), or running it over growing sequences (`session`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmsmith.errors import CapabilityError, UsageError
from lmsmith.models.limits import context_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from lmsmith.models.adapter import Adapter
    from lmsmith.models.session import Session


class LM:
    """A language model or encoder with its tokenizer.

    Attributes:
        name: What messages and reports call it.
        model: The transformers model, in evaluation mode and without gradients.
        tokenizer: Its fast tokenizer, or `None`.
        adapter: The LoRA adapter that is attached, or `None`.
        layers: Number of transformer blocks.
        width: Size of the residual stream.
        vocabulary: Size of the logits; may exceed the tokenizer's.
        context: Most positions a sequence may have; `limits.NO_LIMIT` where there is no limit.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, name: str = "model"
    ) -> None:
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.adapter: Adapter | None = None
        config = model.config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.width: int = config.hidden_size
        self.context: int = context_of(config)
        head = model.get_output_embeddings()
        self._generates = head is not None
        self.vocabulary: int = head.weight.shape[0] if head is not None else config.vocab_size

    def __repr__(self) -> str:
        return f"LM({self.name!r}, {self.dtype}, {self.device})"

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.model.dtype

    @property
    def offers(self) -> frozenset[str]:
        """What a method may ask for.

        `logits` (it predicts tokens), `embedding` (it embeds texts), `hidden`, `adapter` (one is
        attached), `chat` (the tokenizer has a template), `bpe` (a BPE tokenizer that can spell
        every byte), `sentencepiece-bpe` (such a one over characters, with tokens for single bytes).
        """
        offers = {"hidden", "logits" if self._generates else "embedding"}
        if self.adapter is not None:
            offers.add("adapter")
        if self.tokenizer is not None and self.tokenizer.chat_template:
            offers.add("chat")
        return frozenset(offers) | self._spelling

    @cached_property
    def _spelling(self) -> frozenset[str]:
        from tokenizers import models

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not isinstance(backend.model, models.BPE):
            return frozenset()
        if backend.model.byte_fallback:
            return frozenset({"bpe", "sentencepiece-bpe"})
        return frozenset({"bpe"} if "ByteLevel" in repr(backend.decoder) else ())

    # Special tokens

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text or a reply: the model's, the tokenizer's, the chat template's."""
        generation = getattr(self.model, "generation_config", None)
        ids = _as_ids(getattr(generation, "eos_token_id", None))
        ids |= _as_ids(getattr(self.model.config.get_text_config(), "eos_token_id", None))
        if self.tokenizer is not None:
            ids |= _as_ids(self.tokenizer.eos_token_id)
            ids |= _as_ids(self._end_of_turn())
        return frozenset(ids)

    @cached_property
    def bos_id(self) -> int | None:
        """The token that starts a text, if the model has one."""
        if self.tokenizer is not None:
            return self.tokenizer.bos_token_id
        return getattr(self.model.config.get_text_config(), "bos_token_id", None)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer starts plain text with `bos_id`."""
        return self.bos_id is not None and self.encode("a")[:1] == [self.bos_id]

    def _end_of_turn(self) -> int | None:
        """The special token that the chat template puts right after a reply."""
        tokenizer = self._tokens()
        if not tokenizer.chat_template:
            return None
        reply = "lmsmith"
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": reply}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # templates are programs; one that needs more than this says nothing here
            return None
        after = self.encode(text.rpartition(reply)[2].lstrip(), add_special=False)[:1]
        added = tokenizer.added_tokens_decoder.get(after[0]) if after else None
        return after[0] if added is not None and added.special else None

    # Text

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text.
            add_special: Add what the tokenizer adds by itself, such as BOS.

        Raises:
            CapabilityError: The model has no tokenizer.
        """
        return self._tokens().encode(text, add_special_tokens=add_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out.

        Raises:
            CapabilityError: The model has no tokenizer.
        """
        return self._tokens().decode(list(ids), skip_special_tokens=True)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the model's reply begins.

        Raises:
            CapabilityError: The model has no chat template.
            UsageError: The template does not take these messages.
        """
        from jinja2 import TemplateError

        tokenizer = self._tokens()
        if "chat" not in self.offers:
            raise CapabilityError(
                "a chat prompt", "a chat template", "none", f"give {self.name} plain text"
            )
        try:
            return tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"the chat template of {self.name} does not take these messages: {error}"
            ) from None

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: Text, UTF-8 bytes, token ids, or chat messages.

        Raises:
            UsageError: It is empty, longer than the context, not UTF-8, or holds a wrong id.
            CapabilityError: Messages, but no chat template; text, but no tokenizer.
        """
        if isinstance(prompt, bytes):
            try:
                prompt = prompt.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"the prompt is not UTF-8: byte 0x{error.object[error.start]:02x} at "
                    f"{error.start}; give it as UTF-8 text"
                ) from None
        if isinstance(prompt, str):
            if any("\ud800" <= letter <= "\udfff" for letter in prompt):
                raise UsageError("the prompt holds a lone surrogate; give it as UTF-8 text")
            ids = self.encode(prompt)
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            ids = self.chat_ids(prompt)
        else:
            ids = self._checked(prompt)
        if not ids:
            raise UsageError(
                f"the prompt is empty, and {self.name} has no token that starts a text; "
                "give at least one character"
            )
        if len(ids) > self.context:
            raise UsageError(
                f"the prompt has {len(ids):,} tokens, but {self.name} reads at most "
                f"{self.context:,}; shorten it"
            )
        return ids

    def _checked(self, prompt: Any) -> list[int]:
        given = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor or an array
        # A boolean is an integer to Python, and was never meant as a token.
        if not isinstance(given, Sequence) or not all(
            hasattr(token, "__index__") and not isinstance(token, bool) for token in given
        ):
            what = type(prompt).__name__
            inside = {type(token).__name__ for token in given} if isinstance(given, list) else ()
            raise UsageError(
                "a prompt is text, bytes, token ids or chat messages, not "
                f"{what}{' of ' + ', '.join(sorted(inside)) if inside else ''}"
            )
        ids = [index(token) for token in given]
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise UsageError(
                    f"{token} is no token of {self.name}; ids are 0 to {self.vocabulary - 1}"
                )
        return ids

    def _tokens(self) -> Any:
        if self.tokenizer is None:
            raise CapabilityError("text", "a tokenizer", "none", f"give {self.name} token ids")
        return self.tokenizer

    # Running

    def session(self, prompts: Iterable[Any] | None = None) -> Session:
        """A new Session, with one row a prompt; nothing is computed yet.

        Raises:
            UsageError: A prompt that cannot be used.
            CapabilityError: An encoder has no session.
        """
        from lmsmith.models.session import Session

        if not self._generates:
            raise CapabilityError("a session", "logits", ", ".join(sorted(self.offers)))
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable | None):
            raise UsageError(
                f"a session takes a list of prompts, not {type(prompts).__name__}; put one prompt "
                "into a list of its own"
            )
        rows = [self.prompt_ids(prompt) for prompt in prompts or ()]
        session = Session(self)
        for ids in rows:
            session.add(ids)
        return session

    def load_adapter(self, adapter: str | Path | Adapter) -> Adapter:
        """Attach a LoRA adapter; rows choose its strength. One that was attached before goes.

        Sessions that are open go on with the new one, and compute again what the old one changed.

        Args:
            adapter: An adapter, or a folder in PEFT's format.

        Raises:
            ModelFileError: The folder has no adapter, or its files are broken.
            UsageError: It does not fit this model.
        """
        from lmsmith.models.adapter import Adapter

        if not isinstance(adapter, Adapter):
            adapter = Adapter.load(adapter)
        adapter.attach(self.model)  # an adapter that does not fit leaves the one before in place
        if self.adapter is not None and self.adapter is not adapter:
            self.adapter.detach()
        self.adapter = adapter
        return adapter


def _as_ids(value: int | Sequence[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
