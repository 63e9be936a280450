"""Entry point of `lmsmith`: dispatch to a command, and turn every failure into one line.

Not for: what any command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownCommandError

from lmsmith import __version__, cards
from lmsmith.errors import LmsmithError, UnknownNameError, UsageError

COMMANDS = {
    "list": ("catalog:list_methods", "List the methods."),
    "info": (
        "catalog:info",
        "Show what a method is, with every setting, default, unit and source.",
    ),
    "doctor": ("doctor:doctor", "Check whether this machine is ready."),
    "models": ("models:app", "List, fetch and remove known models."),
    "generate": ("generate:generate", "Continue a prompt, plainly or with a method."),
    "bench": ("bench:bench", "Measure a method beside its baselines."),
    "runs": ("runs:runs", "Compare past runs."),
    "report": ("runs:report", "Write docs/RESULTS.md and figures from bench reports."),
    "new": ("scaffold:new", "Start a method of your own from a working one."),
    "copy": ("scaffold:copy", "Take a method out of the package to edit it."),
    "demo": ("demo:demo", "Show a prompt cut inside a word, continued plainly and byte by byte."),
}

# Commands that take a method's settings as flags, and so need to know the method to be parsed.
METHOD_FLAGS = ("generate",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The words after `lmsmith`; those of this process when left out.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    if debug:
        words.remove("--debug")
    # What transformers and the hub client have to say is not meant for the user of a command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        result = build(words)(
            words, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
        return result if isinstance(result, int) and not isinstance(result, bool) else 0
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("stopped", 130, debug)
    except UnknownCommandError as error:
        name, known = (error.unused_tokens or [""])[0], error.app or ()
        near = UnknownNameError("command", name, [k for k in known if not k.startswith("-")])
        return _fail(str(near), 2, debug)
    except CycloptsError as error:
        return _fail(str(error), 2, debug)
    except LmsmithError as error:
        return _fail(str(error), error.exit_code, debug)
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error}"
        return _fail(text if debug else f"{text}; run again with --debug", 1, debug)


def build(words: Sequence[str]) -> App:
    """The application, with the commands that `words` may need."""
    app = App(
        name="lmsmith",
        version=f"lmsmith {__version__}",
        help="A workbench for open-weight language models: methods from the literature, one "
        "command away, each measured beside its baseline.",
        help_epilogue="`--debug` shows the traceback behind an error.",
        suppress_keyboard_interrupt=False,
    )
    for name, (path, help) in COMMANDS.items():
        app.command(f"lmsmith.cli.{path}", name=name, help=help)
    command = words[0] if words else ""
    if command in METHOD_FLAGS:
        _with_method_flags(app, command, words)
    if command not in COMMANDS:
        methods = [card for card in cards.find().values() if "cli" in card.entry]
        for card in methods:
            _add_verbs(app, card, command)
        if command and not command.startswith("-") and command not in app:
            raise UnknownNameError(
                "command", command, [*COMMANDS, *(card.name for card in methods)]
            )
    return app


def _add_verbs(app: App, card: cards.Card, command: str) -> None:
    if card.name in COMMANDS:
        raise UsageError(f"{card.folder / 'card.toml'}: {card.name!r} is a command of lmsmith")
    if card.name == command:
        app.command(card.load("cli"), name=card.name)
    else:
        app.command(card.entry["cli"], name=card.name, help=card.purpose, group="Methods")


def _with_method_flags(app: App, command: str, words: Sequence[str]) -> None:
    from lmsmith.cli import flags

    method = flags.value_of("--method", words)
    if method is None:
        return
    import importlib

    module, _, attribute = COMMANDS[command][0].partition(":")
    function = getattr(importlib.import_module(f"lmsmith.cli.{module}"), attribute)
    del app[command]
    app.command(
        flags.with_settings(function, cards.get(method)), name=command, help=COMMANDS[command][1]
    )


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    line = " ".join(message.split())
    sys.stderr.write(f"{line if code == 130 else f'error: {line}'}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
