from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import model_validator

from lmsmith.errors import ConfigError
from lmsmith.settings import Settings, setting


class Oven(Settings):
    heat: float = setting(180.0, "how hot", unit="degrees", source="the recipe", gt=0, le=300)
    mode: Literal["fan", "grill"] = setting("fan", "where heat comes from", source="ours")
    trays: int = setting(1, "how many", ge=1)
    names: tuple[str, ...] = setting((), "what is baked")
    timer: float | None = setting(None, "minutes; none is by hand", unit="minutes")

    @model_validator(mode="after")
    def _agree(self):
        if self.mode == "grill" and self.trays > 1:
            raise ConfigError("mode is 'grill', which takes one tray; set trays to 1")
        return self


class Needy(Settings):
    wanted: int = setting(meaning="must be given")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heet": 1.0}, "unknown setting 'heet'; did you mean 'heat'?"),
        ({"zzzz": 1}, "unknown setting 'zzzz'; known: heat, mode, trays, names, timer"),
        ({"heat": -1.0}, "setting 'heat' is -1.0, but must be greater than 0"),
        ({"heat": "hot"}, "setting 'heat' is 'hot', but must be a valid number"),
        ({"heat": float("nan")}, "setting 'heat' is nan, but must be a finite number"),
        ({"trays": 1.5}, "setting 'trays' is 1.5, but must be a valid integer"),
        ({"trays": True}, "setting 'trays' is True, but must be a valid integer"),
        ({"mode": "gril"}, "did you mean 'grill'?"),
        ({"mode": "grill", "trays": 2}, "mode is 'grill', which takes one tray; set trays to 1"),
        ({"names": ["a", 3]}, "setting 'names' is 3, but must be a valid string"),
        ({"heat": -1.0, "tray": 2}, "; unknown setting 'tray'; did you mean 'trays'?"),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_to_do(values, message):
    for make in (lambda: Oven(**values), lambda: Oven.parse(values)):
        with pytest.raises(ConfigError) as caught:
            make()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_setting_that_must_be_given_is_asked_for():
    with pytest.raises(ConfigError, match="setting 'wanted' must be given"):
        Needy()


def test_settings_do_not_change():
    with pytest.raises(Exception, match="frozen"):
        Oven().heat = 200.0
    assert hash(Oven()) == hash(Oven())


def test_parse_passes_an_instance_and_refuses_what_is_no_mapping():
    oven = Oven(heat=200.0)
    assert Oven.parse(oven) is oven
    assert Oven.parse() == Oven.parse({}) == Oven()
    with pytest.raises(ConfigError, match="expected Oven or a mapping, got int"):
        Oven.parse(3)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "heat": st.floats(1, 300),
            "trays": st.integers(1, 10**6),
            "names": st.lists(st.text()),
            "timer": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        },
    )
)
def test_the_record_of_a_run_reads_back_as_the_same_settings(values):
    oven = Oven.parse(values)
    assert Oven.parse(oven.record()) == oven


def test_a_file_fills_what_is_not_given(tmp_path: Path):
    path = tmp_path / "oven.toml"
    path.write_text('heat = 200.0\nnames = ["bread"]\ntrays = 2\n')
    assert Oven.from_toml(path, trays=3) == Oven(heat=200.0, names=("bread",), trays=3)


def test_checks_across_settings_see_the_file_and_the_rest_together(tmp_path: Path):
    path = tmp_path / "oven.toml"
    path.write_text('mode = "grill"\n')
    with pytest.raises(ConfigError, match=rf"^{path}: mode is 'grill'"):
        Oven.from_toml(path, trays=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"heat = ", "not a TOML file"),
        (b"heat = '\xff'", "not a TOML file"),
        (b"heet = 1.0", "unknown setting 'heet'; did you mean 'heat'?"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(tmp_path: Path, content, message):
    path = tmp_path / "oven.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Oven.from_toml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


def test_every_setting_is_described():
    rows = {row.name: row for row in Oven.describe()}
    assert list(rows) == ["heat", "mode", "trays", "names", "timer"]
    assert rows["heat"] == ("heat", 180.0, "float", "degrees", "how hot", "the recipe")
    assert rows["mode"].type == "fan | grill"
    assert rows["timer"].type == "float | None"
    assert Needy.describe()[0].default == "required"
