"""Read a GGUF file through transformers, and put right what that loses.

transformers rebuilds a tokenizer from a GGUF file's metadata, but the file does not hold all of it
and some of what it holds is passed over. `read_tokenizer` repairs this and says what it did.

Not for: where files come from or are kept (`known`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmsmith.display.progress import progress, track
from lmsmith.errors import ModelFileError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Pre-tokenizers that split off every digit before GPT-2's rule (llama.cpp's table of them).
DIGIT_SPLITTERS = {
    "codeshell",
    "command-r",
    "exaone",
    "minerva-7b",
    "refact",
    "smollm",
    "starcoder",
}
# Those that are GPT-2's rule and no more, which is what transformers falls back to.
PLAIN = {"default", "gpt-2", "jais", "mpt", "olmo", "phi-2"}
# Models of these pre-tokenizers normalise text to NFC; a GGUF file has no field for that.
NFC = {"qwen2"}

# Tokens with a role: what transformers calls them, and what GGUF does.
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "unk_token": "unknown",
}

_UNUSED = 5  # a GGUF token type: an id without a token, there to fill up the matrix


def read_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """The tokenizer a GGUF file describes, and what was corrected in it.

    Args:
        path: The file.

    Returns:
        The tokenizer, and one sentence a correction of what transformers makes of the file.

    Raises:
        ModelFileError: The file is not a whole GGUF file, or its tokenizer is not supported.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    metadata = read_metadata(path)
    with progress(f"reading the tokenizer of {path.name}"), quiet(), reading(path):
        read = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        backend, corrections = _corrected(json.loads(read.backend_tokenizer.to_str()), metadata)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
            model_max_length=metadata["context_length"],
            **metadata["named"],
        )
    tokenizer.chat_template = read.chat_template
    return tokenizer, corrections


def read_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a GGUF file, its weights dequantised.

    Args:
        path: The file.
        dtype: What the weights become; dequantised values are exact in float32 only.

    Raises:
        ModelFileError: The file is not a whole GGUF file, or its architecture is not supported.
    """
    import torch
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils
    from transformers.utils.quantization_config import GgufConfig

    read_metadata(path)
    shown = modeling_gguf_pytorch_utils.tqdm
    # The reader of most architectures has a progress bar of its own; ours takes its place.
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: track(
        tensors, f"dequantising {path.name}", unit="tensors"
    )
    try:
        with quiet(), reading(path), torch.no_grad():
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                gguf_file=path.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
    finally:
        modeling_gguf_pytorch_utils.tqdm = shown
    # The weights are plain numbers now; with its quantizer the model would refuse to be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    for left_over in ("quantization_config", "unk_token_id"):
        if hasattr(model.config, left_over):
            delattr(model.config, left_over)
    model.config.name_or_path = ""
    return model


def convert(path: Path, folder: Path, stops: Sequence[str] = ()) -> list[str]:
    """Write a GGUF file's model and tokenizer to a folder, as transformers keeps them.

    Weights are written in float32: a 4-bit weight is a 16-bit scale times an integer plus a 16-bit
    offset, which needs more bits than float16 or bfloat16 have. So the model's logits are those of
    the file itself, and a smaller dtype is chosen when the model is opened, rounding once.

    Args:
        path: The file.
        folder: Where to; it exists and is empty.
        stops: Texts of all tokens that end a reply, where the file's one end token is not enough.

    Returns:
        What was corrected, one sentence each.

    Raises:
        ModelFileError: The file is not whole, or not supported.
    """
    import torch

    tokenizer, corrections = read_tokenizer(path)
    model = read_model(path, torch.float32)
    if stops:
        ids = [tokenizer.convert_tokens_to_ids(text) for text in stops]
        model.generation_config.eos_token_id = ids
        corrections.append(f"generation ends at {', '.join(stops)}, as the original's does")
    with progress(f"writing the weights of {path.name}"), quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return corrections


def read_metadata(path: Path) -> dict[str, Any]:
    """What corrections need of a GGUF file's metadata; also checks that the file is whole.

    Raises:
        ModelFileError: It is not a GGUF file, or it is cut off.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    with reading(path):
        metadata, _ = read_gguf_metadata(str(path), arrays)
        tokens, types = (metadata.get(name) or () for name in arrays)
        named = {
            name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()
        }
        return {
            "tokens": tokens,
            "named": {name: None if id is None else tokens[id] for name, id in named.items()},
            "model": metadata.get("tokenizer.ggml.model", ""),
            "pre": metadata.get("tokenizer.ggml.pre", "default"),
            "fillers": [
                text
                for token, (text, kind) in enumerate(zip(tokens, types, strict=False))
                if kind == _UNUSED and text == f"[PAD{token}]"
            ],
            "context_length": metadata.get(f"{metadata['general.architecture']}.context_length"),
        }


def _corrected(state: dict[str, Any], metadata: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A tokenizer's JSON form put right, and what was done."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    pre, corrections = metadata["pre"], []
    if metadata["model"] == "gpt2":
        if pre in DIGIT_SPLITTERS:
            state["pre_tokenizer"] = {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {
                        "type": "ByteLevel",
                        "add_prefix_space": False,
                        "trim_offsets": True,
                        "use_regex": True,
                    },
                ],
            }
            corrections.append(f"pre-tokenizer {pre!r} splits off every digit before GPT-2's rule")
        elif pre not in PLAIN and pre not in gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS:
            warnings.warn(
                f"the pre-tokenizer {pre!r} is not known; text is split by GPT-2's rule, which may "
                "differ from what the model was trained on",
                stacklevel=2,
            )
        if pre in NFC and state["normalizer"] is None:
            state["normalizer"] = {"type": "NFC"}
            corrections.append(f"text is normalised to NFC, as models of {pre!r} do")
    present = set(metadata["tokens"])
    invented = [token for token in state["added_tokens"] if token["content"] not in present]
    if invented:
        # The class that transformers goes through has default tokens, past the end of the matrix.
        state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in present]
        names = ", ".join(token["content"] for token in invented)
        corrections.append(f"no tokens that the file does not have ({names})")
    vocabulary = state["model"].get("vocab")
    if isinstance(vocabulary, dict):
        fillers = metadata["fillers"]
        for text in fillers:
            vocabulary.pop(text, None)
        if fillers:
            corrections.append(f"{len(fillers)} ids that only fill up the matrix are no tokens")
    return state, corrections


@contextmanager
def reading(path: Path, advice: str = "fetch it again") -> Iterator[None]:
    """Turn whatever a reader says about a broken file into one clear line.

    Readers raise many kinds of errors on broken files, and none that is theirs alone.

    Raises:
        ModelFileError: Reading failed.
    """
    try:
        yield
    except (ModelFileError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        said = said if len(said) < 200 else said[:200] + "..."
        raise ModelFileError(f"cannot read {path}: {said}; {advice}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' bars and remarks off the terminal; errors still arrive as exceptions."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    restore: Callable[[], None] = (
        logging.enable_progress_bar if bars else logging.disable_progress_bar
    )
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        restore()
