"""Options of a command, read by cyclopts; a method's settings become options as well.

Not for: checking values beyond their type; commands and settings classes do that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnusedCliTokensError,
)

from lmsmith.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from lmsmith.cards import Card
    from lmsmith.settings import SettingRow, Settings

_PREFIX = "setting_"
# A lone "-" is a value everywhere, standard input; cyclopts would take it for an option, so this
# character, which is none, goes through the parser in its place.
_DASH = "\ufdd0"


def run(
    words: Sequence[str],
    command: Callable[..., Any] | App,
    verbs: Mapping[str, Callable[..., Any]] | None = None,
    card: Card | None = None,
) -> Any:
    """Read the options in `words` and call the command.

    Args:
        words: The command's name, then what it is given.
        command: A function, or the application of a method's verbs.
        verbs: Functions that the word after the command may pick instead, by that word.
        card: The method whose verbs these are; those that take `given` have its settings as
            options.

    Raises:
        UsageError: An unknown option or verb, a missing argument, or a value of the wrong type.
    """
    name, *rest = words
    if not isinstance(command, App) and "given" in inspect.signature(command).parameters:
        from lmsmith import cards

        method = value_of("--method", rest)
        command = with_settings(command, None if method is None else cards.get(method))
    if isinstance(command, App) and rest and rest[0] in command:
        chosen = command[rest[0]]
        function = chosen.default_command
        if function is not None and "given" in inspect.signature(function).parameters:
            chosen.default_command = with_settings(function, card)
    app = App(
        name="lmsmith",
        version_flags=(),
        group_parameters=Group("Options"),
        # A flag is given or not; `--no-json` and "default: False" would only be noise.
        default_parameter=Parameter(
            negative=(), show_default=lambda value: None if value is False else value
        ),
        suppress_keyboard_interrupt=False,
    )
    app.command(command, name=name)
    for verb, other in (verbs or {}).items():
        app[name].command(other, name=verb)
        app[name][verb].usage = _usage(f"{name} {verb}", other)
    if not isinstance(command, App):
        app[name].usage = _usage(f"{name} [COMMAND]" if verbs else name, command)
    try:
        function, bound, _ = app.parse_args(
            [name, *(_DASH if word == "-" else word for word in rest)],
            exit_on_error=False,
            print_error=False,
        )
    except CycloptsError as error:
        names = [other for other in app[name] if not other.startswith("-")]
        if names and isinstance(error, UnknownCommandError | UnusedCliTokensError):
            word = (error.unused_tokens or [""])[0]
            raise UnknownNameError(f"{name} command", word, names) from error
        raise UsageError(_told(error, name)) from error
    values = {key: _restored(value) for key, value in bound.kwargs.items()}
    return function(*map(_restored, bound.args), **values)


def _told(error: CycloptsError, name: str) -> str:
    """What is wrong with a command's words, in the way of our own messages."""
    command = " ".join(error.command_chain or (name,))
    text = str(error).rstrip(".")
    if text.endswith("?"):
        return f"{text[:1].lower()}{text[1:]}"
    if isinstance(error, UnusedCliTokensError):
        text = f"{command} does not take {' '.join(error.unused_tokens or ())!r} as well"
    elif isinstance(error, MissingArgumentError) and error.argument is not None:
        option = error.keyword or error.argument.name
        given = error.keyword or error.argument.tokens
        text = f"{option} needs a value" if given else f"{option.lstrip('-').upper()} is missing"
    elif text[1:2].islower():
        text = f"{text[:1].lower()}{text[1:]}"
    return f"{text}; see lmsmith {command} --help"


def _usage(name: str, command: Callable[..., Any]) -> str:
    """The line that shows in which order the words of a command are given."""
    words = []
    for parameter in inspect.signature(command).parameters.values():
        word = parameter.name.upper()
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"[{word}]...")
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            words.append(word if parameter.default is parameter.empty else f"[{word}]")
    return " ".join(["Usage: lmsmith", name, *words, "[OPTIONS]"])


def _restored(value: Any) -> Any:
    return "-" if value == _DASH else value


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


def with_settings(command: Callable[..., Any], card: Card | None) -> Callable[..., Any]:
    """A command with one option a setting of a method.

    Args:
        command: A function with a keyword argument `given`, which receives the settings that were
            given on the command line and no others, so that a file can fill the rest.
        card: The method, if there is one.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "given"]
    taken = {p.name for p in parameters}
    described: list[tuple[SettingRow, FieldInfo]] = []
    if card is not None and "config" in card.entry:
        settings: type[Settings] = card.load("config")
        described = list(zip(settings.describe(), settings.model_fields.values(), strict=True))
    method = card.name if card is not None else ""
    for row, info in described:
        # A setting that shares its name with an option of the command is told apart by the method.
        flag = (row.name if row.name not in taken else f"{method}.{row.name}").replace("_", "-")
        parameters.append(
            inspect.Parameter(
                _PREFIX + row.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if info.is_required() else row.default,
                annotation=Annotated[
                    info.annotation,
                    Parameter(
                        name=f"--{flag}",
                        help=f"{row.meaning}{f' ({row.unit})' if row.unit else ''}",
                        negative=f"--no-{flag}" if info.annotation is bool else (),
                        group=Group(f"Settings of {method}"),
                    ),
                ],
            )
        )

    def with_options(*args: Any, **kwargs: Any) -> Any:
        names = [name for name in kwargs if name.startswith(_PREFIX)]
        given = {name.removeprefix(_PREFIX): kwargs.pop(name) for name in names}
        return command(*args, given=given, **kwargs)

    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options
