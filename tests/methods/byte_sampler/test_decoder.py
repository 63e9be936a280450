"""The byte decoders: contract, law of what they draw, ensembles, one-shot continuation."""

import contextlib
import math

import pytest
import torch
from toys import Enumeration, toy_lm

from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import generate
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.errors import ConfigError, UsageError
from lmsmith.methods.byte_sampler.config import ByteSamplerConfig
from lmsmith.methods.byte_sampler.decoder import ByteDecoder, make
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
    with pytest.raises(ConfigError, match="leaves"):
        ByteSamplerConfig(leafs="filtered")


def test_generate_finds_the_method_by_its_card():
    lm = toy_lm()
    [done] = generate(lm, ["the ca"], method="byte-sampler", sampling=GREEDY, max_tokens=8)
    [events] = run(ByteDecoder([lm]), Request("the ca", max_tokens=8, sampling=GREEDY))
    assert done.text == text_of(events)
    assert done.trace.forward_passes == len(done.ids)
