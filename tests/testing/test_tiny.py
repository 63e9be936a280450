"""The tiny models and tokenizers are what tests rely on: small, seeded, sensitive, lossless."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsmith.errors import UnknownNameError
from lmsmith.testing import FAMILIES, WINDOW, ByteCodec, tiny_lm, tiny_model, tiny_tokenizer

TOKENIZERS = {merges: tiny_tokenizer(merges) for merges in (0, 128)}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_seeded_and_small(family):
    one, same, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(one(ids).logits, same(ids).logits)
    assert not torch.allclose(one(ids).logits, other(ids).logits)
    assert sum(p.numel() for p in one.parameters()) < 100_000
    assert not one.training and not any(p.requires_grad for p in one.parameters())


def test_making_one_leaves_the_global_seed_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    tiny_model("llama")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_counts(family):
    """A change of any earlier token is seen at the end, so a wrong mask cannot hide."""
    model, ids = tiny_model(family), torch.arange(10, 30)[None]
    last = model(ids).logits[0, -1]
    for place in range(20):
        changed = ids.clone()
        changed[0, place] = 200
        assert (model(changed).logits[0, -1] - last).abs().max() > 1e-3
    assert (model(ids[:, 1:]).logits[0, -1] - last).abs().max() > 1e-3


def test_gemma_slides():
    config = tiny_model("gemma3").config
    assert config.sliding_window == WINDOW
    assert {"sliding_attention", "full_attention"} == set(config.layer_types)


def test_an_unknown_family():
    with pytest.raises(UnknownNameError, match="did you mean 'llama'"):
        tiny_model("lama")


def test_tiny_lm_is_ready_for_text():
    lm = tiny_lm("qwen2", dtype=torch.bfloat16)
    assert lm.model.dtype == torch.bfloat16
    ids = lm.tokenizer.encode("the token")
    assert max(ids) < lm.model.config.vocab_size == len(lm.tokenizer)
    session = lm.session()
    assert session.feed({session.add(ids): []}).logits.shape == (1, len(lm.tokenizer))


@pytest.mark.parametrize("merges", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_survives_the_tokenizer(merges, text):
    tokenizer = TOKENIZERS[merges]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    if merges == 0 and "<|" not in text:
        assert len(ids) == len(text.encode())


def test_the_tokenizer_merges_and_chats():
    tokenizer = TOKENIZERS[128]
    assert len(tokenizer) == 5 + 256 + 128
    assert len(tokenizer.encode("the token")) < 9
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids("<|bos|>") == 0 == tokenizer.bos_token_id
    again = tiny_tokenizer(128)
    assert again.get_vocab() == tokenizer.get_vocab()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_byte_codec_is_utf8(text):
    codec = ByteCodec()
    assert codec.encode(text) == list(text.encode())
    assert codec.decode([*codec.encode(text), codec.end]) == text
    assert codec.decode([0xE4, 0xBD]) == "\ufffd"


def test_importing_the_room_is_free():
    code = (
        "import lmsmith.testing, sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
