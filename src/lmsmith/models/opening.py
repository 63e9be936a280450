"""Open a model: a known name, a local folder, a `.gguf` file, or a hub id.

Not for: fetching and converting known models (`known`) or what an open model can do (`lm`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmsmith.display.progress import progress
from lmsmith.errors import (
    CapabilityError,
    ModelFileError,
    ModelSourceError,
    UnknownNameError,
    UsageError,
)
from lmsmith.models import known

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from lmsmith.models.lm import LM

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "hpu", "meta", "mps", "mtia", "npu", "xla", "xpu")
# Seconds until the hub counts as unreachable, name resolution included.
HUB_PATIENCE = 6.0


class _Place(NamedTuple):
    """Where a model is: a folder or hub id for transformers, or a GGUF file."""

    where: str
    gguf: Path | None = None
    advice: str = "fetch it again"
    local: bool = True


def open_model(
    spec: str | os.PathLike[str],
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    adapter: Any = None,
    trust_remote_code: bool = False,
) -> LM:
    """Open a model.

    Args:
        spec: A known name (`lmsmith models`), a folder, a `.gguf` file, or a hub id `owner/name`.
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: bfloat16 where the processor computes in
            it natively, else float32.
        device: Such as `cpu` or `cuda:1`; `auto` is the first accelerator, else the CPU.
        adapter: A LoRA adapter to attach, or its folder.
        trust_remote_code: Run code that a folder or hub id brings along.

    Raises:
        UnknownNameError: Not a known name, and nothing else either.
        UsageError: A dtype or device that there is not; its spelling is checked first of all.
        ModelSourceError: No registry or hub answered, or it has no such model.
        ModelFileError: A file is missing, cut off or broken.
        StorageError: No space in the cache.
    """
    if isinstance(dtype, str) and dtype not in ("auto", *DTYPES):
        raise UnknownNameError("dtype", dtype, ("auto", *DTYPES))
    _check_spelling(device)
    # Before torch is imported, so that what is not there is told at once.
    place = _find(spec)

    import torch

    from lmsmith.models.lm import LM

    chosen_device = resolve_device(device)
    chosen_dtype = resolve_dtype(dtype, chosen_device)
    name = str(spec)
    model: Any
    with progress(f"opening {name}"), torch.no_grad():
        if place.gguf is not None:
            from lmsmith.models import gguf

            tokenizer, _ = gguf.read_tokenizer(place.gguf)
            model = gguf.read_model(place.gguf, chosen_dtype)
        else:
            # The tokenizer first: it is quick, and a folder that lacks it fails at once.
            tokenizer = read_tokenizer(place.where, place.advice, place.local, trust_remote_code)
            model = _read_model(place, chosen_dtype, trust_remote_code)
        lm = LM(model.to(chosen_device), tokenizer, name=name)
        if adapter is not None:
            lm.load_adapter(adapter)
    return lm


def load_tokenizer(
    spec: str | os.PathLike[str], trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    """A model's tokenizer without its weights; arguments and errors as `open_model`."""
    place = _find(spec)
    if place.gguf is not None:
        from lmsmith.models import gguf

        return gguf.read_tokenizer(place.gguf)[0]
    return read_tokenizer(place.where, place.advice, place.local, trust_remote_code)


def offers_of(spec: str | os.PathLike[str], trust_remote_code: bool = False) -> frozenset[str]:
    """What a model surely offers, told before anything large is fetched or read.

    A known model is looked up, of any other only the configuration is read. Arguments and errors
    as `open_model`.

    Returns:
        `hidden`, and `logits` or `embedding`; see `LM.offers` for what an open model adds.
    """
    if isinstance(spec, str) and spec in known.KNOWN:
        return frozenset({"hidden", known.KNOWN[spec].predicts})
    place = _find(spec)
    generates = place.gguf is not None or _generates(_read_config(place, trust_remote_code))
    return frozenset({"hidden", "logits" if generates else "embedding"})


def check_offers(
    spec: str | os.PathLike[str], needs: Iterable[str], who: str, trust_remote_code: bool = False
) -> None:
    """Check, before anything large is fetched or read, that a model is of the kind that is needed.

    Needs that only show once the model is open (`chat`, `bpe`, ...) are not judged.

    Args:
        spec: As `open_model`.
        needs: What it must offer.
        who: The method that needs it, for the message.
        trust_remote_code: As `open_model`.

    Raises:
        CapabilityError: It does not predict tokens, or does not embed, as is needed.
    """
    offers = offers_of(spec, trust_remote_code)
    missing = sorted({"logits", "embedding"} & set(needs) - offers)
    if missing:
        raise CapabilityError(who, " and ".join(missing), f"{', '.join(sorted(offers))} ({spec})")


# Where a model is


def _find(spec: str | os.PathLike[str]) -> _Place:
    name = os.fspath(spec)
    if isinstance(spec, str) and name in known.KNOWN:
        return _Place(str(known.pull(name)), advice=f"run: lmsmith models pull {name} --force")
    # os.path, unlike pathlib, takes strings that can be no path: too long, or of an unknown user.
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return _folder(path)
    if path.suffix == ".gguf":
        if os.path.isfile(path):
            return _Place(str(path.parent), gguf=path.resolve())
        raise ModelFileError(f"{name} is not there; give the path of a .gguf file")
    if os.path.exists(path):
        raise ModelFileError(f"{name} is neither a model folder nor a .gguf file")
    if isinstance(spec, str) and _is_hub_id(name):
        return _Place(name, local=_only_cached(name))
    if os.sep in name:
        raise ModelFileError(f"there is no folder {name}; give a model folder or a hub id")
    raise UnknownNameError("model", name, known.KNOWN)


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _folder(path: Path) -> _Place:
    if (path / "config.json").is_file():
        return _Place(str(path))
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _Place(str(path), gguf=files[0].resolve())
    if files:
        raise UsageError(f"{path} holds {len(files)} .gguf files; name one, such as {files[0]}")
    raise ModelFileError(f"{path} has no config.json and no .gguf file; it is not a model folder")


def _only_cached(name: str) -> bool:
    """Whether a hub model must come from the hub client's cache, as no hub answers.

    Raises:
        ModelSourceError: No hub answers and it is not in the cache, or the hub does not give it.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    if constants.HF_HUB_OFFLINE:
        if cached:
            return True
        raise ModelSourceError(f"{name} is not in the hub cache, and HF_HUB_OFFLINE forbids asking")
    answer = _ask_hub(f"{constants.ENDPOINT}/{name}/resolve/main/config.json")
    if isinstance(answer, int) and answer < 400:
        return False
    if cached:
        return True
    if isinstance(answer, str):
        raise ModelSourceError(
            f"no hub answered for {name} ({constants.ENDPOINT}: {answer}); give a local folder, or "
            "a known name: lmsmith models"
        )
    if answer in (401, 403):
        raise ModelSourceError(
            f"the hub does not give {name}: no such model, or it needs a login (hf auth login)"
        )
    if answer == 404:
        raise ModelSourceError(f"the hub has no transformers model {name}; check the spelling")
    raise ModelSourceError(f"the hub answered {answer} for {name}; try again later")


def _ask_hub(url: str) -> int | str:
    """The HTTP status of a URL, or why there was no answer; in `HUB_PATIENCE` seconds at most."""
    import httpx
    from huggingface_hub.utils import build_hf_headers

    answer: list[int | str] = []

    def ask() -> None:
        try:
            response = httpx.head(
                url, headers=build_hf_headers(), timeout=HUB_PATIENCE, follow_redirects=True
            )
            answer.append(response.status_code)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            answer.append(" ".join(str(error).split()) or type(error).__name__)

    # Name resolution has no timeout of its own, so it is waited for from outside.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_PATIENCE)
    return answer[0] if answer else "no answer in time"


# Reading it


def read_tokenizer(
    where: str, advice: str, local: bool = True, trust_remote_code: bool = False
) -> Any:
    """The fast tokenizer in a folder or of a hub id.

    Args:
        where: The folder or hub id.
        advice: What to do if it cannot be read.
        local: Ask no hub.
        trust_remote_code: Run code that it brings along.

    Raises:
        ModelFileError: It cannot be read, or is not a fast one.
    """
    from transformers import AutoTokenizer

    from lmsmith.models.gguf import quiet, reading

    with quiet(), reading(Path(where), advice):
        tokenizer = AutoTokenizer.from_pretrained(
            where, local_files_only=local, trust_remote_code=trust_remote_code
        )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelFileError(
            f"{where} has no tokenizer.json; save its tokenizer as a fast one first"
        )
    return tokenizer


def _read_model(place: _Place, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    from transformers import AutoModel, AutoModelForCausalLM

    from lmsmith.models.gguf import quiet, reading

    config = _read_config(place, trust_remote_code)
    with quiet(), reading(Path(place.where), place.advice):
        kind: Any = AutoModelForCausalLM if _generates(config) else AutoModel
        model, loaded = kind.from_pretrained(
            place.where,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=place.local,
            trust_remote_code=trust_remote_code,
        )
    # transformers fills what a file lacks with random numbers.
    missing = sorted(loaded["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        # An encoder saved with another head, such as mask prediction, has none.
        model.pooler, missing = None, []
    if missing:
        raise ModelFileError(
            f"{place.where} lacks {len(missing)} of its weights, such as {missing[0]}; "
            f"{place.advice}"
        )
    return model


def _read_config(place: _Place, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    from lmsmith.models.gguf import quiet, reading

    with quiet(), reading(Path(place.where), place.advice):
        return AutoConfig.from_pretrained(
            place.where, local_files_only=place.local, trust_remote_code=trust_remote_code
        )


def _generates(config: Any) -> bool:
    """Whether a configuration is of a model that predicts the next token."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = config.architectures or ()
    if not architectures:
        return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    return any(name.endswith(endings) for name in architectures)


# How it is computed


def _check_spelling(device: Any) -> None:
    """Check a device's name without torch: whether it is there is asked once torch is needed."""
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind not in DEVICES or (colon and not (number.isdecimal() and kind != "auto")):
            raise UnknownNameError("device", device, DEVICES)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that a name stands for; `auto` is the first accelerator, else the CPU.

    Raises:
        UsageError: It cannot be used here.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except Exception:
        raise UsageError(
            f"device {str(device)!r} cannot be used on this machine; try 'auto' or 'cpu'"
        ) from None
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that a name stands for on a device; `auto` as `open_model` says.

    Raises:
        UnknownNameError: Not one of `auto` and `DTYPES`.
    """
    import torch

    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        native = device.type != "cpu" or native_bfloat16()
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, ("auto", *DTYPES))
    return getattr(torch, dtype)


def native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices itself, rather than emulating it."""
    import torch

    for asked in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        question = getattr(torch.cpu, asked, None)
        if question is not None and question():
            return True
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
