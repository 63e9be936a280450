"""Oracles of the stream: predict then update, what changes, reset, resume, the guard."""

import hashlib
import itertools
import json

import pytest
import torch

from lmsmith.decoding.events import Sampling
from lmsmith.decoding.generate import generate
from lmsmith.errors import ConfigError, RunFolderBusyError, UsageError
from lmsmith.methods.fg_ttl import guard
from lmsmith.methods.fg_ttl.adaptation import Adaptation, Answer, adapt
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.methods.fg_ttl.guard import Signs, repetition, trouble
from lmsmith.methods.fg_ttl.learner import adapter_hash
from lmsmith.methods.fg_ttl.stream import Malformed, read_items, read_lines
from lmsmith.testing import tiny_lm

PROMPTS = [
    "The token",
    "def token(",
    "naive cafe",
    "There were 12",
    "They're in",
    "return",
    "a b c",
]
# A rate at which the tiny model's answers change from one batch to the next.
FAST = {
    "objective": "tent",
    "learning_rate": 0.05,
    "stream_batch": 2,
    "max_new_tokens": 12,
    "guard": False,
}


@pytest.fixture
def lm():
    return tiny_lm()


def ids(answers):
    return [answer.ids for answer in answers]


def checksum(lm):
    digest = hashlib.sha256()
    for name, tensor in sorted(lm.model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def frozen(prompts, length=12):
    done = generate(tiny_lm(), prompts, sampling=Sampling(0.0), max_tokens=length)
    return [one.ids for one in done]


# Predict, then update


@pytest.mark.parametrize("objective", ["fg-ttl", "sar", "tlm"])
def test_without_a_rate_answers_are_the_frozen_models(lm, objective):
    answers = list(adapt(lm, PROMPTS, {**FAST, "objective": objective, "learning_rate": 0.0}))
    assert ids(answers) == frozen(PROMPTS)
    assert [a.batch for a in answers] == [0, 0, 1, 1, 2, 2, 3]
    assert [a.place for a in answers] == list(range(7))


def test_a_batch_is_answered_before_it_is_learned_from(lm):
    before = frozen(PROMPTS)
    answers = list(adapt(lm, PROMPTS, FAST))
    assert ids(answers)[:2] == before[:2]
    assert ids(answers)[2:] != before[2:], "the rate is too low for this test"


def test_what_comes_later_changes_nothing_before(lm):
    one = list(adapt(lm, PROMPTS[:6], FAST))
    poisoned = [*PROMPTS[:4], "x" * 50, {"prompt": 7}]
    two = list(adapt(tiny_lm(), poisoned, FAST))
    assert ids(two)[:4] == ids(one)[:4]


def test_the_stream_is_taken_as_it_is_needed(lm):
    taken = []

    def stream():
        for number in itertools.count():
            taken.append(number)
            yield f"item {number}"

    answers = adapt(lm, stream(), FAST)
    assert [next(answers).place for _ in range(3)] == [0, 1, 2]
    assert taken == [0, 1, 2, 3]
    answers.close()


def test_the_same_seed_gives_the_same_run(lm):
    warm = {**FAST, "temperature": 1.0}
    one, two = (list(adapt(tiny_lm(), PROMPTS, warm)) for _ in range(2))
    assert one == two
    assert ids(one) != ids(adapt(lm, PROMPTS, {**warm, "seed": 1}))


# Only the adapter changes, and it can be put back


def test_only_the_adapter_changes_and_reset_puts_it_back(lm):
    weights = checksum(lm)
    state = Adaptation(lm, FAST)
    items = list(read_items(lm, PROMPTS, state.config))
    first = state.predict(items)
    untouched = adapter_hash(state.learner.weights())
    record = state.update(first)
    assert record["adapter_before"] == untouched != record["adapter_after"]
    assert checksum(lm) == weights
    assert all(not p.requires_grad and p.grad is None for p in lm.model.parameters())
    assert ids(state.predict(items)) != ids(first)
    state.reset()
    assert adapter_hash(state.learner.weights()) == untouched
    again = state.predict(items)
    assert again == first


def test_predicting_learns_nothing(lm):
    state = Adaptation(lm, FAST)
    items = list(read_items(lm, PROMPTS, state.config))
    state.update(state.predict(items))
    before = adapter_hash(state.learner.weights())
    assert state.predict(items) == state.predict(items)
    assert adapter_hash(state.learner.weights()) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"persistent_optimizer": True},
        {"objective": "eata", "eata_margin": 50.0, "eata_redundancy": 2.0},
        {"objective": "sar", "sar_margin": 50.0},
        {"guard": True},
    ],
)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(lm, tmp_path, settings):
    config = {**FAST, **settings}
    state = Adaptation(lm, config)
    items = list(read_items(lm, PROMPTS, state.config))
    state.update(state.predict(items[:3]))
    state.save(tmp_path / "state")
    wanted = state.update(state.predict(items[3:6]))
    other = Adaptation(tiny_lm(), config)
    other.restore(tmp_path / "state")
    got = other.update(other.predict(items[3:6]))
    for name in ("answers", "steps", "adapter_before", "adapter_after", "signs"):
        assert got[name] == wanted[name], name
    # What is saved is an adapter like any other.
    plain = tiny_lm()
    plain.load_adapter(tmp_path / "state")
    state.restore(tmp_path / "state")
    done = generate(plain, PROMPTS, sampling=Sampling(0.0), max_tokens=12)
    assert [one.ids for one in done] == ids(state.predict(items))


def test_a_state_of_another_shape_is_refused(lm, tmp_path):
    Adaptation(lm, FAST).save(tmp_path / "state")
    with pytest.raises(UsageError, match="another rank"):
        Adaptation(lm, {**FAST, "rank": 4}).restore(tmp_path / "state")


def test_beginning_with_a_trained_adapter(lm, tmp_path):
    list(adapt(lm, PROMPTS, FAST))
    trained = lm.adapter
    hashed = adapter_hash(dict(trained.named_parameters()))
    state = Adaptation(tiny_lm(), FAST, adapter=trained)
    assert adapter_hash(state.learner.weights()) == hashed


def test_a_model_of_sixteen_bits_learns_in_thirty_two(lm, tmp_path):
    list(adapt(lm, PROMPTS, FAST))
    half = tiny_lm(dtype=torch.bfloat16)
    adapter = lm.adapter.bfloat16()
    state = Adaptation(half, {**FAST, "learning_rate": 1e-5}, adapter=adapter)
    assert {p.dtype for p in state.learner.parameters.values()} == {torch.float32}
    items = list(read_items(half, PROMPTS, state.config))
    record = state.update(state.predict(items))
    assert record["adapter_before"] != record["adapter_after"]
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}


# Items that cannot be answered


def test_bad_items_are_skipped_with_a_reason(lm, tmp_path):
    path = tmp_path / "stream.jsonl"
    lines = [
        b'{"id": "good", "prompt": "The token"}',
        b"",
        b'{"prompt": ""}',
        b"{not json",
        b'{"answer": 3}',
        b"\xff\xfe",
        json.dumps({"prompt": "word " * 200}).encode(),
        b'{"messages": [{"role": "user", "content": "hello"}]}',
        b"17",
        b'"a bare text"',
        b'{"prompt": [5, 6, 999999]}',
        b'{"instruction": "Add.", "input": "1 2"}',
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    config = {**FAST, "prompt_tokens": 64}
    records = []
    answers = list(adapt(lm, read_lines(path), config, on_update=records.append))
    assert [a.id for a in answers if not a.skipped] == ["good", "7", "9", "11"]
    reasons = {a.place: a.skipped for a in answers if a.skipped}
    assert list(reasons) == [1, 2, 3, 4, 5, 6, 8, 10]
    for place, part in {1: "empty", 2: "empty", 3: "JSON", 4: "messages", 5: "UTF-8", 6: "64",
                        8: "int", 10: "999999"}.items():  # fmt: skip
        assert part in reasons[place], reasons[place]
    assert all(a.finish_reason == "skipped" and not a.ids for a in answers if a.skipped)
    assert len(records) == 2  # two batches of two that can be answered


def test_a_long_prompt_can_be_cut(lm):
    config = FGTTLConfig(too_long="cut", prompt_tokens=10, max_new_tokens=4)
    [cut, whole] = read_items(lm, ["word " * 300, "a b"], config)
    assert list(cut.prompt_ids) == lm.encode("word " * 300)[:10]
    assert list(whole.prompt_ids) == lm.encode("a b")


def test_an_answer_without_tokens_to_learn_from_is_no_accident(lm):
    records = []
    config = {**FAST, "objective": "fg-ttl", "max_new_tokens": 1}
    list(adapt(lm, ["The token", Malformed("no")], config, on_update=records.append))
    assert records[0]["adapter_before"] == records[0]["adapter_after"]


def test_a_stream_of_nothing(lm):
    assert list(adapt(lm, [], FAST)) == []
    assert [a.skipped for a in adapt(lm, ["", " "], FAST)] == ["the prompt is empty"] * 2


def test_mistakes_are_told_before_anything_runs(lm):
    with pytest.raises(ConfigError, match="learning_rate"):
        adapt(lm, PROMPTS, {"learnin_rate": 1e-3})
    with pytest.raises(ConfigError, match="offline"):
        adapt(lm, PROMPTS, {"mode": "offline"})
    with pytest.raises(UsageError, match="qq_proj"):
        adapt(lm, PROMPTS, {"targets": ("qq_proj",)})


# The log, and going on from it


def test_the_log_says_what_was_done(lm, tmp_path):
    config = {**FAST, "objective": "fg-ttl", "guard": True, "max_new_tokens": 40}
    answers = list(adapt(lm, [*PROMPTS[:3], ""], config, folder=tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "items.jsonl").open()]
    assert [row["batch"] for row in rows] == [0, 1]
    assert [a["id"] for row in rows for a in row["answers"]] == ["0", "1", "2", "3"]
    assert rows[1]["adapter_before"] == rows[0]["adapter_after"]
    for row in rows:
        kept = [a for a in row["answers"] if not a["skipped"]]
        for step in row["steps"]:
            for place, positions in zip(step["texts"], step["positions"], strict=True):
                start = len(kept[place]["prompt_ids"])
                assert all(start <= p < start + len(kept[place]["ids"]) for p in positions)
    assert rows[0]["answers"][0]["text"] == answers[0].text
    saved = tmp_path / "run" / "adapters" / "000002"
    assert saved.is_dir() and (saved / "adapter_config.json").is_file()


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5, 7])
def test_a_stopped_run_goes_on(tmp_path, stop):
    wanted, log = list(adapt(tiny_lm(), PROMPTS, FAST)), []
    begun = adapt(tiny_lm(), PROMPTS, FAST, folder=tmp_path / "run")
    assert [next(begun) for _ in range(stop)] == wanted[:stop]
    begun.close()
    resumed = adapt(tiny_lm(), PROMPTS, FAST, folder=tmp_path / "run", on_update=log.append)
    assert list(resumed) == wanted
    done = max(0, (stop - 1) // 2)  # batches that were learned from before it stopped
    assert [record["batch"] for record in log] == list(range(done, 4))
    # And once it has ended, nothing is computed again.
    log.clear()
    again = adapt(tiny_lm(), PROMPTS, FAST, folder=tmp_path / "run", on_update=log.append)
    assert list(again) == wanted and log == []


def test_a_crash_between_state_and_log_costs_one_batch(tmp_path, monkeypatch):
    from lmsmith.evaluation.runs import RunFolder

    wanted = list(adapt(tiny_lm(), PROMPTS, FAST))
    append, calls = RunFolder.append, []

    def fails(self, rows):
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return append(self, rows)

    monkeypatch.setattr(RunFolder, "append", fails)
    with pytest.raises(KeyboardInterrupt):
        list(adapt(tiny_lm(), PROMPTS, FAST, folder=tmp_path / "run"))
    assert list(adapt(tiny_lm(), PROMPTS, FAST, folder=tmp_path / "run")) == wanted


def test_another_stream_or_other_settings_are_refused(lm, tmp_path):
    begun = adapt(lm, PROMPTS, FAST, folder=tmp_path / "run")
    for _ in range(5):
        next(begun)
    with pytest.raises(RunFolderBusyError):
        adapt(lm, PROMPTS, FAST, folder=tmp_path / "run")
    begun.close()
    with pytest.raises(UsageError, match="top_p"):
        adapt(lm, PROMPTS, {**FAST, "top_p": 0.1}, folder=tmp_path / "run")
    with pytest.raises(UsageError, match="item 1 of the stream"):
        list(adapt(lm, [PROMPTS[0], "another"], FAST, folder=tmp_path / "run"))


# TLM before the first answer


def test_offline_learns_from_all_prompts_before_it_answers(lm, tmp_path):
    config = {**FAST, "objective": "tlm", "mode": "offline", "tlm_threshold": 1.0}
    records = []
    answers = list(adapt(lm, PROMPTS, config, folder=tmp_path / "run", on_update=records.append))
    learned, answered = records[:4], records[4:]
    assert all(r["steps"] for r in learned) and not any("steps" in r for r in answered)
    assert ids(answers) != frozen(PROMPTS)
    state = Adaptation(tiny_lm(), config)
    items = list(read_items(lm, PROMPTS, state.config))
    state.learn_prompts(items)
    for place in range(0, 7, 2):
        assert ids(state.predict(items[place : place + 2])) == ids(answers)[place : place + 2]
    assert list(adapt(tiny_lm(), PROMPTS, config, folder=tmp_path / "run")) == answers


# The guard

WILD = {**FAST, "learning_rate": 3.0, "guard": True}


def test_a_collapsing_model_is_rolled_back_and_says_so(lm):
    records = []
    answers = list(adapt(lm, PROMPTS, WILD, on_update=records.append))
    assert ids(answers) == frozen(PROMPTS)  # every update was taken back
    assert all(r["rolled_back"] for r in records)
    assert all(r["adapter_before"] == r["adapter_after"] for r in records)
    unguarded = list(adapt(tiny_lm(), PROMPTS, {**WILD, "guard": False}))
    assert ids(unguarded) != ids(answers)


def test_signs_of_a_model_that_has_not_moved(lm):
    state = Adaptation(lm, FAST)
    answers = state.predict(list(read_items(lm, PROMPTS, state.config)))
    from lmsmith.methods.fg_ttl.forward import Text

    texts = [Text((*a.prompt_ids, *a.ids), len(a.prompt_ids)) for a in answers]
    found = guard.signs(state.learner, texts)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.entropy == pytest.approx(found.entropy_before)
    assert guard.signs(state.learner, [Text((5, 6), 2)]) is None


def test_what_is_trouble():
    config = FGTTLConfig(guard_kl=0.1, guard_entropy=0.5)
    assert trouble(None, config) == ""
    assert trouble(Signs(0.05, 0.9, 1.0), config) == ""
    assert "KL" in trouble(Signs(0.2, 0.9, 1.0), config)
    assert "entropy" in trouble(Signs(0.05, 0.4, 1.0), config)
    assert "KL" in trouble(Signs(float("nan"), 0.9, 1.0), config)


def test_repetition_is_the_share_of_repeated_grams():
    assert repetition([[1, 2, 3, 4, 5, 6]]) == 0
    assert repetition([[1, 2] * 8]) == pytest.approx(1 - 2 / 13)
    assert repetition([[7] * 20, [1, 2, 3]]) == pytest.approx((1 - 1 / 17) / 2)
    assert repetition([]) == 0


def test_looping_answers_are_taken_back_before_anyone_sees_them(lm, monkeypatch):
    config = {**FAST, "guard": True, "guard_kl": 1e9, "guard_entropy": 0.0}
    loops = iter(
        [0.1, 0.9, 0.1, 0.1, 0.1, 0.1]
    )  # the second batch loops, answered again it does not
    monkeypatch.setattr("lmsmith.methods.fg_ttl.adaptation.repetition", lambda answers: next(loops))
    records = []
    answers = list(adapt(lm, PROMPTS[:4], config, on_update=records.append))
    assert ids(answers)[:4] == frozen(PROMPTS[:4])  # answered by what answered the first batch
    assert "4-grams" in records[1]["rolled_back"]
    assert records[1]["adapter_before"] == records[0]["adapter_before"]


def test_an_answer_is_plain_data():
    assert Answer(0, "0", 0, skipped="why").finish_reason == "skipped"
    assert torch.is_grad_enabled()
