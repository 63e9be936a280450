"""The decoder: contract, exact caches over switches and rollbacks, what is let out and counted."""

import pytest
import torch

from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import generate
from lmsmith.errors import CapabilityError, UsageError
from lmsmith.methods.mixreasoning.config import MixReasoningConfig
from lmsmith.methods.mixreasoning.controller import Mode
from lmsmith.methods.mixreasoning.decoder import MixDecoder
from lmsmith.models.adapter import Adapter
from lmsmith.testing import tiny_lm
from lmsmith.testing.decoder_suite import check_decoder

TARGETS = {"gpt2": ("c_attn", "c_fc"), "other": ("q_proj", "v_proj", "down_proj")}
GREEDY = Sampling(temperature=0)


def mixed_lm(family="llama", scale=0.3, **overrides):
    lm = tiny_lm(family, **overrides)
    targets = TARGETS.get(family, TARGETS["other"])
    lm.load_adapter(Adapter.random(lm.model, targets, rank=4, seed=1, scale=scale))
    return lm


def lively(lm, m=3, **settings):
    """Settings with thresholds in the middle of what this model's windows score in both modes."""
    means = []
    for mode in ("think", "concise"):
        decoder = MixDecoder(
            lm,
            MixReasoningConfig(mode=mode, window=m, candidates=5),
            watch=lambda controller: means.append(controller.mean),
        )
        run(decoder, Request("the cat", max_tokens=60, sampling=Sampling(seed=5), ignore_eos=True))
    middle = sorted(means)[len(means) // 2]
    return MixReasoningConfig(**({"window": m, "candidates": 5, "low": middle, "high": middle}
                                 | settings))  # fmt: skip


def run(decoder, *requests):
    rows = {decoder.admit(request): [] for request in requests}
    while decoder.active:
        for event in decoder.step():
            rows[event.row].append(event)
    return list(rows.values())


def ids_of(events):
    return [one for event in events for one in event.ids]


@pytest.mark.parametrize("criterion", ["confidence", "random", "keywords", "entropy-v1", "reverse"])
def test_contract(criterion):
    lm = mixed_lm()
    own = {
        "keywords": ("e", "a"),
        "window_before": 3,
        "window_after": 1,
        "t_up": 0.97,
        "t_down": 0.97,
    }
    config = lively(lm, criterion=criterion, **own)
    requests = [
        Request("the cat", max_tokens=30, sampling=Sampling(seed=1), ignore_eos=True),
        Request("a", max_tokens=22, sampling=Sampling(temperature=0, seed=2), ignore_eos=True),
        Request("12 of them, or", max_tokens=26, sampling=Sampling(seed=3), stop=("e",)),
        Request("who are they", max_tokens=18, sampling=Sampling(seed=4, temperature=0.8)),
    ]
    outcomes = check_decoder(lambda: MixDecoder(lm, config), requests)
    switches = sum(one.trace.notes["to_think"] for one in outcomes)
    assert switches >= 1, "nothing was switched, so nothing was tested"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_cached_logits_equal_a_fresh_forward_under_the_mode_at_work(family, monkeypatch):
    """At every step, over switches and rollbacks; both caches end with the row's tokens."""
    lm = mixed_lm(family)
    decoder = MixDecoder(lm, lively(lm))
    worst, seen = 0.0, {mode: 0 for mode in Mode}
    compute = decoder._logits

    def compared(rows):
        nonlocal worst
        logits = compute(rows)
        for (row, state), cached in zip(rows, logits, strict=True):
            tokens = decoder.session.tokens(row)
            prompt = len(tokens) - len(state.ids)
            assert tokens[prompt:] == state.ids
            strength = {Mode.THINK: 0.0, Mode.CONCISE: 1.0}[state.controller.mode]
            assert decoder.session.strength(row) == strength
            for lane in decoder.session._row(row).lanes.values():
                assert lane.computed <= len(tokens)
            with torch.no_grad(), lm.adapter.at(strength):
                fresh = lm.model(torch.tensor([tokens])).logits[0, -1]
            worst = max(worst, float((fresh - cached).abs().max()))
            seen[state.controller.mode] += 1
        return logits

    monkeypatch.setattr(decoder, "_logits", compared)
    requests = [
        Request("the cat sat", max_tokens=40, sampling=Sampling(seed=seed), ignore_eos=True)
        for seed in range(3)
    ]
    traces = [events[-1].trace for events in run(decoder, *requests)]
    assert worst <= 1e-4
    assert min(seen.values()) > 10
    assert sum(trace.tokens_discarded for trace in traces) > 0


@pytest.mark.parametrize("criterion", ["confidence", "random"])
def test_two_modes_of_strength_zero_are_plain_greedy_decoding(criterion):
    """Rollbacks then write the same tokens again."""
    lm, bare = mixed_lm(), tiny_lm()
    config = lively(lm, m=4, concise_strength=0.0, criterion=criterion)
    prompts = ["the cat", "a", "There were 12"]
    asked = {"sampling": Sampling(temperature=0, seed=3), "max_tokens": 40, "ignore_eos": True}
    plain = generate(bare, prompts, **asked)
    mixed = generate(lm, prompts, method="mixreasoning", config=config, **asked)
    assert [one.ids for one in mixed] == [one.ids for one in plain]
    for one, other in zip(mixed, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.trace.tokens_discarded == 3 * one.trace.notes["to_think"]
    if criterion == "random":
        assert sum(one.trace.tokens_discarded for one in mixed) > 0


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=7, top_p=0.9)])
def test_never_leaving_thinking_is_the_base_model_with_the_same_draws(sampling):
    lm = mixed_lm()
    bare = tiny_lm()
    plain = generate(bare, ["the cat"], sampling=sampling, max_tokens=30)[0]
    for config in (
        MixReasoningConfig(low=1e9, high=1e9, candidates=5),
        MixReasoningConfig(mode="think"),
    ):
        mixed = generate(lm, ["the cat"], method="mixreasoning", config=config, sampling=sampling,
                         max_tokens=30)[0]  # fmt: skip
        assert mixed.ids == plain.ids
        assert mixed.trace.notes["thinking_share"] == 1.0


def test_concise_alone_is_the_adapter_as_trained():
    lm = mixed_lm()
    plain = generate(lm, ["the cat"], sampling=GREEDY, max_tokens=30)[0]  # strength 1
    mixed = generate(lm, ["the cat"], method="mixreasoning",
                     config=MixReasoningConfig(mode="concise"), sampling=GREEDY,
                     max_tokens=30)[0]  # fmt: skip
    assert mixed.ids == plain.ids


def test_nothing_that_was_let_out_is_dropped_and_the_books_balance():
    lm = mixed_lm()
    decoder = MixDecoder(lm, lively(lm, m=5))
    requests = [
        Request("the cat", max_tokens=50, sampling=Sampling(seed=seed), ignore_eos=True)
        for seed in range(3)
    ]
    rows = {decoder.admit(request): [] for request in requests}
    dropped = 0
    while decoder.active:
        for event in decoder.step():
            rows[event.row].append(event)
        for row, state in decoder._rows.items():
            assert state.output.count + len(state.held) == len(state.ids) == state.controller.kept
            out = ids_of(rows[row])
            assert out == state.ids[: len(out)]
    for events in rows.values():
        trace = events[-1].trace
        assert trace.tokens_kept == len(ids_of(events)) == 50
        assert trace.notes["generated"] == trace.tokens_kept + trace.tokens_discarded
        assert trace.tokens_discarded == 4 * trace.notes["to_think"]
        modes = [event.info["mode"] for event in events if event.ids]
        assert set(modes) <= {"think", "concise"}
        dropped += trace.tokens_discarded
    assert dropped > 0


def test_stop_strings_and_end_tokens():
    lm = mixed_lm()
    config = lively(lm, m=5)
    free = run(MixDecoder(lm, config), Request("the cat", max_tokens=60, sampling=Sampling(seed=1)))
    text = "".join(event.text for event in free[0])
    stop = text[len(text) // 2 :][:2]
    asked = Request("the cat", max_tokens=60, sampling=Sampling(seed=1), stop=(stop,))
    events = run(MixDecoder(lm, config), asked)[0]
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    trace = events[-1].trace
    assert trace.finish_reason == "stop"
    assert trace.notes["generated"] == trace.tokens_kept + trace.tokens_discarded
    first = ids_of(free[0])[0]
    ended = run(MixDecoder(lm, config),
                Request("the cat", sampling=Sampling(seed=1), stop_ids=(first,)))[0]  # fmt: skip
    assert ids_of(ended) == [first] and ended[-1].trace.finish_reason == "stop"


def test_the_generated_budget_ends_an_answer():
    lm = mixed_lm()
    config = MixReasoningConfig(criterion="random", window=5, generated_budget=1.0)
    request = Request("the cat", max_tokens=60, sampling=Sampling(seed=1), ignore_eos=True)
    events = run(MixDecoder(lm, config), request)[0]
    trace = events[-1].trace
    assert trace.notes["generated"] == 60 and trace.tokens_kept < 60
    assert trace.tokens_kept == len(ids_of(events)) and trace.finish_reason == "length"


def test_redrawn_tokens_use_fresh_random_numbers():
    lm = mixed_lm(scale=0.0)  # both modes are the same model
    config = MixReasoningConfig(criterion="random", share=0.6, window=6)
    plain = generate(lm, ["the cat"], sampling=Sampling(seed=2), max_tokens=60, ignore_eos=True)[0]
    mixed = generate(lm, ["the cat"], method="mixreasoning", config=config, ignore_eos=True,
                     sampling=Sampling(seed=2), max_tokens=60)[0]  # fmt: skip
    assert mixed.trace.tokens_discarded > 0 and mixed.ids != plain.ids


def test_nothing_switches_after_until():
    lm = mixed_lm()
    request = Request("the cat", max_tokens=40, sampling=Sampling(seed=1), ignore_eos=True)
    config = MixReasoningConfig(criterion="random", window=2)
    free = run(MixDecoder(lm, config), request)[0]
    assert free[-1].trace.notes["to_concise"] > 0
    closed = MixDecoder(lm, config)
    closed._until = ids_of(free)[:1]
    trace = run(closed, request)[0][-1].trace
    assert trace.notes["to_concise"] == trace.notes["to_think"] == 0


def test_random_at_boundaries_drops_nothing():
    lm = mixed_lm()
    config = MixReasoningConfig(criterion="random", share=0.5, boundary="e", window=2)
    traces = [
        run(MixDecoder(lm, config), Request("the cat", max_tokens=30, sampling=Sampling(seed=seed),
                                            ignore_eos=True))[0][-1].trace
        for seed in range(6)
    ]  # fmt: skip
    assert sum(trace.tokens_discarded for trace in traces) == 0
    assert sum(trace.notes["to_concise"] for trace in traces) > 0


def test_strength_zero_is_bit_for_bit_and_any_strength_is_the_merged_weight():
    lm, bare = mixed_lm(), tiny_lm()
    ids = torch.tensor([lm.encode("the cat sat on")])
    with torch.no_grad():
        base = bare.model(ids).logits
        session = lm.session()
        row = session.add(strength=0.0)
        assert torch.equal(session.feed({row: ids[0].tolist()}).all_logits(row), base[0])
        for strength in (0.5, 1.0, 1.7):
            merged = tiny_lm().model
            modules = dict(merged.named_modules())
            for name, update in lm.adapter.updates.items():
                delta = strength * update.scaling * (update.up @ update.down)
                modules[name].weight += delta
            session.set_strength(row, strength)
            got = session.feed({row: []}).all_logits(row)
            assert (got - merged(ids).logits[0]).abs().max() <= 1e-5 * max(1, base.abs().max())


def test_lora_alpha_is_another_name_for_strength():
    lm = mixed_lm()  # rank 4, alpha 8
    config = MixReasoningConfig(mode="concise", concise_lora_alpha=4.0)
    assert MixDecoder(lm, config)._strengths[Mode.CONCISE] == 0.5


def test_what_is_missing_is_said():
    with pytest.raises(UsageError, match="calibrate MODEL"):
        MixDecoder(mixed_lm(), MixReasoningConfig())
    with pytest.raises(CapabilityError, match="adapter"):
        MixDecoder(tiny_lm(), MixReasoningConfig(low=1.0))
    with pytest.raises(UsageError, match="no file"):
        MixDecoder(mixed_lm(), MixReasoningConfig(calibration="nowhere.json"))
