"""The loop over a decoder, methods by name, and the shared row output."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from lmsmith import cards
from lmsmith.decoding.events import Request, Sampling
from lmsmith.decoding.generate import check_offers, complete, generate, make_decoder, stream
from lmsmith.decoding.plain import PlainDecoder
from lmsmith.decoding.rows import RowOutput
from lmsmith.decoding.text import ByteText
from lmsmith.errors import CapabilityError, ConfigError, UnknownNameError, UsageError
from lmsmith.testing import tiny_lm

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def fixed(prompt, length):
    return Request(prompt, length, GREEDY, ignore_eos=True)


class Watched(PlainDecoder):
    """Notes how many rows each step advances."""

    def __init__(self, lm):
        super().__init__(lm)
        self.sizes = []

    def step(self):
        self.sizes.append(self.active)
        return super().step()


class TestStream:
    def test_the_batch_stays_full(self, lm):
        lengths = [3, 9, 1, 5, 2, 7, 4, 6, 3]
        decoder = Watched(lm)
        done = complete(decoder, [fixed("The", n) for n in lengths], batch_size=3)
        assert [len(one.ids) for one in done] == lengths
        # Every step has three rows until nothing waits any more.
        waiting_ends = decoder.sizes.index(2)
        assert set(decoder.sizes[:waiting_ends]) == {3}
        assert sum(decoder.sizes) == sum(lengths)

    def test_requests_are_taken_only_when_there_is_room(self, lm):
        taken = []

        def endless():
            while True:
                taken.append(len(taken))
                yield fixed("The", 4)

        decoder = PlainDecoder(lm)
        events = stream(decoder, endless(), batch_size=2)
        for _ in range(5):
            next(events)
        assert len(taken) == 2
        events.close()
        assert decoder.active == 0 and decoder.session.rows == []

    def test_events_carry_the_request_s_position(self, lm):
        prompts = ["The", "def", "a"]
        events = list(stream(PlainDecoder(lm), [fixed(p, 3) for p in prompts], batch_size=1))
        ends = [event.row for event in events if event.trace is not None]
        assert ends == [0, 1, 2]

    def test_no_requests_no_events(self, lm):
        assert list(stream(PlainDecoder(lm), [])) == []

    def test_a_batch_size_below_one(self, lm):
        with pytest.raises(UsageError, match="batch_size"):
            list(stream(PlainDecoder(lm), [], batch_size=0))


class TestGenerate:
    def test_completions_come_in_the_prompts_order(self, lm):
        prompts = ["The token", [5, 6, 7], "你好", [{"role": "user", "content": "Hi"}]]
        seen = []
        together = generate(
            lm, prompts, sampling=GREEDY, max_tokens=6, batch_size=2, on_event=seen.append
        )
        for position, (prompt, one) in enumerate(zip(prompts, together, strict=True)):
            [alone] = generate(lm, [prompt], sampling=GREEDY, max_tokens=6)
            assert one.prompt is prompt and one.ids == alone.ids and one.text == alone.text
            own = [event for event in seen if event.row == position]
            assert "".join(event.text for event in own) == one.text
            assert own[-1].trace is one.trace

    def test_equal_prompts_differ_and_are_reproducible(self, lm):
        kwargs = {"sampling": Sampling(seed=7), "max_tokens": 12, "ignore_eos": True}
        first = generate(lm, ["The"] * 3, **kwargs)
        again = generate(lm, ["The"] * 3, batch_size=1, **kwargs)
        assert [one.ids for one in first] == [one.ids for one in again]
        assert len({one.ids for one in first}) == 3
        [second] = generate(lm, ["The"], **kwargs | {"sampling": Sampling(seed=8)})
        assert second.ids == first[1].ids

    def test_a_setting_for_each_prompt(self, lm):
        own = [GREEDY, Sampling(seed=1)]
        done = generate(lm, ["The", "The"], sampling=own, max_tokens=8, ignore_eos=True)
        for one, sampling in zip(done, own, strict=True):
            [alone] = generate(lm, ["The"], sampling=[sampling], max_tokens=8, ignore_eos=True)
            assert one.ids == alone.ids
        with pytest.raises(UsageError, match="1 sampling settings for 2 prompts"):
            generate(lm, ["a", "b"], sampling=own[:1])

    def test_one_text_is_a_list_of_one(self, lm):
        [done] = generate(lm, "The", sampling=GREEDY, max_tokens=3, stop="\0")
        assert done.prompt == "The"

    @pytest.mark.parametrize("prompts", [[5, 6, 7], [{"role": "user", "content": "Hi"}], [None]])
    def test_one_prompt_given_as_the_list(self, lm, prompts):
        with pytest.raises(UsageError, match="list of prompts"):
            generate(lm, prompts)

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (b"x\xff", "0xff at "),
            ("", "is empty"),
            ("cat " * 256, "(reads .*256|256 .*reads)"),
            ("caf\ud800", r"the prompt holds a lone surrogate, U\+D800, at character 3"),
            ([{"role": "user", "content": "\udce9"}], r"lone surrogate, U\+DCE9"),
            ([{"role": "user", "content": [{"type": "text", "text": "\udce9"}]}], "surrogate"),
        ],
        ids=["bytes", "empty", "long", "surrogate", "message", "part"],
    )
    @pytest.mark.parametrize("method", [None, "byte-sampler"])
    def test_a_bad_prompt_among_many_is_named_before_anything_is_generated(
        self, lm, method, bad, says
    ):
        events = []
        with pytest.raises(UsageError, match=rf"^prompt 3 of 4: .*{says}"):
            generate(
                lm,
                ["a", "b", bad, "d"],
                method=method,
                max_tokens=2,
                batch_size=1,
                on_event=events.append,
            )
        assert events == []

    def test_a_bad_prompt_alone_has_no_number(self, lm):
        with pytest.raises(UsageError, match=r"^the prompt holds a lone surrogate"):
            generate(lm, [[{"role": "user", "content": "\udce9"}]])
        with pytest.raises(UsageError, match=r"^a stop string holds a lone surrogate"):
            generate(lm, ["a"], stop="\udce9")
        with pytest.raises(UsageError, match=r"^the prompt"):
            generate(lm, [b"x\xff"])


class TestOffers:
    def test_a_model_that_lacks_what_is_needed_is_named(self):
        encoder = {"hidden", "embedding"}
        for card, who, lacks in (
            (None, "plain decoding", "logits"),
            (cards.get("byte-sampler"), "byte-sampler", "bpe and logits"),
        ):
            with pytest.raises(CapabilityError) as caught:
                check_offers(encoder, "minilm", card)
            assert str(caught.value) == (
                f"{who} needs {lacks}, but the model offers embedding, hidden; "
                "give another model than minilm"
            )
        check_offers({"hidden", "logits"}, "any")


METHOD = {
    "card.toml": """
        name = "shout"
        purpose = "plain decoding under another name"
        needs = ["logits"]
        [entry]
        config = "shout_method:Config"
        decoder = "shout_method:make"
    """,
    "__init__.py": """
        from lmsmith.decoding.plain import PlainDecoder
        from lmsmith.settings import Settings, setting

        class Config(Settings):
            volume: int = setting(1, "how loud", unit="shouts", source="this test")

        class Decoder(PlainDecoder):
            pass

        def make(models, config):
            decoder = Decoder(models[0])
            decoder.volume = config.volume
            return decoder
    """,
}


@pytest.fixture
def shout(tmp_path, monkeypatch):
    folder = tmp_path / "shout_method"
    folder.mkdir()
    for name, text in METHOD.items():
        (folder / name).write_text(textwrap.dedent(text))
    monkeypatch.setenv("LMSMITH_METHODS", str(folder))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    sys.modules.pop("shout_method", None)


class TestMakeDecoder:
    def test_plain_is_the_default(self, lm):
        assert isinstance(make_decoder(lm), PlainDecoder)

    def test_a_method_by_its_card(self, lm, shout):
        assert make_decoder(lm, "shout").volume == 1
        assert make_decoder([lm], "shout", {"volume": 3}).volume == 3
        [done] = generate(lm, ["The"], method="shout", sampling=GREEDY, max_tokens=5)
        [plain] = generate(lm, ["The"], sampling=GREEDY, max_tokens=5)
        assert done.ids == plain.ids

    def test_an_unknown_method(self, lm, shout):
        with pytest.raises(UnknownNameError, match="shout"):
            make_decoder(lm, "shuot")

    def test_an_unknown_setting(self, lm, shout):
        with pytest.raises(ConfigError, match="volume"):
            make_decoder(lm, "shout", {"volum": 3})

    def test_what_the_model_must_offer(self, lm, shout):
        card = shout / "card.toml"
        card.write_text(card.read_text().replace('["logits"]', '["embedding", "logits"]'))
        with pytest.raises(CapabilityError, match="shout needs embedding, but the model offers"):
            make_decoder(lm, "shout")

    def test_too_many_models(self, lm, shout):
        with pytest.raises(UsageError, match="shout takes one model, not 2"):
            make_decoder([lm, lm], "shout")
        with pytest.raises(UsageError, match="plain decoding takes one model"):
            make_decoder([lm, lm])
        with pytest.raises(UsageError, match="no model"):
            make_decoder([])

    def test_a_method_that_makes_no_text(self, lm, shout):
        card = shout / "card.toml"
        lines = [line for line in card.read_text().splitlines() if "decoder =" not in line]
        card.write_text("\n".join(lines))
        with pytest.raises(UsageError, match="no decoder"):
            make_decoder(lm, "shout")

    def test_plain_decoding_has_no_settings(self, lm):
        with pytest.raises(UsageError, match="no settings"):
            make_decoder(lm, config={"volume": 1})


class TestRowOutput:
    """What decoders that give several tokens a step, or bytes, rely on."""

    def open(self, **asked):
        return RowOutput(3, Request("x", **asked), ByteText(), end_ids=[256])

    def test_several_tokens_at_once_end_where_one_by_one_would(self):
        for asked, given, taken, text, reason in (
            ({"max_tokens": 4}, b"abcdef", 4, "abcd", "length"),
            ({"stop": ("cd",)}, b"abcdef", 4, "ab", "stop"),
            ({"stop_ids": (ord("c"),)}, b"abcdef", 3, "ab", "stop"),
            ({"max_tokens": 3}, "aé".encode(), 3, "aé", "length"),
        ):
            many, single = self.open(**asked), self.open(**asked)
            event = many.push(given, [-1.0] * len(given))
            events = []
            for byte in given:
                events.append(single.push([byte], [-1.0]))
                if events[-1] is not None and events[-1].trace is not None:
                    break
            assert event.text == "".join(one.text for one in events if one) == text
            assert event.trace.finish_reason == events[-1].trace.finish_reason == reason
            assert event.trace.tokens_kept == len(event.ids) == taken
            assert event.trace.tokens_discarded == len(given) - taken

    def test_ids_wait_for_their_text(self):
        output = self.open(stop=("zz",))
        assert output.push(b"\xc3", [-1.0], {"mode": 1}) is None
        event = output.push(b"\xa9", [-2.0], {"sure": 0.5})
        assert (event.text, event.ids, event.logprobs) == ("é", (0xC3, 0xA9), (-1.0, -2.0))
        assert event.info == {"mode": 1, "sure": 0.5} and event.trace is None
        assert output.push(b"z", [-1.0]) is None
        event = output.push([256], [-0.5])
        assert event.text == "z" and event.ids == (ord("z"), 256)
        assert event.trace.finish_reason == "stop" and event.trace.tokens_kept == 4

    def test_half_a_character_at_the_end_is_not_shown(self):
        output = self.open(max_tokens=2)
        event = output.push(b"a\xe4", [-1.0, -1.0])
        assert event.text == "a" and event.ids == tuple(b"a\xe4") and event.trace is not None

    def test_cancelling_gives_what_was_held_back(self):
        output = self.open(stop=("end",))
        output.push(b"the e", [-1.0] * 5)
        assert output.end("cancelled").text == "e"


def test_the_package_imports_without_torch():
    code = (
        "import sys, lmsmith.decoding, lmsmith.decoding.generate;"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
