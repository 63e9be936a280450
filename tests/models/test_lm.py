"""What a model with its tokenizer says of itself, and which prompts it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from lmsmith.errors import CapabilityError, ModelFileError, UsageError
from lmsmith.models import LM, Adapter
from lmsmith.models.limits import NO_LIMIT
from lmsmith.testing import tiny_lm, tiny_model, tiny_tokenizer

USER = [{"role": "user", "content": "the token"}]


@pytest.fixture(scope="module")
def lm() -> LM:
    return tiny_lm()


@pytest.fixture(scope="module")
def starting() -> LM:
    """A model whose tokenizer puts BOS in front, spells in characters and falls back to bytes."""
    vocabulary = {"<bos>": 0, "<eos>": 1, "<unk>": 2, "▁": 3, "a": 4}
    vocabulary |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    return LM(tiny_model(), tokenizer)


def refuses(lm: LM, prompt, error: type[Exception] = UsageError) -> str:
    with pytest.raises(error) as raised:
        lm.prompt_ids(prompt)
    text = str(raised.value)
    assert "\n" not in text
    return text


# What it is


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
def test_sizes(family):
    lm = tiny_lm(family)
    ids = torch.tensor([[1, 2, 3]])
    out = lm.model(ids, output_hidden_states=True)
    assert lm.vocabulary == out.logits.shape[-1]
    assert lm.width == out.hidden_states[0].shape[-1]
    assert lm.layers == len(out.hidden_states) - 1
    assert lm.context == 256
    assert (lm.dtype, lm.device) == (torch.float32, torch.device("cpu"))


def test_a_model_without_a_table_of_positions_has_no_limit_unless_it_names_one():
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        MptConfig,
        MptForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    small = {"vocab_size": 64, "hidden_size": 32}
    t5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    mpt = MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=48)
    for model, context in (
        (MambaForCausalLM(MambaConfig(**small, num_hidden_layers=2, state_size=4)), NO_LIMIT),
        (BloomForCausalLM(BloomConfig(**small, n_layer=2, n_head=4)), NO_LIMIT),
        (T5ForConditionalGeneration(t5), NO_LIMIT),
        (MptForCausalLM(mpt), 48),
    ):
        lm = LM(model, None)
        assert (lm.layers, lm.width, lm.vocabulary, lm.context) == (2, 32, 64, context)
        assert lm.prompt_ids([1] * 48) == [1] * 48
        assert isinstance(lm.eos_ids, frozenset) and (lm.bos_id is None or lm.bos_id >= 0)


def test_offers(lm, starting):
    assert lm.offers == {"logits", "hidden", "chat", "bpe"}
    assert starting.offers == {"logits", "hidden", "bpe", "sentencepiece-bpe"}
    assert LM(tiny_model(), None).offers == {"logits", "hidden"}


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_a_tokenizer_that_is_not_bpe_does_not_offer_it(kind):
    model = (
        models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
        if kind == "WordPiece"
        else models.Unigram([("a", 0.0)], 0)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    assert LM(tiny_model(), tokenizer).offers == {"logits", "hidden"}


def test_bos(lm, starting):
    assert (lm.bos_id, lm.adds_bos) == (0, False)
    assert (starting.bos_id, starting.adds_bos) == (0, True)
    assert starting.encode("a") == [0, 4]
    assert starting.encode("a", add_special=False) == [4]


def test_ends_are_the_models_the_tokenizers_and_the_templates():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 9]
    tokenizer.eos_token = "<|pad|>"
    names = ("<|pad|>", "<|im_end|>")
    ends = LM(model, tokenizer).eos_ids
    assert ends == {7, 9, model.config.eos_token_id, *tokenizer.convert_tokens_to_ids(names)}
    tokenizer.chat_template = None
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in LM(model, tokenizer).eos_ids
    model.generation_config.eos_token_id = 7
    assert LM(model, None).eos_ids == {7, model.config.eos_token_id}


# Prompts


def test_every_kind_of_prompt(lm):
    text = "the token naïve 🙂"
    ids = lm.prompt_ids(text)
    assert lm.decode(ids) == text
    assert lm.prompt_ids(text.encode()) == ids
    assert lm.prompt_ids(ids) == ids
    assert lm.prompt_ids(torch.tensor(ids)) == ids
    chat = lm.prompt_ids(USER)
    assert lm.tokenizer.decode(chat) == (
        "<|im_start|>user\nthe token<|im_end|>\n<|im_start|>assistant\n"
    )


@given(st.text(max_size=20))
def test_text_comes_back(lm, starting, text):
    for each in (lm, starting):
        # A lone "▁" is how the second tokenizer writes a space; special tokens are left out.
        if "▁" not in text and "<" not in text:
            assert each.decode(each.encode(text)) == text


@pytest.mark.parametrize("nothing", ["", b"", [], torch.tensor([], dtype=torch.long)])
def test_an_empty_prompt(lm, nothing):
    assert "empty" in refuses(lm, nothing)


def test_an_empty_prompt_where_a_text_has_a_start(starting):
    assert starting.prompt_ids("") == [0]


def test_a_prompt_longer_than_the_context(lm):
    assert len(lm.prompt_ids([5] * lm.context)) == lm.context
    text = refuses(lm, [5] * (lm.context + 1))
    assert "257 tokens" in text
    assert "256" in text
    refuses(lm, "the token " * 200)


def test_bytes_that_are_not_utf8(lm):
    assert "byte 0xff at 4" in refuses(lm, b"the \xff")
    assert "at 4" in refuses(lm, b"the \xe4\xbd")


def test_other_things_that_are_no_prompt(lm):
    assert "-1 is no token" in refuses(lm, [-1])
    assert f"{lm.vocabulary} is no token" in refuses(lm, [lm.vocabulary])
    refuses(lm, [None])
    refuses(lm, ["text", "more text"])
    refuses(lm, "lone surrogate \ud800")


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 1.5, {"role": "user"}, ["1"], [1.9], [True], [5, None], {5}, [[5]], torch.tensor(5),
     torch.tensor([[5]]), torch.tensor([1.0]), torch.tensor([True])],
)  # fmt: skip
def test_what_is_no_prompt_is_told_in_a_line(lm, prompt):
    assert "a prompt is text, bytes, token ids or chat messages, not" in refuses(lm, prompt)
    with pytest.raises(UsageError, match="a prompt is text"):
        lm.session([prompt])


@pytest.mark.parametrize("prompts", ["the", b"the", {"role": "user"}, 5])
def test_one_prompt_is_no_list_of_prompts(lm, prompts):
    with pytest.raises(UsageError, match="a session takes a list of prompts, not") as raised:
        lm.session(prompts)
    assert "\n" not in str(raised.value)


def test_ids_of_other_integer_types(lm):
    numpy = pytest.importorskip("numpy")
    assert lm.prompt_ids(numpy.array([5, 6])) == [5, 6]
    assert lm.prompt_ids((numpy.int64(5), 6)) == [5, 6]
    assert lm.prompt_ids(range(5, 7)) == [5, 6]


def test_messages_without_a_template_or_against_it(lm, starting):
    assert "chat template" in refuses(starting, USER, CapabilityError)
    strict = tiny_lm()
    strict.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in refuses(strict, USER)


def test_a_model_without_a_tokenizer_takes_ids_only():
    lm = LM(tiny_model(), None)
    assert lm.prompt_ids([1, 2]) == [1, 2]
    assert "tokenizer" in refuses(lm, "text", CapabilityError)
    assert "tokenizer" in refuses(lm, USER, CapabilityError)


# Running


def test_a_session_has_a_row_a_prompt(lm):
    session = lm.session(["the", [5, 6, 7]])
    assert [session.tokens(row) for row in (0, 1)] == [lm.encode("the"), [5, 6, 7]]
    assert session.forward_calls == 0
    with pytest.raises(UsageError):
        lm.session(["the", ""])


def test_an_adapter_can_be_loaded_and_replaced(tmp_path):
    lm = tiny_lm()
    ids = torch.tensor([[5, 6, 7]])
    plain = lm.model(ids).logits
    Adapter.random(lm.model, ["q_proj"], rank=2, seed=1).save(tmp_path)
    adapter = lm.load_adapter(tmp_path)
    assert lm.adapter is adapter
    assert "adapter" in lm.offers
    with adapter.at(1.0):
        first = lm.model(ids).logits
    assert not torch.equal(first, plain)
    other = lm.load_adapter(Adapter.random(lm.model, ["q_proj"], rank=2, seed=2))
    with adapter.at(1.0), other.at(0.0):  # the first one is attached no more
        assert torch.equal(lm.model(ids).logits, plain)


def test_a_folder_without_an_adapter(lm, tmp_path):
    with pytest.raises(ModelFileError):
        lm.load_adapter(tmp_path)
    assert lm.adapter is None


def test_a_model_is_ready_to_run():
    model = tiny_model().train().requires_grad_(True)
    lm = LM(model, None)
    assert not lm.model.training
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())
