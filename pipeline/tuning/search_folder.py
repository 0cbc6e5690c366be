"""Folder of a search, which holds everything that the search has done.

search.json       the search and the settings of its runs, which later calls must repeat
trials.jsonl      a record for each trial: number, parameters, returns at each rung, error
<search>/         the folders of runs, trial-000/seed-1/ ..., and their output, seed-1.log
.tune.lock        held by the running search
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import IO, Any

from pipeline.tuning.halving import Trial
from pipeline.tuning.search import Search
from pipeline.utils.errors import UserError
from pipeline.utils.files import lock, read_json, write_json, write_text
from pipeline.utils.jsonl import read_jsonl

_LOCK, _SEARCH, _TRIALS = ".tune.lock", "search.json", "trials.jsonl"
_UNSET = "nothing"


class SearchFolder:
    """Context manager of the records of a search, for the only process that adds to them.

    Attributes:
      trials: Trials that have begun, by number.
    """

    def __init__(self, path: pathlib.Path):
        """Initializes the folder.

        Args:
          path: Path of the folder; created if missing.
        """
        self._path = path
        self._lock: IO[str] | None = None
        self.trials: dict[int, Trial] = {}

    def __enter__(self) -> SearchFolder:
        """Locks the folder and reads its records.

        Raises:
          UserError: If another search uses the folder, or if the folder or a file is unusable.
        """
        self._lock = lock(self._path / _LOCK, "another search is running in", "--output_dir")
        self.trials = read_trials(self._path)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def put(self, trial: Trial) -> None:
        """Writes the record of a trial; it replaces an earlier record of the trial.

        Raises:
          UserError: If the disk is full or not writable.
        """
        self.trials[trial.number] = trial
        in_order = [self.trials[number] for number in sorted(self.trials)]
        lines = [json.dumps(trial._asdict(), allow_nan=False) for trial in in_order]
        write_text(self._path / _TRIALS, "".join(line + "\n" for line in lines))

    def check_settings(self, search: Search, run_settings: Mapping[str, str]) -> None:
        """Checks that earlier calls had the same search, and writes it if there were none.

        Args:
          search: The search.
          run_settings: Values that the config and the search's bindings bind, by name.

        Raises:
          UserError: If an earlier call had another search.
        """
        now = {f"search.{name}": repr(value) for name, value in search._asdict().items()}
        now |= run_settings
        before = read_json(self._path / _SEARCH, {}).get("settings", {})
        if not self.trials:
            write_json(self._path / _SEARCH, {"search": search._asdict(), "settings": now})
            return
        names = sorted(before.keys() | now.keys())
        pairs = ((name, before.get(name, _UNSET), now.get(name, _UNSET)) for name in names)
        changes = [f"{name}: {old} then, {new} now" for name, old, new in pairs if old != new]
        if changes:
            raise UserError(
                f"{self._path} has trials of another search:\n  " + "\n  ".join(changes) + "\n"
                "Choose another --output_dir."
            )


def read_search(path: pathlib.Path) -> Search:
    """Reads the search from its folder.

    Raises:
      UserError: If there is no search, or if the file is damaged.
    """
    saved = read_json(path / _SEARCH, {"search": dict}).get("search")
    if saved is None:
        raise UserError(f"there is no search in {path}; start one: --search=FILE.gin.")
    try:
        fields: dict[str, Any] = saved | {
            "parameters": {name: tuple(of) for name, of in saved["parameters"].items()},
            "bindings": tuple(saved["bindings"]),
            "rungs": tuple(saved["rungs"]),
        }
        return Search(**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path / _SEARCH} is damaged ({error!r}).") from error


def read_trials(path: pathlib.Path) -> dict[int, Trial]:
    """Reads the trials from the folder of a search, by number.

    Raises:
      UserError: If a line is not the record of a trial.
    """
    records = read_jsonl(path / _TRIALS, *Trial._fields)
    return {
        record["number"]: Trial(
            record["number"],
            record["parameters"],
            tuple(tuple(of_seeds) for of_seeds in record["returns"]),
            record["error"],
        )
        for record in records
    }
