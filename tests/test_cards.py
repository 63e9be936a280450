import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmsmith import cards
from lmsmith.errors import ConfigError, LmsmithError, MissingError, UnknownNameError, UsageError

DOCS = Path(__file__).parent.parent / "docs" / "methods"
BUILT_IN = {name: card for name, card in cards.find().items() if card.origin == "built-in"}

CARD = """
name = "{name}"
purpose = "Does nothing."
family = "measure"

[entry]
bench = "{package}.thing:bench"
"""


def write(folder: Path, name: str = "throw-away", text: str = CARD) -> Path:
    folder.mkdir(parents=True)
    (folder / "card.toml").write_text(text.format(name=name, package=folder.name))
    (folder / "__init__.py").touch()
    (folder / "thing.py").write_text("def bench(bench): ...\n")
    return folder


@pytest.fixture
def folders(monkeypatch, tmp_path):
    monkeypatch.setenv(cards.FOLDERS_VARIABLE, str(tmp_path / "mine"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "mine"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_card_is_filled(name):
    card = BUILT_IN[name]
    filled = {name for name, value in vars(card.paper).items() if value}
    # Not every paper is on arXiv; then its venue says where to find it.
    assert filled == set(vars(card.paper)) or (
        filled == set(vars(card.paper)) - {"arxiv"} and "OpenReview" in card.paper.venue
    ), "every line of [paper]"
    assert card.purpose and card.needs and card.entry
    assert card.sources.read and card.sources.inferred and card.sources.limits
    assert card.folder.name == name.replace("-", "_")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_method_has_a_page_and_is_in_the_navigation(name):
    page = DOCS / f"{name}.md"
    assert page.is_file(), f"write docs/methods/{name}.md"
    assert page.read_text("utf-8").lstrip().startswith("# ")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_entry_of_a_built_in_card_loads(name):
    for kind in BUILT_IN[name].entry:
        assert callable(BUILT_IN[name].load(kind))


@pytest.mark.parametrize("name", [n for n, card in BUILT_IN.items() if "config" in card.entry])
def test_every_setting_of_a_built_in_method_has_meaning_and_source(name):
    for row in BUILT_IN[name].load("config").describe():
        assert row.meaning and row.source, row.name


def test_a_folder_in_the_variable_is_found_and_loaded(folders):
    write(folders / "throw_away_1")
    card = cards.get("throw-away")
    assert (card.family, card.origin, card.status) == ("measure", "folder", "experimental")
    assert card.load("bench").__module__ == "throw_away_1.thing"


def test_the_variable_may_name_the_method_itself_and_several_folders(
    folders, monkeypatch, tmp_path
):
    one, two = write(tmp_path / "a" / "one", "one"), write(tmp_path / "b" / "two", "two")
    monkeypatch.setenv(cards.FOLDERS_VARIABLE, f"{one}{os.pathsep}{two.parent}{os.pathsep}")
    assert {"one", "two"} <= set(cards.find())


def test_a_copy_stands_in_front_of_the_built_in_method(folders):
    name = next(iter(BUILT_IN))
    folder = write(folders / "copied", name)
    assert cards.get(name).folder == folder


def test_reading_cards_runs_no_code_of_theirs(folders):
    folder = write(folders / "explosive")
    (folder / "__init__.py").write_text("raise SystemExit(9)")
    assert cards.get("throw-away").folder == folder


def test_a_package_with_an_entry_point_is_found_without_importing_it(tmp_path):
    # The real mechanism: a distribution's metadata on the path of a fresh interpreter.
    folder = write(tmp_path / "site" / "someones_method", "someones-method")
    (folder / "__init__.py").write_text("import sys; sys.someones_method_was_imported = True")
    info = tmp_path / "site" / "someones_method-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-method\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lmsmith.methods]\nsomeone = someones_method\n")
    code = (
        "import sys; from lmsmith import cards; card = cards.get('someones-method');"
        "assert not hasattr(sys, 'someones_method_was_imported');"
        "print(card.origin, card.load('bench').__module__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["package", "someones_method.thing"]


def test_an_unknown_method_names_the_nearest(folders):
    write(folders / "throw_away_2")
    with pytest.raises(UnknownNameError, match="unknown method 'thraw-away'; did you mean"):
        cards.get("thraw-away")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not a TOML file"),
        ('naem = "x"', "unknown key 'naem'; did you mean 'name'?"),
        ('name = "x"', "'purpose' must be a line of text"),
        ('name = "X y"\npurpose = "p"', "name 'X y' must be lower-case words joined by '-'"),
        ('name = "x"\npurpose = "p"\nfamily = "cook"', "family 'cook' must be one of decode"),
        ('name = "x"\npurpose = "p"\nstatus = "good"', "status 'good' must be one of stable"),
        ('name = "x"\npurpose = "p"\nneeds = ["bpa"]', "needs 'bpa' must be one of"),
        ('name = "x"\npurpose = "p"\nneeds = [1]', "'needs' must be a list of strings"),
        ('name = "x"\npurpose = "p"\nmodels = -1', "'models' must be a whole number"),
        ('name = "x"\npurpose = "p"\npaper = "p"', "'paper' must be a table"),
        ('name = "x"\npurpose = "p"\n[paper]\ntitel = "t"', "unknown key 'titel' in [paper]; did"),
        ('name = "x"\npurpose = "p"\n[entry]\ncli = "a.b"', "must be 'module:attribute'"),
    ],
)
def test_a_wrong_card_is_one_line_with_its_file(folders, text, message):
    folders.mkdir()
    folder = folders / "wrong"
    folder.mkdir()
    (folder / "card.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        cards.find()
    assert message in str(caught.value)
    assert str(folder / "card.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_folders_with_one_name_are_an_error(folders):
    write(folders / "one")
    write(folders / "two")
    with pytest.raises(ConfigError, match="two methods are named 'throw-away'"):
        cards.find()


def test_a_folder_that_is_not_there_is_an_error(folders):
    with pytest.raises(ConfigError, match="which is not a folder"):
        cards.find()


def test_what_cannot_be_loaded_says_why(folders):
    folder = write(folders / "broken_method")
    card = cards.read(folder)
    with pytest.raises(UsageError, match="has no decoder; its card declares bench"):
        card.load("decoder")
    (folder / "thing.py").write_text("import no_such_module_at_all")
    with pytest.raises(MissingError, match="No module named 'no_such_module_at_all'"):
        card.load("bench")
    (folder / "thing.py").write_text("1 / 0")
    with pytest.raises(LmsmithError, match="ZeroDivisionError: division by zero"):
        card.load("bench")
    (folder / "thing.py").write_text("")
    sys.modules.pop("broken_method.thing", None)
    with pytest.raises(LmsmithError, match="has no attribute 'bench'"):
        card.load("bench")
