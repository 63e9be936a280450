"""An adapting model's run folder: an audit log of every batch, and the state to go on from.

`items.jsonl` has one line a batch: what was answered, from which adapter to which, where it
learned, at what loss, and whether it was rolled back. `adapters/N` is the adapter after N batches,
as a PEFT folder. A line is written once its adapter is on disk, so a run that was killed goes on
from the last line.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmsmith.errors import UsageError
from lmsmith.evaluation.report import Report
from lmsmith.evaluation.runs import RunFolder
from lmsmith.methods.fg_ttl.learner import adapter_hash

if TYPE_CHECKING:
    from lmsmith.methods.fg_ttl.adaptation import Adaptation
    from lmsmith.methods.fg_ttl.stream import Item

ADAPTERS = "adapters"


class Journal:
    """The folder, and the adaptation whose state is kept there.

    Attributes:
        folder: The run folder.
        resumed: Whether an earlier run's state was found and put back.
    """

    def __init__(
        self,
        out: str | Path | None,
        state: Adaptation,
        settings: Mapping[str, Any] | None = None,
        base: str | Path = "runs",
    ) -> None:
        """Begin a run, or put back the state of one that was stopped.

        Args:
            out: The folder; none goes on with the newest unfinished run of the same settings
                under `base`, or begins a new one.
            state: The adaptation, as it begins.
            settings: What else the run depends on, such as the name of its stream.
            base: Where folders without a given name live.

        Raises:
            UsageError: The folder holds another run.
            RunFolderBusyError: Another process is writing it.
            StorageError: It cannot be written or read.
        """
        config = {
            "method": "fg-ttl",
            "models": [state.lm.name],
            "seed": state.config.seed,
            "adapter": adapter_hash(state.learner.initial),
            "settings": state.config.record(),
            **(settings or {}),
        }
        self.folder = RunFolder.open(out, config, base)
        self._state = state
        self._rows = list(self.folder.rows)
        self.folder.rows.clear()  # a long stream's log does not belong in memory
        try:
            newest = self._place(len(self._rows))
            self.resumed = newest.is_dir()
            if self.resumed:
                state.restore(newest)
            elif self._rows:
                raise UsageError(
                    f"{self.folder.path} has lost the adapter of its last batch, {newest.name}; "
                    "give another folder"
                )
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Keep a state from before the first batch, where learning came first."""
        self._state.save(self._place(0))

    def replay(self, items: Iterator[Item]) -> Iterator[dict[str, Any]]:
        """The answers of batches that are done, taking their items from the stream.

        Raises:
            UsageError: The stream is another one than the log's.
        """
        rows, self._rows = self._rows, []
        for row in rows:
            for answer in row["answers"]:
                item = next(items, None)
                if item is None or item.id != answer["id"] or (
                    list(item.prompt_ids) != answer["prompt_ids"]
                ):  # fmt: skip
                    raise UsageError(
                        f"item {answer['place']} of the stream is not the one that "
                        f"{self.folder.path} was begun with; give another folder"
                    )
                yield {name: _tuple(value) for name, value in answer.items()}

    def keep(self, record: Mapping[str, Any]) -> None:
        """Write a batch's state, then its line; older states go."""
        done = self._state.batch
        self._state.save(self._place(done))
        self.folder.append([record])
        self.folder.rows.clear()
        shutil.rmtree(self._place(done - 2), ignore_errors=True)

    def finish(self) -> None:
        """Mark the run as finished: the stream has ended."""
        path, config = self.folder.path, self.folder.config
        report = Report("fg-ttl", "", "+".join(config["models"]), [], [], {}, self.folder.seconds)
        report.settings, report.folder = config, path
        self.folder.finish(report.to_dict())

    def close(self) -> None:
        """Let go of the folder."""
        self.folder.close()

    def _place(self, batches: int) -> Path:
        return self.folder.path / ADAPTERS / f"{batches:06d}"


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
