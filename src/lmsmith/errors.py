"""Every error a user can meet, in one tree.

A user error is one line: what is wrong, what was expected, what to do. The command line prints
that line and exits with the class's `exit_code`; a traceback is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LmsmithError(Exception):
    """Base of every error lmsmith raises on purpose; exit code 1 unless a subclass says else."""

    exit_code = 1


class UsageError(LmsmithError, ValueError):
    """The request itself is wrong: an unknown name, a bad value, a prompt that cannot be used."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that is not in a registry; the message suggests the nearest known one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")
        self.kind, self.name, self.nearest = kind, name, near[0] if near else None


class ConfigError(UsageError):
    """A setting that does not exist or has a value that is not allowed."""


class CapabilityError(UsageError):
    """The model does not offer what the method needs."""

    def __init__(self, who: str, needed: str, offered: str, hint: str = "") -> None:
        super().__init__(
            f"{who} needs {needed}, but the model offers {offered}{'; ' + hint if hint else ''}"
        )


class MissingError(LmsmithError):
    """Something that must be installed or present is not there."""

    exit_code = 3


class MissingDependencyError(MissingError):
    """A Python package of an extra is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; run: python -m pip install 'lmsmith[{extra}]'"
        )


class ModelSourceError(LmsmithError):
    """A model could not be fetched: no registry or hub answered, or it has no such model."""


class DataSourceError(LmsmithError):
    """A data set could not be fetched: no hub answered, or it has no such data set."""


class ModelFileError(LmsmithError):
    """A weight, tokenizer or configuration file is missing, truncated or corrupt."""


class StorageError(LmsmithError):
    """A cache or run folder cannot be written: no space, or no permission."""


class TrainingError(LmsmithError):
    """A training run cannot go on: its loss is not a number."""


class RunFolderBusyError(LmsmithError):
    """Another process is writing the run folder."""


class InterruptedRunError(LmsmithError):
    """The user stopped a run; what is done is kept and the same command resumes it."""

    exit_code = 130
