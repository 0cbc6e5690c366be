"""Manages the folder of a search, which holds everything that the search has done.

search.json       the search and the settings of its runs, which later calls must repeat
trials.jsonl      a record for each trial: number, parameters, returns at each rung, error
<search>/         the folders of runs, trial-000/seed-1/ ..., and their output, seed-1.log
.tune.lock        held by the running search
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from pipeline.benchmarks.suite_folder import SEARCH_FILE, differences, suites_in
from pipeline.tuning.halving import Trial
from pipeline.tuning.search import Search
from pipeline.utils.errors import UserError
from pipeline.utils.files import lock, read_json, write_json, write_text
from pipeline.utils.jsonl import read_jsonl

_LOCK, _SEARCH, _TRIALS = ".tune.lock", SEARCH_FILE, "trials.jsonl"
_KINDS = {"search": dict, "settings": dict}
_OPTUNA = "version of optuna"
_OF_SEARCH = ("search.", _OPTUNA)
_RESTORE = "restore it from a backup, or start the search again in another --output_dir"


class SearchFolder:
    """Manages a search's records, as a context manager for the only process that adds to them.

    Attributes:
      trials: Trials that have begun, by number.
    """

    def __init__(self, path: pathlib.Path, search: Search):
        """Locks the folder and reads its records.

        Args:
          path: Path of the folder; created if missing.
          search: The search, which `check_settings` compares with that of earlier calls.

        Raises:
          UserError: If another search uses the folder, if it is that of a benchmark, or if the
            folder or a file is unusable.
        """
        if suites_in(path) and not (path / SEARCH_FILE).exists():
            raise UserError(f"{path} is the folder of a benchmark. Choose another --output_dir.")
        self._path = path
        self._search = search
        self._lock = lock(path / _LOCK, "another search is running in", "--output_dir")
        self.trials = read_trials(path)

    def __enter__(self) -> SearchFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    @property
    def has_begun(self) -> bool:
        """Returns True if a run of any trial has begun to train, or a trial has a result."""
        has_results = any(trial.returns for trial in self.trials.values())
        return has_results or any(self._path.glob("*/trial-*/seed-*/run.json"))

    def put(self, trial: Trial) -> None:
        """Writes the record of a trial; it replaces an earlier record of the trial.

        Raises:
          UserError: If the disk is full or not writable, or the folder was moved or deleted.
        """
        self._lock.check()
        self.trials[trial.number] = trial
        in_order = [self.trials[number] for number in sorted(self.trials)]
        lines = [json.dumps(trial._asdict(), allow_nan=False) for trial in in_order]
        write_text(self._path / _TRIALS, "".join(line + "\n" for line in lines))

    def check_settings(self, run_settings: Mapping[str, str]) -> None:
        """Checks that earlier calls had the same search, and writes it if nothing has been trained.

        Args:
          run_settings: Values that the config and the search's bindings bind, by name.

        Raises:
          UserError: If an earlier call had another search.
        """
        fields = self._search._asdict()
        now = {f"search.{name}": repr(value) for name, value in fields.items()}
        now |= {**run_settings, _OPTUNA: importlib.metadata.version("optuna")}
        if not self.has_begun:
            self.trials = {}
            write_json(self._path / _SEARCH, {"search": fields, "settings": now})
            return
        before = read_json(self._path / _SEARCH, _KINDS, _RESTORE).get("settings")
        if before is None:
            raise UserError(
                f"{self._path} has trials, but its {_SEARCH} is missing. Put it back, or choose "
                "another --output_dir."
            )
        if changes := differences(before, now):
            raise UserError(
                f"The search in {self._path} was started with other settings:\n  "
                + "\n  ".join(changes)
                + "\nRestore these settings to continue it, or choose another --output_dir."
            )


def read_search(path: pathlib.Path) -> Search:
    """Reads the search from its folder.

    Raises:
      UserError: If there is no search, or if the file is damaged.
    """
    saved = read_json(path / _SEARCH, _KINDS, _RESTORE).get("search")
    if saved is None:
        raise UserError(
            f"{path} contains no search. Check --output_dir, or start a search with "
            "--search=FILE.gin."
        )
    try:
        return Search.of(saved)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path / _SEARCH} is damaged ({error!r}); {_RESTORE}.") from error


def read_settings(path: pathlib.Path) -> dict[str, str]:
    """Reads what the config and the bindings of a search bound when it began, by name, as gin text.

    Raises:
      UserError: If the file is damaged.
    """
    saved = read_json(path / _SEARCH, _KINDS, _RESTORE).get("settings", {})
    return {k: v for k, v in saved.items() if not k.startswith(_OF_SEARCH)}


def read_trials(path: pathlib.Path) -> dict[int, Trial]:
    """Reads the trials from the folder of a search, by number.

    Raises:
      UserError: If a line is not the record of a trial.
    """
    records = read_jsonl(path / _TRIALS, *Trial._fields)
    trials = {}
    for place, record in enumerate(records):
        if not _is_trial(record, place, records[0]):
            raise UserError(f"{path / _TRIALS}: line {place + 1} is damaged; {_RESTORE}.")
        returns = tuple(tuple(of_seeds) for of_seeds in record["returns"])
        trials[place] = Trial(place, record["parameters"], returns, record["error"])
    return trials


def _is_trial(record: dict[str, Any], number: int, first: dict[str, Any]) -> bool:
    returns = record["returns"]
    are_lists = isinstance(returns, list) and all(isinstance(x, list) and x for x in returns)
    return (
        record["number"] == number
        and isinstance(record["parameters"], dict)
        and record["parameters"].keys() == first["parameters"].keys()
        and isinstance(record["error"], str | None)
        and are_lists
        and all(isinstance(x, int | float) for of_seeds in returns for x in of_seeds)
    )
