"""Examples as ids: what counts, what is refused."""

import json

import pytest
import torch

from lmsmith.errors import CapabilityError, UsageError
from lmsmith.models.lm import LM
from lmsmith.testing import tiny_lm, tiny_model
from lmsmith.training import TrainSettings, encode, load_examples


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def pieces(lm, example, **settings):
    """The text that counts and the whole text, as the tokens say."""
    tokens = encode([example], TrainSettings(**settings), lm)
    ids, counted = tokens[0]
    decode = lm.tokenizer.decode
    return decode(ids[counted]), decode(ids)


def test_completions_count_and_end(lm):
    example = {"prompt": "2 plus 2 is", "completion": " four", "note": "ignored"}
    assert pieces(lm, example) == (" four<|eos|>", "2 plus 2 is four<|eos|>")
    assert pieces(lm, example, append_eos=False) == (" four", "2 plus 2 is four")


def test_prompt_and_completion_are_cut_where_the_model_will_meet_them(lm):
    example = {"prompt": "the tok", "completion": "en"}
    ids, counted = encode([example], TrainSettings(), lm)[0]
    assert ids[~counted].tolist() == lm.prompt_ids("the tok")


def test_all_of_a_text_counts_but_its_first_token(lm):
    counted, whole = pieces(lm, {"text": "the token"})
    assert whole == "the token<|eos|>" and whole.endswith(counted) and counted != whole
    both = {"prompt": "ab", "completion": "cd"}
    assert pieces(lm, both, loss_on="all")[0].endswith("cd<|eos|>")
    assert len(pieces(lm, both, loss_on="all")[0]) > len("cd<|eos|>")


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine"},
]


def test_replies_count_up_to_the_end_of_their_turn(lm):
    whole = lm.tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert pieces(lm, {"messages": CHAT}) == ("hi<|im_end|>fine<|im_end|>", whole)
    assert pieces(lm, {"messages": CHAT}, loss_on="last") == ("fine<|im_end|>", whole)
    asked = [*CHAT, {"role": "user", "content": "bye"}]
    assert pieces(lm, {"messages": asked})[0] == "hi<|im_end|>fine<|im_end|>"
    ids, _ = encode([{"messages": CHAT[:3]}], TrainSettings(), lm)[0]
    prompt = lm.chat_ids(CHAT[:2])
    assert ids[: len(prompt)].tolist() == prompt


def test_a_template_that_rewrites_what_came_before_is_refused_unless_one_reply_counts():
    forgetful = tiny_lm()
    forgetful.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UsageError, match="writes message 2 differently"):
        encode([{"messages": CHAT}], TrainSettings(), forgetful)
    assert pieces(forgetful, {"messages": CHAT}, loss_on="last")[0] == "fine<|im_end|>"


def test_ids_with_and_without_a_mask():
    tokens = encode(
        [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]}],
        TrainSettings(),
    )
    assert [tokens[i][1].tolist() for i in range(2)] == [[False, True, True], [False, False, True]]
    # A data set may hold tensors.
    tokens = encode([{"input_ids": torch.tensor([5, 6])}], TrainSettings())
    assert tokens[0][0].tolist() == [5, 6]


def test_long_examples_are_refused_cut_or_left_out_and_counted():
    examples = [{"input_ids": list(range(n))} for n in (3, 9, 4)]
    with pytest.raises(UsageError, match=r"example 1 has 9 tokens, more than max_length 5; .*skip"):
        encode(examples, TrainSettings(), max_length=5)
    cut = encode(examples, TrainSettings(too_long="truncate"), max_length=5)
    assert (cut.lengths.tolist(), cut.truncated, cut.skipped) == ([3, 5, 4], 1, 0)
    left = encode(examples, TrainSettings(too_long="skip"), max_length=5)
    assert (left.lengths.tolist(), left.truncated, left.skipped) == ([3, 4], 0, 1)
    assert left.sources.tolist() == [0, 2]
    with pytest.raises(UsageError, match="all 3 examples are longer than max_length 2"):
        encode(examples, TrainSettings(too_long="skip"), max_length=2)


def test_a_cut_that_leaves_nothing_to_learn_leaves_the_example_out():
    long = {"input_ids": list(range(9)), "loss_mask": [0] * 8 + [1]}
    tokens = encode([long, {"input_ids": [1, 2]}], TrainSettings(too_long="truncate"), max_length=5)
    assert (len(tokens), tokens.skipped, tokens.truncated) == (1, 1, 0)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"question": "x"}, "example 0 has none of text, .*it has question"),
        ("text", "example 0 is not an object"),
        ({"prompt": "x"}, "example 0 has a prompt but no completion"),
        ({"text": 3}, "example 0: text is int, not text"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "example 0 has 2 input_ids but a loss_mask of 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0]}, "example 0 has no token to learn"),
        ({"input_ids": [1]}, "example 0 has no token to learn"),
        ({"input_ids": []}, "example 0 has no token to learn"),
        ({"input_ids": ["a", "b"]}, "example 0: input_ids are not a list of whole numbers"),
        ({"input_ids": [1, 5000]}, "example 0 holds the id 5000; ids are from 0 to 99"),
        ({"input_ids": [1, -1]}, "example 0 holds the id -1"),
        ({"messages": CHAT[:2]}, "example 0 has no message of the role assistant"),
        ({"messages": "hello"}, "example 0: messages are not a list of objects"),
    ],
)
def test_malformed_examples_are_one_line(lm, example, message):
    with pytest.raises(UsageError, match=message) as error:
        encode([example], TrainSettings(), lm, vocabulary=100)
    assert "\n" not in str(error.value)


def test_an_empty_data_set_and_a_missing_tokenizer():
    with pytest.raises(UsageError, match="data set is empty"):
        encode([], TrainSettings())
    with pytest.raises(CapabilityError, match="give input_ids"):
        encode([{"text": "x"}], TrainSettings(), LM(tiny_model(), None))
    bare = tiny_lm()
    bare.tokenizer.chat_template = None
    with pytest.raises(CapabilityError, match="a chat template"):
        encode([{"messages": CHAT}], TrainSettings(), bare)


def test_files_are_read_and_wrong_lines_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a b"}\n\n' + json.dumps({"input_ids": [1, 2]}) + "\n")
    assert load_examples(path) == [{"text": "a b"}, {"input_ids": [1, 2]}]
    path.write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(UsageError, match=r"data.jsonl line 3 is not JSON"):
        load_examples(path)
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(UsageError, match=r"data.jsonl line 2 has none of text"):
        load_examples(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_examples(tmp_path / "none.jsonl")
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UsageError, match="not UTF-8"):
        load_examples(path)
