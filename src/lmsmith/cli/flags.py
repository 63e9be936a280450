"""A method's settings as command-line flags, made from its settings class.

Not for: checking values beyond their type; the settings class does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import Group, Parameter

from lmsmith.cards import Card

PREFIX = "setting_"


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """The value given to `flag` among the words of a command line, before it is parsed."""
    for index, word in enumerate(words):
        if word == "--":
            return None
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def with_settings(function: Callable[..., Any], card: Card) -> Callable[..., Any]:
    """`function` with one flag a setting of the method.

    Args:
        function: A command with a keyword argument `given`, which receives the settings that were
            given on the command line and no others, so that a file can fill the rest.
        card: The method; where it has no settings, the function is returned as it is.
    """
    if "config" not in card.entry:
        return function
    from lmsmith.settings import Settings

    settings: type[Settings] = card.load("config")
    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "given"]
    taken = {p.name for p in parameters}
    group = Group(f"Settings of {card.name}")
    for row, info in zip(settings.describe(), settings.model_fields.values(), strict=True):
        # A setting that shares its name with an option of the command is told apart by the method.
        flag = row.name if row.name not in taken else f"{card.name}.{row.name}"
        parameters.append(
            inspect.Parameter(
                PREFIX + row.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if info.is_required() else row.default,
                annotation=Annotated[
                    info.annotation,
                    Parameter(
                        name=f"--{flag.replace('_', '-')}",
                        help=f"{row.meaning}{f' ({row.unit})' if row.unit else ''}",
                        group=group,
                        negative_iterable=(),
                    ),
                ],
            )
        )

    def command(*args: Any, **kwargs: Any) -> Any:
        given = {k.removeprefix(PREFIX): kwargs.pop(k) for k in list(kwargs) if _is_setting(k)}
        return function(*args, given=given, **kwargs)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _is_setting(name: str) -> bool:
    return name.startswith(PREFIX)
