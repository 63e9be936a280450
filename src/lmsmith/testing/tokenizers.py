"""Tiny byte-level tokenizers, so that tests need no download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, START, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, PAD, START, END)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the merges are learned from: words, numbers, code and two other scripts.
TEXT = (
    "The tokenizer reads the text and the model reads the tokens. A token is a piece of a word, "
    "and another token is the other piece of the same word; that is why the end of the text "
    "matters. They're in the middle of it, aren't they? There were 12 of them in 1999, or 12345.",
    "def token(text):\n    for piece in text.split():\n        if piece == 'the':\n"
    "            return piece\n    return None\n",
    "你好,世界。你好,模型。Привет, мир. Привет, модель. naïve café façade 🙂🙂",
)


def tiny_tokenizer(merges: int = 128) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in GPT-2's manner, with a chat template.

    Ids are: 5 special tokens, the 256 bytes, then one token a merge (389 in all by default).
    It adds no special tokens to plain text.

    Args:
        merges: Merges to learn from a fixed text; 0 gives one token a byte.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIALS) + 256 + merges,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Twice, so that every pair that occurs is frequent enough to be merged.
    tokenizer.train_from_iterator(TEXT + TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


class ByteCodec:
    """Text as its UTF-8 bytes, with one end mark: the simplest tokenizer there is.

    Attributes:
        size: Ids in all: 256 bytes and the end.
        end: Id of the end mark.
    """

    size = 257
    end = 256

    def encode(self, text: str) -> list[int]:
        """Byte values of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        """Text of byte values; ends are left out, bytes that are not UTF-8 show as U+FFFD."""
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")
