"""The base of every settings class: frozen, strict, and able to explain itself.

One class is the Python argument, the command-line flags, the TOML file and the record of a run.

Not for: any method's own settings; those are in its `config.py`.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from lmsmith.errors import ConfigError


class SettingRow(NamedTuple):
    """One setting as it is shown to people."""

    name: str
    default: Any
    type: str
    unit: str
    meaning: str
    source: str


def setting(
    default: Any = ..., meaning: str = "", *, unit: str = "", source: str = "", **constraints: Any
) -> Any:
    """Declare a setting.

    Args:
        default: Its default; leave it out for a setting that must be given.
        meaning: What it does, one line.
        unit: Unit of its value, empty when it has none.
        source: Where the default comes from: a section of the paper, the official code, a
            measurement, a choice of ours.
        constraints: Passed on to `pydantic.Field`, such as `gt=0`.
    """
    return Field(
        default,
        description=meaning,
        json_schema_extra={"unit": unit, "source": source},
        **constraints,
    )


class Settings(BaseModel):
    """Base of a method's settings.

    Unknown keys are an error that names the nearest one, values are not coerced across types (a
    list becomes a tuple, since settings do not change), and every problem is one line.

    Raises:
        ConfigError: A key is unknown, or a value is missing or not allowed.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )

    if not TYPE_CHECKING:  # the type checker keeps the signature that the fields give

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_one_line(error, type(self))) from None

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}

    @classmethod
    def parse(cls, values: Mapping[str, Any] | Self | None = None) -> Self:
        """Settings from plain values; an instance is passed through.

        Raises:
            ConfigError: See the class.
        """
        if isinstance(values, cls):
            return values
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"expected {cls.__name__} or a mapping, got {type(values).__name__}")
        return cls(**{str(key): value for key, value in (values or {}).items()})

    @classmethod
    def from_toml(cls, path: str | Path, **override: Any) -> Self:
        """Settings from a TOML file, with some of them overridden.

        Raises:
            ConfigError: The file cannot be read or is not TOML, or as the class.
        """
        try:
            return cls.parse(read_toml(path) | override)
        except ConfigError as error:
            where = f"{path}: "
            raise (
                error if str(error).startswith(where) else ConfigError(f"{where}{error}")
            ) from None

    def record(self) -> dict[str, Any]:
        """Every setting with its value, as plain JSON values; `parse` reads it back."""
        return json.loads(self.model_dump_json())

    @classmethod
    def describe(cls) -> list[SettingRow]:
        """Every setting with default, type, unit, meaning and source, in declaration order."""
        rows = []
        for name, info in cls.model_fields.items():
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            rows.append(
                SettingRow(
                    name,
                    "required"
                    if info.is_required()
                    else info.get_default(call_default_factory=True),
                    _type_name(info),
                    str(extra.get("unit", "")),
                    info.description or "",
                    str(extra.get("source", "")),
                )
            )
        return rows


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: It cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None


def _type_name(info: FieldInfo) -> str:
    from typing import Literal, get_args, get_origin

    if get_origin(info.annotation) is Literal:
        return " | ".join(map(str, get_args(info.annotation)))
    if isinstance(info.annotation, type) and not get_args(info.annotation):
        return info.annotation.__name__
    return str(info.annotation).replace("typing.", "").replace("NoneType", "None")


def _one_line(error: ValidationError, cls: type[Settings]) -> str:
    return "; ".join(dict.fromkeys(_problem(item, cls) for item in error.errors()))


def _problem(item: Any, cls: type[Settings]) -> str:
    # An arm of a union adds its own type to the location; the setting's name is what people know.
    name = ".".join(str(part) for part in item["loc"][:1])
    kind, value = item["type"], item.get("input")
    if kind == "extra_forbidden":
        known = list(cls.model_fields)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        return f"unknown setting {name!r}; {hint}"
    if kind == "missing":
        return f"setting {name!r} must be given"
    if kind == "value_error" and not name:
        return str(item["ctx"]["error"])
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if kind == "literal_error":
        choices = item["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = difflib.get_close_matches(str(value), choices, n=1)
        message = f"must be {item['ctx']['expected']}" + (
            f"; did you mean {near[0]!r}?" if near else ""
        )
    return f"setting {name!r} is {value!r}, but {message[:1].lower()}{message[1:]}"
