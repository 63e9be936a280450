"""The plain decoder against transformers' own generate, and against the Decoder contract."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmsmith.decoding import plain
from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import complete
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.decoding.rows import RowOutput
from lmsmith.decoding.sampling import generator_for, sample
from lmsmith.decoding.text import TokenText
from lmsmith.errors import LmsmithError, UsageError
from lmsmith.models.lm import LM
from lmsmith.testing import FAMILIES, tiny_lm
from lmsmith.testing.decoder_suite import check_decoder

GREEDY = Sampling(temperature=0)
PROMPTS = ["The token", "你好", "def token(text):\n    return", "12", "a"]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def run(lm, *requests, batch_size=32):
    return complete(PlainDecoder(lm), requests, batch_size)


def transformers_greedy(lm, prompt, max_tokens, end_ids=()):
    ids = torch.tensor([lm.prompt_ids(prompt)])
    out = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=[*lm.eos_ids, *end_ids],
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family):
    lm = tiny_lm(family)
    done = run(lm, *(Request(prompt, 24, GREEDY) for prompt in PROMPTS))
    for prompt, one in zip(PROMPTS, done, strict=True):
        assert list(one.ids) == transformers_greedy(lm, prompt, 24)


@pytest.mark.real_model
def test_greedy_equals_transformers_on_a_real_model():
    from lmsmith.models import open_model

    lm = open_model("smollm2-135m", dtype="float32")
    prompts = ["The capital of France is", "def fibonacci(n):", "1, 2, 3, 4,"]
    done = run(lm, *(Request(prompt, 16, GREEDY) for prompt in prompts))
    for prompt, one in zip(prompts, done, strict=True):
        assert list(one.ids) == transformers_greedy(lm, prompt, 16)
        assert one.text == lm.tokenizer.decode(one.ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_contract(family):
    lm = tiny_lm(family)
    check_decoder(
        lambda: PlainDecoder(lm),
        [
            Request("The token", 12, GREEDY),
            Request("你好,", 7, Sampling(seed=3), ignore_eos=True),
            Request("def", 9, Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=4)),
            Request([7, 8, 9], 3, Sampling(min_p=0.05, seed=5)),
            Request("a" * 40, 11, Sampling(top_p=0.7, seed=6), stop=("e", "th")),
        ],
    )


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_row_is_itself_in_any_company(lm, data):
    """Random neighbours, joining and leaving at random steps, change nothing for the row."""
    request = Request("The model", 10, Sampling(temperature=1.2, seed=9), ignore_eos=True)
    [alone] = run(lm, request)
    decoder = PlainDecoder(lm)
    neighbours = []
    joins_at = data.draw(st.integers(0, 5))
    row, ids, now, ended = None, [], 0, False
    while not ended:
        if now == joins_at:
            row = decoder.admit(request)
        move = data.draw(st.sampled_from(["admit", "retire", "none"]))
        if move == "admit":
            length = data.draw(st.integers(1, 30))
            sampling = data.draw(st.sampled_from([GREEDY, Sampling(seed=1), Sampling(top_k=3)]))
            neighbours.append(decoder.admit(Request([5] * length, 6, sampling)))
        elif move == "retire" and neighbours:
            decoder.retire(neighbours.pop())
        for event in decoder.step():
            if event.row == row:
                ids += event.ids
                ended = event.trace is not None
        now += 1
    assert tuple(ids) == alone.ids


def test_draws_follow_the_model_s_law(lm):
    """Chi-square of first tokens over 2,000 seeded rows, at one in a million."""
    prompt = lm.prompt_ids("The")
    with torch.no_grad():
        law = lm.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    rows = 2000
    requests = [Request(prompt, 1, Sampling(seed=seed), ignore_eos=True) for seed in range(rows)]
    done = run(lm, *requests, batch_size=500)
    counts = torch.zeros(len(law), dtype=torch.float64)
    for one in done:
        counts[one.ids[0]] += 1
        assert one.logprobs[0] == pytest.approx(math.log(law[one.ids[0]]), abs=1e-4)
    common = law * rows >= 6
    assert int(common.sum()) >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([law[common], law[~common].sum()[None]]) * rows
    freedom = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.75


def test_the_same_seed_gives_the_same_tokens(lm):
    request = Request("The", 20, Sampling(seed=1), ignore_eos=True)
    other = Request("The", 20, Sampling(seed=2), ignore_eos=True)
    first, second = run(lm, request), run(lm, request, other)
    assert first[0].ids == second[0].ids != second[1].ids


class TestTheEnd:
    def test_the_model_s_end_token(self, lm):
        """The end token is among the ids, not in the text, and ends the row unless ignored."""
        [whole] = run(lm, Request("The token", 12, GREEDY, ignore_eos=True))
        end = whole.ids[2]
        place = whole.ids.index(end)
        twin = tiny_lm()
        twin.model.generation_config.eos_token_id = end
        twin = LM(twin.model, twin.tokenizer)
        assert end in twin.eos_ids
        [done] = run(twin, Request("The token", 12, GREEDY))
        assert done.ids == whole.ids[: place + 1]
        assert done.trace.finish_reason == "stop"
        assert done.text == lm.tokenizer.decode(done.ids[:-1], skip_special_tokens=True)
        [ignored] = run(twin, Request("The token", 12, GREEDY, ignore_eos=True))
        assert ignored.ids == whole.ids and ignored.trace.finish_reason == "length"

    def test_a_stop_id(self, lm):
        whole = transformers_greedy(lm, "The token", 12)
        stop_ids = (whole[3],)
        [done] = run(lm, Request("The token", 12, GREEDY, stop_ids=stop_ids))
        assert list(done.ids) == whole[: whole.index(stop_ids[0]) + 1]
        assert done.trace.finish_reason == "stop"
        assert list(done.ids) == transformers_greedy(lm, "The token", 12, stop_ids)

    @pytest.mark.parametrize("start", [0, 1, 5, 9])
    @pytest.mark.parametrize("length", [1, 3, 6])
    def test_a_stop_string_wherever_it_lies(self, lm, start, length):
        [whole] = run(lm, Request("The token", 24, GREEDY, ignore_eos=True))
        stop = whole.text[start : start + length]
        request = Request("The token", 24, GREEDY, stop=("\0 never", stop), ignore_eos=True)
        [done] = run(lm, request)
        assert done.text == whole.text[: whole.text.index(stop)]
        assert done.trace.finish_reason == "stop"
        assert done.ids == whole.ids[: len(done.ids)] and len(done.logprobs) == len(done.ids)

    def test_a_stop_string_that_does_not_come(self, lm):
        [whole] = run(lm, Request("The token", 9, GREEDY, ignore_eos=True))
        stop = (whole.text[-1] + "\0",)
        [done] = run(lm, Request("The token", 9, GREEDY, stop=stop, ignore_eos=True))
        assert done.text == whole.text and done.trace.finish_reason == "length"

    @pytest.mark.parametrize("limit", [0, 1, 5])
    def test_max_tokens(self, lm, limit):
        [done] = run(lm, Request("The", limit, GREEDY, ignore_eos=True))
        assert len(done.ids) == limit and done.trace.finish_reason == "length"

    @pytest.mark.parametrize("free", [0, 1, 3])
    def test_the_context_s_end(self, lm, free):
        prompt = [5] * (lm.context - free)
        [done] = run(lm, Request(prompt, 50, GREEDY, ignore_eos=True))
        assert len(done.ids) == free and done.trace.finish_reason == "length"

    def test_retiring_frees_at_once(self, lm):
        decoder = PlainDecoder(lm)
        rows = [decoder.admit(Request("The", 50, GREEDY, ignore_eos=True)) for _ in range(3)]
        unfed = decoder.retire(rows[2])
        assert unfed.trace.finish_reason == "cancelled" and unfed.ids == ()
        decoder.step()
        decoder.step()
        event = decoder.retire(rows[0])
        assert event.trace.finish_reason == "cancelled" and event.trace.tokens_kept == 2
        assert decoder.session.rows == [rows[1]] and decoder.active == 1
        assert decoder.retire(rows[0]) is None and decoder.retire(12345) is None


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=str)
def test_going_on_from_a_row_that_another_decoder_began(lm, sampling):
    """Adopting after the first token gives what plain decoding gives from the beginning."""
    request = Request("The token", 10, sampling, ignore_eos=True)
    [whole] = run(lm, request)
    decoder = PlainDecoder(lm)
    row = decoder.session.add(lm.prompt_ids(request.prompt))
    logits = decoder.session.feed({row: []}).logits
    generator = generator_for(sampling)
    drawn = sample(logits, sampling, [generator])
    output = RowOutput(row, request, TokenText(lm.tokenizer))
    events = [
        decoder.adopt(row, output, int(drawn.ids), float(drawn.logprobs), sampling, generator)
    ]
    while decoder.active:
        events += decoder.step()
    assert tuple(one for event in events if event for one in event.ids) == whole.ids
    assert "".join(event.text for event in events if event) == whole.text
    assert decoder.session.rows == []


def test_adopting_a_row_that_ends_at_once(lm):
    decoder = PlainDecoder(lm)
    row = decoder.session.add([5])
    output = RowOutput(row, Request([5], 1), TokenText(lm.tokenizer))
    event = decoder.adopt(row, output, 7, -1.0, GREEDY, torch.Generator(), {"mode": 1})
    assert event.trace.finish_reason == "length" and event.info == {"mode": 1}
    assert decoder.active == 0 and decoder.session.rows == []


class TestPrompts:
    def test_text_bytes_and_ids_are_the_same_prompt(self, lm):
        forms = "The 你好", "The 你好".encode(), lm.encode("The 你好")
        done = run(lm, *(Request(form, 5, GREEDY) for form in forms))
        assert done[0].ids == done[1].ids == done[2].ids

    def test_messages_go_through_the_chat_template(self, lm):
        messages = [{"role": "user", "content": "Hello"}]
        [done] = run(lm, Request(messages, 5, GREEDY))
        [by_ids] = run(lm, Request(lm.chat_ids(messages), 5, GREEDY))
        assert done.ids == by_ids.ids and done.trace.prompt_tokens == len(lm.chat_ids(messages))

    @pytest.mark.parametrize(
        ("prompt", "says"),
        [
            (b"abc\xff", "0xff at 3"),
            ("é".encode()[:1], "0xc3 at 0"),
            ("", "empty"),
            (b"", "empty"),
            ([], "empty"),
            ([5] * 257, "257"),
            ("a " * 300, "256"),
            (["a", "b"], "token ids"),
            ([5, 10**6, 7], "1000000"),
            ([5, -1], "-1"),
        ],
        ids=str,
    )
    def test_a_bad_prompt_is_one_clear_line(self, lm, prompt, says):
        decoder = PlainDecoder(lm)
        with pytest.raises(UsageError) as caught:
            decoder.admit(Request(prompt))
        assert decoder.active == 0 and decoder.session.rows == []
        assert says in str(caught.value) and "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "bad",
        [{"max_tokens": -1}, {"sampling": Sampling(top_p=2)}, {"stop": ("",)}],
        ids=str,
    )
    def test_a_refused_request_leaves_nothing_behind(self, lm, bad):
        decoder = PlainDecoder(lm)
        with pytest.raises(UsageError):
            decoder.admit(Request("The", **bad))
        assert decoder.active == 0 and decoder.session.rows == []


class TestCost:
    def test_one_forward_pass_a_step_for_all_rows(self, lm):
        decoder = PlainDecoder(lm)
        for prompt in PROMPTS:
            decoder.admit(Request(prompt, 10, GREEDY, ignore_eos=True))
        decoder.step()
        before = decoder.session.forward_calls
        for _ in range(5):
            decoder.step()
        assert decoder.session.forward_calls - before == 5

    def test_the_trace_counts(self, lm):
        [done] = run(lm, Request("The token", 7, GREEDY, ignore_eos=True))
        trace = done.trace
        assert trace.prompt_tokens == len(lm.encode("The token"))
        assert trace.forward_passes == 7  # the prompt's gives the first token
        assert (trace.tokens_kept, trace.tokens_discarded) == (7, 0)
        assert 0 < trace.first_seconds <= trace.seconds

    def test_each_token_is_computed_once(self, lm):
        decoder = PlainDecoder(lm)
        requests = [Request([5] * n, 6, GREEDY, ignore_eos=True) for n in (3, 4, 5)]
        complete(decoder, requests)
        assert decoder.session.tokens_computed == 3 + 4 + 5 + 3 * 5  # the last is never fed

    def test_long_prompts_go_in_pieces(self, lm, monkeypatch):
        requests = [Request([5, 6, 7] * n, 6, GREEDY, ignore_eos=True) for n in (1, 9, 14, 3)]
        whole = run(lm, *requests)
        monkeypatch.setattr(plain, "PREFILL_TOKENS", 32)
        pieces = run(lm, *requests)
        assert [one.ids for one in pieces] == [one.ids for one in whole]
        # 42 tokens in pieces of 32 / 4.
        assert [one.trace.forward_passes - 5 for one in pieces] == [1, 4, 6, 2]


def test_streamed_text_joins_to_the_decoded_ids(lm):
    requests = [Request("你", 40, Sampling(seed=i), ignore_eos=True) for i in range(16)]
    for one in run(lm, *requests):
        assert one.text == lm.tokenizer.decode(one.ids, skip_special_tokens=True)


def test_without_a_tokenizer_there_are_ids(lm):
    bare = LM(lm.model, None)
    request = Request([5, 6, 7], 5, GREEDY, ignore_eos=True)
    [done], [with_text] = run(bare, request), run(lm, request)
    assert done.ids == with_text.ids and done.text == ""


def test_a_broken_model_is_one_clear_line():
    lm = tiny_lm()
    next(lm.model.parameters()).data.fill_(math.nan)
    with pytest.raises(LmsmithError, match="not finite"):
        run(lm, Request("The", 3))
