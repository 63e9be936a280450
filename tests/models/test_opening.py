"""Opening a model from wherever it is, and one clear line where it cannot be."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from lmsmith.errors import (
    CapabilityError,
    ModelFileError,
    ModelSourceError,
    UnknownNameError,
    UsageError,
)
from lmsmith.models import check_offers, known, load_tokenizer, offers_of, open_model
from lmsmith.models.opening import native_bfloat16, resolve_dtype


@pytest.fixture(scope="module")
def folder(tmp_path_factory, source) -> Path:
    """The tiny model as transformers saves it."""
    path = tmp_path_factory.mktemp("folder")
    model, tokenizer = source
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def logits(model, ids=(5, 60, 7, 200)):
    return model(torch.tensor([ids])).logits


def fails(error: type[Exception], spec, **settings) -> str:
    with pytest.raises(error) as raised:
        open_model(spec, **settings)
    text = str(raised.value)
    assert "\n" not in text
    return text


# Where it may be


def test_a_folder(folder, source):
    lm = open_model(folder, dtype="float32", device="cpu")
    assert torch.equal(logits(lm.model), logits(source[0]))
    assert lm.name == str(folder)
    assert not lm.model.training
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())


def test_a_gguf_file_and_a_folder_that_holds_one(tiny_gguf, source):
    lm = open_model(tiny_gguf, dtype="float32", device="cpu")
    # transformers and llama.cpp order a head's numbers differently, so sums round differently.
    torch.testing.assert_close(logits(lm.model), logits(source[0]), atol=1e-4, rtol=0)
    assert lm.context == 256
    again = open_model(tiny_gguf.parent, dtype="float32", device="cpu")
    assert torch.equal(logits(again.model), logits(lm.model))


def test_a_converted_model_equals_the_file_opened_directly(tiny, monkeypatch):
    converted = known.pull("tiny", known=tiny.known)
    direct = open_model(tiny.gguf, dtype="float32", device="cpu")
    lm = open_model(converted, dtype="float32", device="cpu")
    assert torch.equal(logits(lm.model), logits(direct.model))
    assert lm.encode("the 12 tokens") == direct.encode("the 12 tokens")
    assert lm.eos_ids == {lm.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|eos|>")}


def test_a_known_name(tiny, monkeypatch):
    monkeypatch.setitem(known.KNOWN, "tiny", tiny.model)
    lm = open_model("tiny", device="cpu")
    assert lm.name == "tiny"
    assert load_tokenizer("tiny").encode("the token") == lm.encode("the token")
    weights = tiny.model.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    text = fails(ModelFileError, "tiny")
    assert str(weights) in text
    assert "lmsmith models pull tiny --force" in text


def test_an_encoder(tmp_path):
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from lmsmith.testing import tiny_tokenizer

    config = BertConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    model = BertModel(config)
    model.save_pretrained(tmp_path)
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    lm = open_model(tmp_path)
    assert "embedding" in lm.offers
    assert "logits" not in lm.offers
    assert (lm.layers, lm.width, lm.vocabulary, lm.context) == (2, 16, 400, 32)


def test_an_encoder_saved_without_its_pooler(tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import BertConfig, BertForMaskedLM

    from lmsmith.testing import tiny_tokenizer

    config = BertConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    model = BertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    lm = open_model(tmp_path, dtype="float32", device="cpu")
    assert "embedding" in lm.offers
    ids = torch.tensor([[5, 6, 7]])
    out = lm.model(ids)
    assert torch.equal(out.last_hidden_state, model.bert(ids).last_hidden_state)
    assert out.pooler_output is None  # rather than random numbers
    weights = load_file(tmp_path / "model.safetensors")
    del weights["bert.encoder.layer.0.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "output.dense.weight" in fails(ModelFileError, tmp_path)


def test_opening_says_nothing(folder, capfd):
    open_model(folder)
    assert capfd.readouterr() == ("", "")


# How it is computed


def test_dtype_auto_is_what_the_processor_does_natively(folder):
    lm = open_model(folder, device="cpu")
    assert lm.dtype == (torch.bfloat16 if native_bfloat16() else torch.float32)
    if "avx512_bf16" in Path("/proc/cpuinfo").read_text():
        assert lm.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_a_chosen_dtype(folder, tiny_gguf, dtype):
    expected = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert open_model(folder, dtype=dtype, device="cpu").dtype == expected
    assert open_model(tiny_gguf, dtype=dtype, device="cpu").dtype == expected


def test_a_dtype_or_device_that_there_is_not(folder):
    assert "did you mean 'float16'" in fails(UnknownNameError, folder, dtype="flaot16")
    for wrong in ("warp:0", "cpu:", "cuda:one", "cuda:-1", "auto:0", ""):
        assert repr(wrong) in fails(UnknownNameError, folder, device=wrong)
    assert "cuda:77" in fails(UsageError, folder, device="cuda:77")


def test_a_device_is_spelled_right_before_anything_is_fetched(hub):
    hub.status = 0  # a hub that were asked would not answer
    text = fails(UnknownNameError, "nobody/no-such-model", device="cuad:1")
    assert "unknown device 'cuad:1'; did you mean 'cuda'?" in text
    assert not hub.asked


def test_bfloat16_on_cuda_only_where_the_device_computes_in_it(monkeypatch):
    cuda = torch.device("cuda")
    for native in (True, False):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, n=native: n
        )
        assert resolve_dtype("auto", cuda) == (torch.bfloat16 if native else torch.float32)


# What kind it is, before it is opened


def test_what_a_model_offers_is_known_before_it_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path))
    for name in known.KNOWN:
        kind = "embedding" if name == "minilm" else "logits"
        assert offers_of(name) == {"hidden", kind}
    with pytest.raises(CapabilityError) as raised:
        check_offers("minilm", ["logits", "bpe"], "byte-sampler")
    assert str(raised.value) == (
        "byte-sampler needs logits, but the model offers embedding, hidden (minilm)"
    )
    check_offers("smollm2-135m", ["logits", "bpe"], "byte-sampler")
    assert list(tmp_path.iterdir()) == []


def test_what_a_folder_offers_is_in_its_configuration(copy, tiny_gguf):
    (copy / "model.safetensors").unlink()
    (copy / "tokenizer.json").unlink()
    assert offers_of(copy) == offers_of(tiny_gguf) == {"hidden", "logits"}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    assert offers_of(copy) == {"hidden", "embedding"}
    with pytest.raises(CapabilityError, match="generate needs logits"):
        check_offers(copy, ("logits",), "generate")
    check_offers(copy, ("hidden",), "probe")
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelFileError):
        offers_of(copy)


# What is not there, or broken


def test_an_unknown_name_suggests_the_nearest():
    text = fails(UnknownNameError, "qwen2.5-coder-0.5")
    assert "did you mean 'qwen2.5-coder-0.5b'?" in text
    assert UnknownNameError.exit_code == 2


def test_files_that_are_not_models(tmp_path):
    assert "nothing.gguf" in fails(ModelFileError, str(tmp_path / "nothing.gguf"))
    assert "no folder" in fails(ModelFileError, str(tmp_path / "no" / "such"))
    assert "no config.json" in fails(ModelFileError, tmp_path)
    (tmp_path / "notes.txt").touch()
    assert "neither" in fails(ModelFileError, tmp_path / "notes.txt")
    (tmp_path / "a.gguf").write_bytes(b"this is not a model")
    assert "a.gguf" in fails(ModelFileError, tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    assert "2 .gguf files" in fails(UsageError, tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.999])
def test_a_gguf_file_that_is_cut_off(tiny_gguf, tmp_path, share):
    data = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    assert str(path) in fails(ModelFileError, path)


@pytest.mark.parametrize("keep", [0, 4, 1000, -10])
def test_weights_that_are_cut_off(copy, keep):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert str(copy) in fails(ModelFileError, copy)


def test_files_that_are_missing_or_garbled(copy):
    weights, config = copy / "model.safetensors", copy / "config.json"
    data, settings = weights.read_bytes(), config.read_text()
    weights.write_bytes(b"\xff" * len(data))
    assert str(copy) in fails(ModelFileError, copy)
    weights.unlink()
    assert str(copy) in fails(ModelFileError, copy)
    weights.write_bytes(data)
    config.write_text(settings[:50])
    assert str(copy) in fails(ModelFileError, copy)
    config.write_text('{"model_type": "unheard-of"}')
    assert "unheard-of" in fails(ModelFileError, copy)
    config.write_text(settings)
    (copy / "tokenizer.json").write_text("{")
    assert str(copy) in fails(ModelFileError, copy)


def test_weights_that_lack_a_tensor(copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    text = fails(ModelFileError, copy)
    assert "lacks 1 of its weights, such as model.layers.1.mlp.up_proj.weight" in text


def test_weights_of_another_shape(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert str(copy) in fails(ModelFileError, copy)


def test_pickled_weights_are_not_opened(copy):
    """A pickle runs code when it is read; this one would tell."""
    told = copy / "told"
    (copy / "model.safetensors").unlink()
    payload = f"cposix\nsystem\n(S'touch {told}'\ntR.".encode()
    (copy / "pytorch_model.bin").write_bytes(payload)
    assert str(copy) in fails(ModelFileError, copy)
    assert not told.exists()


def test_code_that_a_model_brings_is_not_run_unless_asked(copy, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    told = copy / "told"
    (copy / "own.py").write_text(
        f"open({str(told)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (copy / "config.json").write_text(json.dumps(config))
    fails(ModelFileError, copy)
    assert not told.exists()
    fails(ModelFileError, copy, trust_remote_code=True)  # a configuration alone is no model
    assert told.exists()


# The hub


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine that gives one answer to everything, or none at all."""
    from huggingface_hub import constants

    class Hub(BaseHTTPRequestHandler):
        status = 404
        asked = 0
        silent = threading.Event()

        def do_HEAD(self):
            type(self).asked += 1
            if self.status == 0:
                self.silent.wait(60)
                return
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Hub
    Hub.silent.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "no transformers model"), (401, "login"), (503, "answered 503"), (0, "no hub answered")],
)
def test_a_hub_that_does_not_give_the_model(hub, status, said):
    hub.status = status
    started = time.monotonic()
    text = fails(ModelSourceError, "nobody/no-such-model")
    assert time.monotonic() - started < 10
    assert said in text
    assert "nobody/no-such-model" in text


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_no_hub_at_all(monkeypatch, endpoint):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    started = time.monotonic()
    assert "no hub answered" in fails(ModelSourceError, "nobody/no-such-model")
    assert time.monotonic() - started < 10


def test_what_is_not_there_is_told_before_torch_is_imported():
    code = (
        "import sys\nfrom lmsmith.models import open_model\n"
        "for spec in ('nobody/no-such-model', 'smolm2'):\n"
        "    try:\n        open_model(spec)\n"
        "    except Exception as error:\n        print(type(error).__name__)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.split() == ["ModelSourceError", "UnknownNameError"], done.stderr
    assert done.returncode == 0, done.stderr


def test_a_hub_model_in_the_hub_cache_opens_without_a_hub(folder, tmp_path):
    store = tmp_path / "hub" / "models--nobody--tiny"
    shutil.copytree(folder, store / "snapshots" / "abc")
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("abc")
    code = "from lmsmith.models import open_model; print(open_model('nobody/tiny').layers)"
    environment = os.environ | {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


# The real ones


@pytest.mark.real_model
def test_smollm2_answers():
    lm = open_model("smollm2-135m")
    assert {"logits", "hidden", "chat", "bpe"} <= lm.offers
    assert (lm.layers, lm.width, lm.vocabulary, lm.context) == (30, 576, 49152, 8192)
    ids = lm.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
    out = lm.model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=list(lm.eos_ids)
    )
    assert "Paris" in lm.decode(out[0, len(ids) :].tolist())
    assert out[0, -1].item() in lm.eos_ids


@pytest.mark.real_model
@pytest.mark.slow
def test_qwen_answers():
    lm = open_model("qwen2.5-coder-0.5b")
    ids = lm.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])
    out = lm.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in lm.decode(out[0, len(ids) :].tolist())


@pytest.mark.real_model
@pytest.mark.slow
def test_gemma_knows_english():
    """A base model has no answers, but knows which words follow each other."""
    lm = open_model("gemma-3-270m", dtype="float32")
    text = (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune"
    )
    ids = torch.tensor([lm.prompt_ids(text)])
    assert ids[0, 0] == lm.bos_id
    assert lm.model(ids, labels=ids).loss < 4  # nats a token; ln 262144 = 12.5 for a random one


@pytest.mark.real_model
def test_minilm_embeds():
    lm = open_model("minilm", dtype="float32")
    assert "embedding" in lm.offers

    def embed(text):
        hidden = lm.model(torch.tensor([lm.encode(text)])).last_hidden_state  # [1, tokens, 384]
        return torch.nn.functional.normalize(hidden.mean(1), dim=-1)[0]

    cat, kitten, tax = map(embed, ["a cat sleeps", "the kitten is asleep", "income tax law"])
    assert cat @ kitten > 0.5 > cat @ tax
