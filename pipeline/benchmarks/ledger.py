"""What a benchmark's folder knows of its runs, and who may write there.

output_dir/
    <suite>.jsonl           one record a run: see `records`
    <suite>.plan.json       how many seeds were asked for, and the settings of every experiment
    <suite>/<experiment>/   seed-1/ seed-2/ ... are folders of runs, seed-1.log what they printed
    .benchmark.lock         held by the benchmark that runs
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from pipeline.benchmarks import records
from pipeline.benchmarks.records import FINISHED, Record
from pipeline.benchmarks.runs import Run
from pipeline.errors import UserError
from pipeline.folders import lock, read_json, write_json

_LOCK, _PLAN = ".benchmark.lock", ".plan.json"
_UNSET = "nothing"


class Asked(NamedTuple):
    """What was asked for: the most seeds of any call, and settings by experiments' names.

    Settings are those of the runs, and of the suite what says which scores are taken, and how.
    """

    num_seeds: int
    experiments: Mapping[str, Mapping[str, str]]


def suites_in(output_dir: pathlib.Path) -> list[str]:
    """Names of the suites that were begun in a folder, or of which it has records."""
    begun = {path.name.removesuffix(_PLAN) for path in output_dir.glob(f"[!.]*{_PLAN}")}
    recorded = {path.stem for path in output_dir.glob("[!.]*.jsonl") if records.are_in(path)}
    return sorted(begun | recorded)


def asked(output_dir: pathlib.Path, suite: str) -> Asked:
    """What was asked for in a folder; nothing if only records are left of it.

    Raises:
        UserError: the file is damaged.
    """
    noted = read_json(output_dir / (suite + _PLAN), {"num_seeds": int, "experiments": dict})
    experiments = noted.get("experiments", {})
    if not all(isinstance(settings, dict) for settings in experiments.values()):
        raise UserError(f"{output_dir / (suite + _PLAN)} is damaged (experiments); remove it.")
    return Asked(noted.get("num_seeds", 0), experiments)


def _settings(run: Run) -> dict[str, str]:
    suite, experiment = run.suite, run.experiment
    scores = {"protocol": suite.protocol_of(experiment), "score": suite.score_of(experiment)}
    return {**run.settings, **{f"suite.{name}": repr(words) for name, words in scores.items()}}


class Ledger:
    """A context manager: the records of one suite, for the one benchmark that may add to them."""

    def __init__(self, output_dir: pathlib.Path, suite: str) -> None:
        """Args:
        output_dir: made if missing.
        suite: name of the suite.
        """
        self._output_dir = output_dir
        self._path = output_dir / f"{suite}.jsonl"
        self._suite = suite
        self._records: dict[records.Key, Record] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> Ledger:
        """Raises:
        UserError: another benchmark runs there, or the folder or a file of it is unusable.
        """
        busy = "another benchmark is running in"
        self._lock = lock(self._output_dir / _LOCK, busy, "--output_dir")
        self._records = {records.key(record): record for record in records.read(self._path)}
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def __getitem__(self, run: Run) -> Record | None:
        """The record of a run; None if it has none."""
        return self._records.get(_key(run))

    def is_finished(self, run: Run) -> bool:
        """Whether the run has come to its end and that is recorded."""
        record = self[run]
        return record is not None and record["status"] == FINISHED

    def add(self, record: Record) -> None:
        """Writes a record in the place of what was known of its run.

        Raises:
            UserError: the disk is full or not writable.
        """
        self._records[records.key(record)] = record
        records.write(self._path, self._records.values())

    def check_settings(self, runs: Sequence[Run]) -> None:
        """Makes sure that these runs are of one kind with those that are there, and notes theirs.

        Raises:
            UserError: an experiment has runs that were begun with other settings.
        """
        num_seeds, noted = asked(self._output_dir, self._suite)
        by_experiment = {run.experiment.name: run for run in runs}
        for name, run in by_experiment.items():
            before = noted.get(name, {})
            if before != _settings(run) and self._has_begun(run):
                raise UserError(self._refusal(run, before))
        settings = {name: _settings(run) for name, run in by_experiment.items()}
        plan = Asked(max(num_seeds, runs[0].suite.num_seeds), {**noted, **settings})
        write_json(self._output_dir / (self._suite + _PLAN), plan._asdict())

    def _has_begun(self, run: Run) -> bool:
        """Whether any seed of the run's experiment has."""
        of_experiment = (key for key, r in self._records.items() if r["status"] == FINISHED)
        is_recorded = any(key[:3] == _key(run)[:3] for key in of_experiment)
        return is_recorded or any(run.folder.parent.glob("*/run.json"))

    def _refusal(self, run: Run, before: Mapping[str, str]) -> str:
        now = _settings(run)
        names = sorted(before.keys() | now.keys())
        pairs = ((name, before.get(name, _UNSET), now.get(name, _UNSET)) for name in names)
        changes = [f"{name}: {old} then, {new} now" for name, old, new in pairs if old != new]
        return (
            f"{run.folder.parent} has runs with other settings than those asked for:\n  "
            + "\n  ".join(changes)
            + f"\nChoose another --output_dir. Or, to run {run.experiment.name} anew, delete "
            f"{run.folder.parent} and its lines in {self._path}."
        )


def _key(run: Run) -> records.Key:
    experiment = run.experiment
    return run.suite.name, experiment.algorithm, experiment.environment, run.seed
