"""The byte decoders: contract, law of what they draw, ensembles, one-shot continuation."""

import contextlib
import math

import pytest
import torch
from families import byte_level, sentencepiece
from oracle import BruteForce, family_lm
from tokenizers import Tokenizer, normalizers
from toys import Enumeration, toy_lm

from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import generate
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.errors import ConfigError, UsageError
from lmsmith.methods.byte_sampler.config import ByteSamplerConfig
from lmsmith.methods.byte_sampler.decoder import ByteDecoder, make
from lmsmith.methods.byte_sampler.prompts import parts_of, pending_bytes
from lmsmith.methods.byte_sampler.reader import ByteReader
from lmsmith.testing.decoder_suite import check_decoder

GREEDY = Sampling(temperature=0)


def run(decoder, *requests):
    rows = {decoder.admit(request): [] for request in requests}
    while decoder.active:
        for event in decoder.step():
            rows[event.row].append(event)
    return list(rows.values())


def text_of(events):
    return "".join(event.text for event in events)


@pytest.mark.parametrize("mode", ["bytes", "continue"])
def test_contract(mode):
    config = ByteSamplerConfig(mode=mode)
    requests = [
        Request("the ca", max_tokens=9, sampling=Sampling(seed=1)),
        Request("that that the ha", max_tokens=5, sampling=GREEDY),
        Request("a", max_tokens=7, sampling=Sampling(seed=2, temperature=0.7)),
    ]
    check_decoder(lambda: make([toy_lm()], config), requests)


def test_first_byte_follows_the_law():
    """Chi-square of 400 first bytes against enumeration."""
    lm, prefix, count = toy_lm(), "the h", 400
    expected = Enumeration(lm).next_bytes(prefix.encode(), False)
    expected = expected / expected.sum()
    requests = [
        Request(prefix, max_tokens=1, sampling=Sampling(seed=seed)) for seed in range(count)
    ]
    drawn = torch.zeros(257)
    for events in run(ByteDecoder([lm]), *requests):
        drawn[events[-1].ids[0]] += 1
    likely = expected * count >= 5
    observed = torch.cat([drawn[likely], drawn[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * count
    kept = wanted > 0
    statistic = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert degrees >= 1
    # Mean of chi-square is `degrees`, its deviation sqrt(2 * degrees); five of them.
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_logprobs_are_those_of_the_distribution():
    lm = toy_lm()
    [events] = run(ByteDecoder([lm]), Request("the", max_tokens=4, sampling=GREEDY))
    oracle, text = Enumeration(lm), b"the"
    ids = [byte for event in events for byte in event.ids]
    logprobs = [value for event in events for value in event.logprobs]
    assert len(ids) == 4
    for byte, logprob in zip(ids, logprobs, strict=True):
        law = oracle.next_bytes(text, False)
        assert math.isclose(logprob, math.log(law[byte] / law.sum()), abs_tol=1e-6)
        text += bytes([byte])


@pytest.mark.parametrize("combine", ["mix", "product"])
def test_a_model_with_itself_writes_what_it_writes_alone(combine):
    lm, request = toy_lm(), Request("the ca", max_tokens=12, sampling=Sampling(seed=3))
    [alone] = run(ByteDecoder([lm]), request)
    config = ByteSamplerConfig(combine=combine)
    [together] = run(ByteDecoder([lm, lm], config), request)
    assert text_of(alone) == text_of(together)


def test_proxy_tuning_with_alpha_zero_writes_what_the_base_writes():
    base, expert, anti = toy_lm(0), toy_lm(1, 60), toy_lm(2, 60)
    request = Request("that ha", max_tokens=12, sampling=Sampling(seed=4))
    [alone] = run(ByteDecoder([base]), request)
    config = ByteSamplerConfig(combine="proxy", alpha=0.0)
    [steered] = run(make([base, expert, anti], config), request)
    assert text_of(alone) == text_of(steered)
    config = ByteSamplerConfig(combine="proxy", alpha=1.0)
    [steered] = run(make([base, expert, anti], config), request)
    assert text_of(alone) != text_of(steered)


def test_ensemble_of_two_tokenizers_follows_the_mixture():
    one, other, prefix = toy_lm(0), toy_lm(1, 60), b"the h"
    laws = [Enumeration(lm).next_bytes(prefix, False) for lm in (one, other)]
    mixed = sum(law / law.sum() for law in laws) / 2
    [events] = run(
        ByteDecoder([one, other]), Request(prefix, max_tokens=1, sampling=Sampling(seed=0))
    )
    [byte], [logprob] = events[-1].ids, events[-1].logprobs
    assert math.isclose(logprob, math.log(mixed[byte]), abs_tol=1e-6)


def test_continuation_goes_on_as_token_generation_does_from_the_leaf():
    lm = toy_lm()
    request = Request("that the ha", max_tokens=6, sampling=GREEDY)
    [events] = run(make([lm], ByteSamplerConfig(mode="continue")), request)
    ids = [one for event in events for one in event.ids]
    spelling = Enumeration(lm).spelling
    whole = "that the ha" + text_of(events)
    # The leaf replaces the end of the prompt; what stands before it is a token boundary.
    covered = whole[: len(whole) - len(b"".join(spelling[i] for i in ids).decode())]
    prompt = [lm.bos_id, *lm.encode(covered, add_special=False)]
    [plain] = run(
        PlainDecoder(lm), Request([*prompt, ids[0]], max_tokens=len(ids) - 1, sampling=GREEDY)
    )
    assert [one for event in plain for one in event.ids] == ids[1:]


def test_stop_strings_and_limits():
    lm = toy_lm()
    [free] = run(ByteDecoder([lm]), Request("the cat", max_tokens=20, sampling=GREEDY))
    text = text_of(free)
    stop = text[4:6]
    [cut] = run(ByteDecoder([lm]), Request("the cat", max_tokens=20, sampling=GREEDY, stop=(stop,)))
    assert text_of(cut) == text[: text.index(stop)]
    assert cut[-1].trace.finish_reason == "stop"
    assert free[-1].trace.finish_reason in ("length", "stop")
    assert free[-1].trace.notes["bytes"] <= 20


def test_context_end_finishes_the_row():
    lm = toy_lm()
    request = Request("a" * 180, max_tokens=4000, sampling=Sampling(seed=0), ignore_eos=True)
    [events] = run(ByteDecoder([lm]), request)
    assert events[-1].trace.finish_reason == "length"
    assert events[-1].trace.notes["bytes"] < 4000


def test_continuation_ends_with_the_context_and_no_other_row_suffers():
    """The branch to the leaf takes room too; prompts end at every place near the context's end."""
    lm = toy_lm()
    text = "that the hat at " * 200
    ids = lm.encode(text, add_special=False)
    decoder = make([lm], ByteSamplerConfig(mode="continue"))
    requests, lengths = [], range(lm.context - 8, lm.context)
    for length in lengths:
        cut = lm.tokenizer.decode(ids[: length - 1])
        requests.append(Request(cut, max_tokens=99, sampling=Sampling(seed=0), ignore_eos=True))
    rows = {}
    for request in requests:
        with contextlib.suppress(UsageError):  # the tree itself needs a little room
            rows[decoder.admit(request)] = []
    assert len(rows) >= 5
    bystander = decoder.admit(Request("the ca", max_tokens=30, sampling=Sampling(seed=1)))
    rows[bystander] = []
    while decoder.active:
        for event in decoder.step():
            rows[event.row].append(event)
    [alone] = run(
        make([lm], ByteSamplerConfig(mode="continue")),
        Request("the ca", max_tokens=30, sampling=Sampling(seed=1)),
    )
    assert text_of(rows.pop(bystander)) == text_of(alone)
    assert {events[-1].trace.finish_reason for events in rows.values()} == {"length"}


def test_invalid_is_what_masks_and_filters_took_out_together():
    """`stop` that is ignored was not invalid."""
    lm, prefix = toy_lm(), b"aaa"
    oracle = Enumeration(lm)
    kept, whole = oracle.next_bytes(prefix, True), oracle.next_bytes(prefix, False)
    filtered = 1 - float(kept.sum() / whole.sum())
    for leaves, expected in [("unfiltered", 0.0), ("filtered", filtered)]:
        config = ByteSamplerConfig(leaves=leaves)
        request = Request(prefix, max_tokens=1, sampling=Sampling(seed=0), ignore_eos=True)
        [events] = run(ByteDecoder([lm], config), request)
        assert math.isclose(events[-1].info["invalid"], expected, abs_tol=1e-6)
    assert filtered > 0.01 and kept[256] / kept.sum() > 1e-3


@pytest.mark.parametrize(
    ("config", "law"),
    [
        ({"combine": "product"}, lambda one, other, _: (one * other) ** 0.5),
        ({"combine": "product", "power": 0.8}, lambda one, other, _: (one * other) ** 0.8),
        ({"combine": "proxy"}, lambda one, other, third: one * other / third),
        (
            {"combine": "proxy", "alpha": 0.4},
            lambda one, up, down: one * (up / down) ** 0.4,
        ),
    ],
)
def test_settings_of_an_ensemble_reach_its_law(config, law):
    models, prefix = [toy_lm(0), toy_lm(1, 60), toy_lm(2, 60)], b"the h"
    laws = [Enumeration(lm).next_bytes(prefix, False) for lm in models]
    expected = law(*(one / one.sum() for one in laws)).nan_to_num()
    expected = expected / expected.sum()
    models = models if config["combine"] == "proxy" else models[:2]
    request = Request(prefix, max_tokens=1, sampling=GREEDY)
    [events] = run(ByteDecoder(models, ByteSamplerConfig(**config)), request)
    assert events[-1].ids == (int(expected.argmax()),)
    assert math.isclose(events[-1].logprobs[0], math.log(expected.max()), abs_tol=1e-6)


def test_token_settings_reach_the_reader():
    lm, prefix = toy_lm(), b"the h"
    expected = Enumeration(lm).next_bytes(prefix, False, 2, 0.7)
    config = ByteSamplerConfig(token_top_k=2, token_temperature=0.7)
    [events] = run(ByteDecoder([lm], config), Request(prefix, max_tokens=1, sampling=GREEDY))
    logprob = math.log(expected.max() / expected.sum())
    assert math.isclose(events[-1].logprobs[0], logprob, abs_tol=1e-6)


@pytest.mark.parametrize("combine", ["mix", "product"])
def test_truncation_that_leaves_only_masked_entries_is_lifted(combine):
    """The likeliest token ends the text, which the request ignores; other rows go on."""
    models = [family_lm(byte_level("gpt-2"), seed) for seed in (0, 1)]
    for lm in models:  # after every text the end token is by far the likeliest
        lm.model.get_output_embeddings().register_forward_hook(
            lambda module, given, out, end=lm.tokenizer.eos_token_id: out.index_add(
                -1, torch.tensor([end]), torch.full((*out.shape[:-1], 1), 50.0).to(out)
            )
        )
    decoder = ByteDecoder(models, ByteSamplerConfig(token_top_k=1, combine=combine))
    free = Request("the cat ", max_tokens=3, sampling=GREEDY)
    endless = Request("the cat ", max_tokens=3, sampling=GREEDY, ignore_eos=True)
    stopped, going = run(decoder, free, endless)
    assert stopped[-1].trace.finish_reason == "stop"
    assert sum(len(event.ids) for event in going) == 3


HALF = "中".encode()[:2]


def test_inside_a_character_the_other_bytes_are_masked_and_counted():
    lm = family_lm(byte_level("gpt-2"))
    law = BruteForce(lm).next_bytes(b"ok " + HALF)
    law = law / law.sum()
    request = Request(b"ok " + HALF, max_tokens=1, sampling=Sampling(seed=0))
    [events] = run(ByteDecoder([lm]), request)
    assert math.isclose(events[-1].info["invalid"], 1 - float(law[0x80:0xC0].sum()), abs_tol=1e-6)
    assert 0x80 <= events[-1].ids[0] < 0xC0
    # The event's text is the whole character.
    assert text_of(events) == (HALF + bytes(events[-1].ids)).decode()
    # What filters and masks took out is put together.
    reader = ByteReader(lm, filtered=True)
    row = reader.open([b"ok " + HALF])
    kept = reader.next_bytes([row])[0].exp()
    masked = 1 - float(kept[0x80:0xC0].sum() / kept[:256].sum())
    both = 1 - (1 - masked) * (1 - reader.invalid(row))
    [events] = run(ByteDecoder([lm], ByteSamplerConfig(leaves="filtered")), request)
    assert math.isclose(events[-1].info["invalid"], both, abs_tol=1e-6)


def test_half_a_character_at_the_end_is_not_shown():
    lm = family_lm(byte_level("gpt-2"))
    request = Request(b"ok " + HALF[:1], max_tokens=1, sampling=GREEDY)
    [events] = run(ByteDecoder([lm]), request)
    assert text_of(events) == "" and len(events[-1].ids) == 1


@pytest.mark.parametrize("seed", range(4))
def test_continuation_completes_the_pending_character(seed):
    lm = family_lm(byte_level("gpt-2"))
    request = Request(b"ok " + HALF, max_tokens=4, sampling=Sampling(seed=seed))
    [events] = run(make([lm], ByteSamplerConfig(mode="continue")), request)
    ids = [one for event in events for one in event.ids]
    spelled = b"".join(BruteForce(lm).spelling.get(one, b"") for one in ids)
    # The first token covers the end of the prompt, from some byte of it on.
    starts = [k for k in range(6) if spelled.startswith((b"ok " + HALF)[k:])]
    texts = [((b"ok " + HALF)[:k] + spelled).decode(errors="replace") for k in starts]
    assert "ok " + text_of(events) in texts


def test_a_literal_space_mark_does_not_shift_the_text_of_the_leaf():
    lm = family_lm(sentencepiece())
    texts = []
    for prompt in ("the c", "the▁c", "the▁c".encode()):
        request = Request(prompt, max_tokens=3, sampling=GREEDY)
        [events] = run(make([lm], ByteSamplerConfig(mode="continue")), request)
        texts.append(text_of(events))
    assert texts[0] == texts[1] == texts[2]


def test_prompts_in_parts():
    tokenizer = Tokenizer.from_str(byte_level("gpt-2").to_str())
    tokenizer.normalizer = normalizers.NFC()
    lm = family_lm(tokenizer)
    reader = ByteReader(lm)
    assert parts_of(reader, "e\u0301x") == (["éx".encode()], False)
    assert parts_of(reader, "e\u0301x".encode()) == (["e\u0301x".encode()], False)
    lm.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[reply]{% endif %}"
    )
    messages = [{"role": "user", "content": "cafe\u0301"}]
    assert parts_of(reader, messages) == (["[user]café[reply]".encode()], False)
    end = lm.tokenizer.eos_token_id
    ids = [end, *lm.encode("the", add_special=False)]
    assert parts_of(reader, ids) == ([end, b"the"], False)


@pytest.mark.parametrize(
    ("data", "pending"),
    [("é", b""), ("aé", b""), ("a", b""), ("🙂", b"")],
)
def test_pending_bytes(data, pending):
    whole = data.encode()
    assert pending_bytes([whole]) == pending
    last = data[-1].encode()
    for cut in range(1, len(last)):
        assert pending_bytes([1, whole[:-cut]]) == last[:-cut]
    assert pending_bytes([whole, 1]) == pending_bytes([]) == b""


def test_ids_are_refused_where_they_mean_different_texts():
    decoder = ByteDecoder([toy_lm(0), toy_lm(1, 60)])
    with pytest.raises(UsageError, match="tokenizers differ; give it as text"):
        decoder.admit(Request([5, 6]))
    ByteDecoder([toy_lm(0), toy_lm(1)]).admit(Request([5, 6]))


def test_bad_prompts_are_one_line():
    decoder = ByteDecoder([toy_lm()])
    for prompt, part in [
        ([], "empty"),
        (b"the \xff", "offset 4"),
        ("a b" * 4000, "shorten"),
        ("the \ud800", "not Unicode"),
        ([9999], "9999"),
    ]:
        with pytest.raises(UsageError, match=part) as caught:
            decoder.admit(Request(prompt))
        assert "\n" not in str(caught.value)
    assert decoder.active == 0
    assert decoder.sessions[0].rows == []


def test_bad_settings_are_one_line():
    with pytest.raises(UsageError, match="three models"):
        make([toy_lm()], ByteSamplerConfig(combine="proxy"))
    with pytest.raises(UsageError, match="one model"):
        make([toy_lm(), toy_lm()], ByteSamplerConfig(mode="continue"))
    with pytest.raises(ConfigError, match="combine"):
        ByteSamplerConfig(power=0.5)
    with pytest.raises(ConfigError, match="combine is not 'proxy'"):
        ByteSamplerConfig(alpha=0.5)
    with pytest.raises(ConfigError, match="request's own"):
        ByteSamplerConfig(mode="continue", token_top_k=5)
    with pytest.raises(UsageError, match="three models"):
        ByteDecoder([toy_lm(), toy_lm()], ByteSamplerConfig(combine="proxy"))
    with pytest.raises(UsageError, match="needs a model"):
        ByteDecoder([])
    with pytest.raises(ConfigError, match="leaves"):
        ByteSamplerConfig(leafs="filtered")


def test_generate_finds_the_method_by_its_card():
    lm = toy_lm()
    [done] = generate(lm, ["the ca"], method="byte-sampler", sampling=GREEDY, max_tokens=8)
    [events] = run(ByteDecoder([lm]), Request("the ca", max_tokens=8, sampling=GREEDY))
    assert done.text == text_of(events)
    assert done.trace.forward_passes == len(done.ids)
