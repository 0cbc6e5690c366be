"""Manages the folder of a benchmark: its records, its plan and its lock.

output_dir/
    <suite>.jsonl           one record for each run; see `records`
    <suite>.plan.json       the requested number of seeds and the settings of each experiment
    <suite>/<experiment>/   the folders of runs, seed-1/ seed-2/ ..., and their output, seed-1.log
    .benchmark.lock         held by the running benchmark
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeline.benchmarks import records
from pipeline.benchmarks.planned_runs import Run
from pipeline.benchmarks.records import FINISHED, Record
from pipeline.utils.errors import UserError
from pipeline.utils.files import lock, read_json, write_json

_LOCK, _PLAN = ".benchmark.lock", ".plan.json"
SEARCH_FILE = "search.json"  # of `pipeline.tune`, whose report would replace that of a benchmark
_UNSET = "nothing"
_RESTORE = "restore it from a copy, or delete it if you only want a report"


class Requested(NamedTuple):
    """Holds what all calls together have requested of an experiment.

    Attributes:
      num_seeds: Largest number of seeds of any call.
      settings: Settings of the runs, and the protocol and score of the suite.
    """

    num_seeds: int
    settings: Mapping[str, str]


#: What was requested, by the name of the experiment.
Plan = Mapping[str, Requested]


def suites_in(output_dir: pathlib.Path) -> list[str]:
    """Returns the names of the suites that have a plan or records in a folder."""
    begun = {path.name.removesuffix(_PLAN) for path in output_dir.glob(f"[!.]*{_PLAN}")}
    recorded = {path.stem for path in output_dir.glob("[!.]*.jsonl") if records.are_in(path)}
    return sorted(begun | recorded)


def read_plan(output_dir: pathlib.Path, suite: str) -> Plan:
    """Reads the plan of a suite from a folder. The plan is empty if there is no file.

    Raises:
      UserError: If the file is damaged.
    """
    path = _plan_path(output_dir, suite)
    plan = {}
    for name, noted in read_json(path, {}, _RESTORE).items():
        match noted:
            case {"num_seeds": int(num_seeds), "settings": dict(settings)}:
                plan[name] = Requested(num_seeds, settings)
            case _:
                raise UserError(f"{path} is damaged ({name}); {_RESTORE}.")
    return plan


def _plan_path(output_dir: pathlib.Path, suite: str) -> pathlib.Path:
    return output_dir / (suite + _PLAN)


def _settings(run: Run) -> dict[str, str]:
    suite, experiment = run.suite, run.experiment
    scores = {"protocol": suite.protocol_of(experiment), "score": suite.score_of(experiment)}
    return {**run.settings, **{f"suite.{name}": repr(words) for name, words in scores.items()}}


class SuiteFolder:
    """Manages one suite's records, as a context manager for the only process that adds to them."""

    def __init__(self, output_dir: pathlib.Path, suite: str) -> None:
        """Locks the folder and reads its records.

        Args:
          output_dir: Folder of the benchmark; created if missing.
          suite: Name of the suite.

        Raises:
          UserError: If another benchmark uses the folder, if it is that of a search, or if the
            folder or a file is unusable.
        """
        if (output_dir / SEARCH_FILE).exists() and not suites_in(output_dir):
            raise UserError(f"{output_dir} is the folder of a search. Choose another --output_dir.")
        self._output_dir = output_dir
        self._path = output_dir / f"{suite}.jsonl"
        self._suite = suite
        self._lock = lock(output_dir / _LOCK, "another benchmark is running in", "--output_dir")
        self._records = {records.key(record): record for record in records.read(self._path)}

    def __enter__(self) -> SuiteFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def __getitem__(self, run: Run) -> Record | None:
        """Returns the record of a run; None if it has none."""
        return self._records.get(_key(run))

    def add(self, record: Record) -> None:
        """Writes the record of a run; it replaces an earlier record of the run.

        Raises:
          UserError: If the disk is full or not writable, or the folder was moved or deleted.
        """
        self._lock.check()
        self._records[records.key(record)] = record
        records.write(self._path, self._records.values())

    def check_settings(self, runs: Sequence[Run]) -> None:
        """Checks that the runs have the settings of earlier runs in the folder; writes the plan.

        Raises:
          UserError: If an experiment has runs that were started with other settings, or with
            settings that are not known because the plan was lost.
        """
        plan = dict(read_plan(self._output_dir, self._suite))
        for name, run in {run.experiment.name: run for run in runs}.items():
            settings = _settings(run)
            before = plan.get(name)
            if (before is None or before.settings != settings) and self._has_begun(run):
                raise UserError(self._refusal(run, before))
            earlier_seeds = before.num_seeds if before else 0
            plan[name] = Requested(max(earlier_seeds, run.suite.num_seeds), settings)
        noted = {name: requested._asdict() for name, requested in plan.items()}
        write_json(_plan_path(self._output_dir, self._suite), noted)

    def _has_begun(self, run: Run) -> bool:
        """Returns True if any seed of the run's experiment has been started."""
        of_experiment = (key for key, r in self._records.items() if r["status"] == FINISHED)
        is_recorded = any(key[:3] == _key(run)[:3] for key in of_experiment)
        return is_recorded or any(run.folder.parent.glob("*/run.json"))

    def _refusal(self, run: Run, before: Requested | None) -> str:
        if before is None:
            reason = (
                f"{_plan_path(self._output_dir, self._suite)} does not have {run.experiment.name}, "
                f"so the settings of its runs in {run.folder.parent} are not known."
            )
        else:
            changes = differences(before.settings, _settings(run))
            reason = "\n  ".join(
                [f"{run.folder.parent} has runs with other settings than the requested ones:"]
                + changes
            )
        return (
            f"{reason}\nChoose another --output_dir. Or, to run {run.experiment.name} from the "
            f"start, delete {run.folder.parent} and its lines in {self._path}."
        )


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the settings that differ, one line each."""
    names = sorted(before.keys() | now.keys())
    pairs = ((name, before.get(name, _UNSET), now.get(name, _UNSET)) for name in names)
    return [f"{name}: {old} then, {new} now" for name, old, new in pairs if old != new]


def _key(run: Run) -> records.Key:
    experiment = run.experiment
    return run.suite.name, experiment.algorithm, experiment.environment, run.seed
