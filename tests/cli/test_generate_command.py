"""`lmsmith generate` on a tiny model in a folder."""

import io
import json
import signal
import sys

import pytest

from lmsmith import cards
from lmsmith.decoding.events import Sampling
from lmsmith.decoding.generate import generate
from lmsmith.models import open_model

FIXED = ("--max-tokens", 12, "--temperature", 0)


@pytest.fixture(scope="module")
def lm(tiny):
    return open_model(str(tiny))


def greedy(lm, *prompts, **options):
    return generate(lm, prompts, sampling=Sampling(temperature=0), max_tokens=12, **options)


@pytest.fixture
def stdin(monkeypatch):
    def put(blob):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(blob)))

    return put


def test_the_text_is_what_the_library_gives(lmsmith, tiny, lm):
    done = lmsmith("generate", tiny, "the cat", *FIXED)
    assert done.code == 0
    assert done.out == greedy(lm, "the cat")[0].text + "\n"


def test_json_holds_text_ids_logprobs_and_trace(lmsmith, tiny, lm):
    document = lmsmith("generate", tiny, "the cat", *FIXED, "--json").document
    [row], [wanted] = document["completions"], greedy(lm, "the cat")
    assert (row["text"], row["ids"]) == (wanted.text, list(wanted.ids))
    assert row["logprobs"] == pytest.approx(list(wanted.logprobs))
    assert row["trace"]["finish_reason"] in ("length", "stop")
    assert document["sampling"]["temperature"] == 0


def test_a_seed_gives_the_same_text_twice_and_rows_of_their_own(lmsmith, tiny, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\n\nthe cat\n")
    command = ("generate", tiny, "--prompts", prompts, "--max-tokens", 20, "--seed", 4, "--json")
    first, second = (
        [row["text"] for row in lmsmith(*command).document["completions"]] for _ in range(2)
    )
    assert first == second
    assert first[0] != first[1]


def test_standard_input_less_a_final_line_break_is_the_prompt(lmsmith, tiny, stdin):
    stdin("naïve cat\n".encode())
    done = lmsmith("generate", tiny, "-", "--dry-run")
    assert done.document["prompts"] == ["naïve cat"]


def test_input_that_is_not_utf8_is_one_line(lmsmith, tiny, stdin, tmp_path):
    stdin(b"caf\xe9 noir")
    done = lmsmith("generate", tiny, "-")
    assert done.code == 2
    assert "standard input is not UTF-8: byte 0xe9 at offset 3" in done.line
    (tmp_path / "p.txt").write_bytes(b"ok\n\xff\n")
    assert "p.txt is not UTF-8" in lmsmith("generate", tiny, "--prompts", tmp_path / "p.txt").line
    assert "PROMPT is not UTF-8" in lmsmith("generate", tiny, "caf\udce9").line
    half = ("generate", tiny, "caf\udcc3", "--method", "byte-sampler")  # é without its second byte
    assert "PROMPT is not UTF-8" in lmsmith(*half, "--chat").line


def test_many_prompts_come_in_their_order_whatever_ends_first(lmsmith, tiny, lm, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = ["a", "the cat sat on", "bb b"]
    rows = [{"prompt": texts[0]}, texts[1], {"prompt": texts[2]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = [c.text for c in greedy(lm, *texts)]
    for size in (1, 2, 32):
        command = ("generate", tiny, "--prompts", prompts, *FIXED, "--batch-size", size)
        assert lmsmith(*command).out == "".join(f"{text}\n" for text in wanted)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ("{", "line 1 is not JSON"),
        ('"a"\n{"text": "b"}', "line 2 has neither `prompt` nor `messages`"),
        ('{"prompt": 3}', "line 1 holds no prompt; a prompt is text, a list of messages"),
        ('"a"\n[[1]]', "line 2 holds no prompt"),
        ("[]", "line 1 holds no prompt"),
        ("[1, true]", "line 1 holds no prompt"),
        ('[1, {"role": "user", "content": "a"}]', "line 1 holds no prompt"),
        ('{"messages": [{"content": "a"}]}', "line 1 holds no prompt"),
        ('{"messages": [{"role": "user", "content": {"a": 1}}]}', "line 1 holds no prompt"),
        ('\n"a"\n' + "[" * 100_000, "line 3 is nested too deeply"),
        ("9" * 5000, "line 1 is not JSON"),
        ('"a"\n"b\\ud800"', "prompt 2 of 2: the prompt holds a lone surrogate, U+D800"),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_file_of_prompts_is_one_line(lmsmith, tiny, tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    done = lmsmith("generate", tiny, "--prompts", path)
    assert done.code == 2
    assert message in done.line


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_is_split_at_line_breaks_only_and_may_have_a_byte_order_mark(
    lmsmith, tmp_path, name
):
    texts = ["one\u2028line", "a\x0bb\x0cc\x1cd\x85e", "naïve"]
    lines = [json.dumps(t, ensure_ascii=False) if "json" in name else t for t in texts]
    path = tmp_path / name
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert lmsmith("generate", "m", "--prompts", path, "--dry-run").document["prompts"] == texts


def test_rows_of_json_may_be_text_messages_or_ids(lmsmith, tmp_path):
    rows = ["a", [5, 6], [{"role": "user", "content": "hi"}]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"messages": rows[2]}, {"prompt": ""}])))
    document = lmsmith("generate", "m", "--prompts", path, "--dry-run").document
    assert document["prompts"] == [*rows, rows[2], ""]


@pytest.mark.parametrize(
    ("bad", "says"),
    [("", "the prompt is empty"), ("cat " * 256, "shorten it"), ([9999], "9999 is no token")],
    ids=["empty", "long", "id"],
)
def test_a_bad_prompt_among_many_is_named_before_any_text(lmsmith, tiny, tmp_path, bad, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ["a", "b", {"prompt": bad}, "d"]))
    done = lmsmith("generate", tiny, "--prompts", path, *FIXED, "--batch-size", 1)
    assert done.code == 2
    assert done.line.startswith("error: prompt 3 of 4: ") and says in done.line


@pytest.mark.parametrize("option", ["--system", "--stop"])
def test_an_option_that_is_not_utf8_is_one_line(start, option):
    child = start("generate", "m", "p", option, "caf\udce9", "--dry-run")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err.count(b"\n")) == (2, b"", 1)
    assert f"{option} is not UTF-8: byte 0xe9 at offset 3".encode() in err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_lacks_characters_shows_question_marks(start, tiny, encoding, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    words = ("generate", tiny, "你好 naïve", "--max-tokens", 1, "--temperature", 0)
    child = start(*words, "--show")
    shown, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert shown.startswith("?? naïve".encode(encoding, "replace"))
    document, err = start(*words, "--dry-run").communicate(timeout=60)
    assert err == b"" and json.loads(document.decode(encoding))["prompts"] == ["你好 naïve"]


def test_ctrl_c_ends_the_line_and_says_so_on_one_of_its_own(start, tiny):
    child = start("generate", tiny, "the cat", "--max-tokens", 240, "--temperature", 2)
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    # Before it, a slow machine may have said that opening took its time.
    assert child.returncode == 130 and err.splitlines()[-1:] == [b"stopped"]
    assert first and (first + out).endswith(b"\n") and b"Traceback" not in err


def test_an_empty_prompt_and_one_too_long_are_one_line(lmsmith, tiny, lm):
    long = lmsmith("generate", tiny, "cat " * lm.context)
    assert long.code == 2
    assert "reads at most 256; shorten it" in long.line
    empty = lmsmith("generate", tiny, "")
    assert empty.code == 2
    assert "empty" in empty.line


def test_a_stop_string_ends_the_text(lmsmith, tiny, lm):
    text = greedy(lm, "the cat")[0].text
    stop = text[len(text) // 2 :][:2]
    done = lmsmith("generate", tiny, "the cat", *FIXED, f"--stop={stop}")
    assert done.out == text[: text.index(stop)] + "\n"


def test_chat_and_system_make_messages(lmsmith, tiny):
    plain = lmsmith("generate", tiny, "hi", "--dry-run").document
    chat = lmsmith("generate", tiny, "hi", "--chat", "--dry-run").document
    system = lmsmith("generate", tiny, "hi", "--system", "be brief", "--dry-run").document
    raw = lmsmith("generate", tiny, "hi", "--raw", "--dry-run").document
    assert plain["prompts"] == raw["prompts"] == ["hi"]
    assert chat["prompts"] == [[{"role": "user", "content": "hi"}]]
    assert system["prompts"][0][0] == {"role": "system", "content": "be brief"}


def test_settings_come_from_options_over_file_over_defaults(lmsmith, tmp_path):
    config = tmp_path / "settings.toml"
    config.write_text('combine = "product"\ntoken_top_k = 7\n')
    # `power` agrees only with what the file says, so the two must be checked together.
    words = ("--method", "byte-sampler", "--config", config, "--power", "0.5", "--token-top-k", 3)
    settings = lmsmith("generate", "m", "p", *words, "--dry-run").document["settings"]
    assert (settings["combine"], settings["power"], settings["token_top_k"]) == ("product", 0.5, 3)
    assert settings["alpha"] == 1.0


def test_help_with_a_method_lists_its_settings(lmsmith):
    out = " ".join(lmsmith("generate", "--method", "byte-sampler", "--help").out.split())
    for row in cards.get("byte-sampler").load("config").describe():
        assert f"--{row.name.replace('_', '-')} " in out


def test_show_colours_by_the_signal_and_changes_no_text(lmsmith, tiny, monkeypatch):
    from lmsmith.display.theme import console

    plain = lmsmith("generate", tiny, "the cat", *FIXED).out
    shown = lmsmith("generate", tiny, "the cat", *FIXED, "--show").out
    assert shown == f"the cat{plain}"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    console.cache_clear()
    try:
        assert "\x1b[38;2;" in lmsmith("generate", tiny, "the cat", *FIXED, "--show").out
    finally:
        console.cache_clear()


def test_text_streams_before_it_is_whole(start, tiny):
    words = ("the cat", "--max-tokens", 150, "--temperature", 2.0, "--seed", 0)
    child = start("generate", tiny, *words)
    first = child.stdout.read(1)
    assert first and child.poll() is None
    rest, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert len(rest) > 50


def test_several_models_go_to_a_method_that_takes_them(lmsmith, tiny):
    done = lmsmith("generate", f"{tiny}+{tiny}", "the cat", *FIXED, "--method", "byte-sampler")
    assert done.code == 0, done.err
    one = lmsmith("generate", tiny, "the cat", *FIXED, "--method", "byte-sampler")
    assert done.out == one.out


def test_a_corrupt_model_is_one_line(lmsmith, tiny, tmp_path):
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = lmsmith("generate", folder, "the cat")
    assert done.code == 1
    assert str(folder) in done.line


@pytest.mark.parametrize("method", [(), ("--method", "byte-sampler")])
def test_an_encoder_is_refused_before_its_weights_are_read(lmsmith, tmp_path, method):
    from transformers import BertConfig

    from lmsmith.testing import tiny_tokenizer

    BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)  # and no weights at all
    tiny_tokenizer().save_pretrained(tmp_path)
    done = lmsmith("generate", tmp_path, "x", *method)
    assert done.code == 2
    who = method[1] if method else "plain decoding"
    assert done.line.startswith(f"error: {who} needs logits, but the model offers embedding")
    known = lmsmith("generate", "minilm", "x", *method)
    assert known.code == 2 and "minilm" in known.line


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_it_says_how_it_went(tiny, tmp_path):
    import os
    import pty
    import subprocess

    ours, theirs = pty.openpty()
    words = ["generate", tiny, "the cat", *FIXED, "--show"]
    with open(tmp_path / "out", "wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "lmsmith", *map(str, words)], stdout=out, stderr=theirs
        )
    os.close(theirs)
    told = b""
    while True:
        try:
            told += (piece := os.read(ours, 4096))
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
    os.close(ours)
    assert child.wait(timeout=60) == 0, told
    assert (tmp_path / "out").read_bytes().startswith(b"the cat")
    last = told.decode().splitlines()[-1]
    assert "12 tokens, " in last and "a second, ended by length" in last
    assert "orange is low, blue is high" in last
