"""Entry point of `lmsmith`: find the command, and turn every failure into one line.

Not for: reading options (`lmsmith.cli.parser`), or what any command does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any

from lmsmith import __version__, cards
from lmsmith.errors import LmsmithError, UnknownNameError

# Name, import path under lmsmith.cli, one line of help.
COMMANDS = {
    "list": ("catalog:list_methods", "List the methods."),
    "info": ("catalog:info", "Show what a method is, with every setting and its source."),
    "doctor": ("doctor:doctor", "Check whether this machine is ready."),
    "models": ("models:list_models", "List known models; pull and remove them."),
    "generate": ("generate:generate", "Continue a prompt, plainly or with a method."),
    "bench": ("bench:bench", "Measure a method beside its baselines."),
    "runs": ("runs:runs", "List or compare past runs."),
    "report": ("runs:report", "Write docs/RESULTS.md and figures from bench reports."),
    "new": ("scaffold:new", "Start a method of your own from a working one."),
    "copy": ("scaffold:copy", "Take a method out of the package to edit it."),
    "demo": ("demo:demo", "Show prompts cut inside a word, continued plainly and byte by byte."),
}
# What may follow a command to do something else.
VERBS = {"models": {"list": "models:list_models", "pull": "models:pull", "remove": "models:remove"}}
# Commands that only show something; without options they do not wait for the parser.
BARE = ("list", "models")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The words after `lmsmith`; those of this process when left out.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words[: words.index("--") if "--" in words else len(words)]
    if debug:
        words.remove("--debug")
    # What transformers and the hub client have to say is not meant for the user of a command.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        # A character that the terminal's encoding lacks becomes a question mark, not a failure.
        sys.stdout.reconfigure(errors="replace")
    try:
        result = run(words)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("stopped", 130, debug)
    except LmsmithError as error:
        return _fail(str(error), error.exit_code, debug)
    except Exception as error:
        hint = "" if debug else "; run again with --debug"
        return _fail(f"unexpected {type(error).__name__}: {error}{hint}", 1, debug)


def run(words: Sequence[str]) -> object:
    """Run the command that `words` ask for and return what it returns.

    Raises:
        LmsmithError: Anything a user can cause.
    """
    if not words or words[0] in ("--help", "-h"):
        sys.stdout.write(help_page())
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"lmsmith {__version__}\n")
        return 0
    if len(words) == 1 and words[0] in BARE:
        return _function(COMMANDS[words[0]][0])()
    if words[0] in COMMANDS:
        from lmsmith.cli import parser

        verbs = {verb: _function(path) for verb, path in VERBS.get(words[0], {}).items()}
        return parser.run(words, _function(COMMANDS[words[0]][0]), verbs)
    known = cards.find()
    if words[1:2] == ["generate"] and words[0] in known and "decoder" in known[words[0]].entry:
        return run(["generate", "--method", words[0], *words[2:]])
    methods = {name: card for name, card in known.items() if "cli" in card.entry}
    if words[0] not in methods:
        raise UnknownNameError("command", words[0], [*COMMANDS, *methods])
    from lmsmith.cli import parser

    card = methods[words[0]]
    return parser.run(words, card.load("cli"), card=card)


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"lmsmith.cli.{module}"), name)


def help_page() -> str:
    """What `lmsmith --help` prints."""
    verbs = {name: card.purpose for name, card in cards.find().items() if "cli" in card.entry}
    options = {
        "COMMAND --help": "What a command takes.",
        "--json": "One JSON document on standard output, for every command.",
        "--debug": "The traceback behind an error.",
        "--version": "Print the version.",
    }
    parts = [
        "Usage: lmsmith COMMAND ...",
        "A workbench for open-weight language models: methods from the literature, one command\n"
        "away, each measured beside its baseline.",
        _section("Commands", {name: help for name, (_, help) in COMMANDS.items()}),
        _section("Methods with commands of their own", verbs) if verbs else "",
        _section("Options", options),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _section(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows)) + 2
    return "\n".join([title, *(f"  {name:<{width}}{text}" for name, text in rows.items())])


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    line = " ".join(message.split())
    sys.stderr.write(f"{line if code == 130 else f'error: {line}'}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
