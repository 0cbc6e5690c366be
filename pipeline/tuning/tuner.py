"""Trains the trials of a search with several processes at a time."""

from __future__ import annotations

import math
import pathlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.benchmarks import train_process
from pipeline.benchmarks.planned_runs import Run, bound, plan
from pipeline.benchmarks.train_process import Losses, Machines, Process
from pipeline.runs.run_folder import RunFolder
from pipeline.tuning.halving import (
    ENDED,
    Job,
    Trial,
    best_trial,
    planned_steps,
    ready_jobs,
    told,
    trained_steps,
    trial_states,
)
from pipeline.tuning.search import Search, short_name
from pipeline.tuning.search_folder import SearchFolder
from pipeline.utils.errors import RETRY_CODE, USER_ERROR_CODE, RetryableError, UserError, last_line
from pipeline.utils.files import error_kind
from pipeline.utils.jsonl import read_jsonl
from pipeline.utils.progress import Progress, score_text
from pipeline.utils.shutdown import StopSignal

_POLL_SECONDS = 0.5
_PLAIN_SECONDS = 60.0  # between lines without a terminal
_FIRST_TRIALS = 3  # If all of these fail by a mistake, the search ends.
_EVAL_INTERVAL = "train.eval_interval"
_WARM_UP = "initialize_replay_buffer.num_env_steps"
_NO_RETURN = (
    "no episode ended in an evaluation: increase Evaluator.num_env_steps in search.bindings"
)


def tune(search: Search, machines: Machines, num_trials: int, stop: StopSignal) -> bool:
    """Trains the trials of a search, from where an earlier call stopped.

    Args:
      search: The search.
      machines: Machines on which the runs are trained.
      num_trials: Number of trials.
      stop: Signal that stops the search: all processes write a checkpoint and exit.

    Returns:
      True if nothing is left to do.

    Raises:
      UserError: If another search uses the folder or is in it, or if the configuration is wrong.
      RetryableError: If a disk is full or not writable, or a run cannot be resumed exactly on this
        machine. The same command continues the search later or elsewhere. All processes are
        stopped before an error is raised.
    """
    if search.sampler == "grid" and num_trials > search.grid_size:
        raise UserError(
            f"--trials={num_trials} is more than the {search.grid_size} points of the grid. Omit "
            "--trials to train all of them."
        )
    search = search._replace(bindings=(*search.bindings, *machines.bindings))
    with SearchFolder(machines.output_dir, search) as folder:
        _check(search, folder, machines)
        # With fewer trials, the last bracket would be smaller, and others would be its best.
        num_trials = max(num_trials, len(folder.trials))
        steps = planned_steps(search, num_trials)
        with Progress(steps, plain_interval=_PLAIN_SECONDS) as display:
            return _Tuner(search, machines, folder, num_trials, stop, display).run()


def _check(search: Search, folder: SearchFolder, machines: Machines) -> None:
    """Checks the config and the rungs before anything is trained."""
    first = search.suite(0, search.suggest(0, []))
    (run, *_) = plan(first, machines.output_dir, (), machines.flags)
    if run.num_env_steps != search.num_env_steps:
        raise UserError(
            f"search.bindings: train.num_env_steps = {run.num_env_steps:_} would replace "
            "search.num_env_steps: set search.num_env_steps instead."
        )
    if search.rungs and _WARM_UP in map(short_name, search.parameters):
        raise UserError(
            f"search.parameters: {_WARM_UP} cannot be searched over with search.rungs, because "
            "no trial is evaluated in its warm-up."
        )
    _check_interval(run.settings, search.rungs)
    folder.check_settings({k: v for k, v in run.settings.items() if k not in search.parameters})


class _Tuner:
    def __init__(
        self,
        search: Search,
        machines: Machines,
        folder: SearchFolder,
        num_trials: int,
        stop: StopSignal,
        display: Progress,
    ):
        self._search = search
        self._machines = machines
        self._folder = folder
        self._num_trials = num_trials
        self._stop = stop
        self._display = display
        self._running: dict[pathlib.Path, Process] = {}
        self._runs: dict[int, list[Run]] = {}  # by trial
        self._has_begun = False
        self._losses = Losses(display.message)
        self._told: set[str] = set()  # warnings of the runs

    def run(self) -> bool:
        over = sum(1 for trial in self._folder.trials.values() if trial.returns or trial.error)
        self._display.message(f"{self._num_trials} trials, {over} with results")
        try:
            while True:
                jobs = self._step()
                if not self._running and (self._stop.requested or not jobs):
                    return not jobs
                self._display.update(self._progress())
                time.sleep(_POLL_SECONDS)
        finally:
            for process in self._running.values():
                process.stop()
            for process in self._running.values():
                process.wait()

    def _step(self) -> list[Job]:
        """Notes results, stops and starts processes; returns the jobs that can be done now."""
        if self._stop.requested:
            for process in self._running.values():
                process.stop()
        ended = {path: x for path, x in self._running.items() if x.poll() is not None}
        for path in ended:
            del self._running[path]
        # The first run is alone until it has begun, so that a wrong config ends the search whatever
        # the number of workers.
        self._has_begun = self._has_begun or self._folder.has_begun
        jobs = self._ready_jobs()
        for job in jobs if self._has_begun else jobs[:1]:
            if job.number not in self._folder.trials:
                if not self._has_room:
                    break  # later trials depend on this one
                self._begin(job.number)
            self._advance(job, ended)
        return self._ready_jobs()

    def _ready_jobs(self) -> list[Job]:
        return list(ready_jobs(self._search, self._folder.trials, self._num_trials))

    @property
    def _has_room(self) -> bool:
        """Returns True if another process may be started."""
        workers = self._machines.workers if self._has_begun else 1
        return len(self._running) < workers and not self._stop.requested

    def _begin(self, number: int) -> None:
        trials = self._folder.trials
        seen = told(self._search, trials, number, self._num_trials)
        self._folder.put(Trial(number, self._search.suggest(number, seen)))

    def _advance(self, job: Job, ended: dict[pathlib.Path, Process]) -> None:
        """Does what can be done for a job now; records its result if it is known."""
        returns = []
        for run in self._runs_of(job.number):
            value = self._return_at(run, job.rung)
            if value is not None and math.isnan(value):
                self._fail(job, f"seed {run.seed}: {_NO_RETURN}")
                return
            if value is not None:
                returns.append(value)
                if run.folder in self._running:
                    self._running[run.folder].stop()
            elif run.folder in ended and (reason := self._failure(ended.pop(run.folder))):
                self._fail(job, f"seed {run.seed}: {reason}")
                return
            elif run.folder not in self._running and self._has_room:
                try:
                    process = self._machines.start(run)
                except OSError as error:
                    raise error_kind(error)(f"{run.name} cannot be started: {error}") from error
                if process is not None:
                    self._running[run.folder] = process
        if len(returns) < self._search.num_seeds:
            return
        trial = self._folder.trials[job.number]
        trial = trial._replace(returns=(*trial.returns, tuple(returns)))
        self._folder.put(trial)
        self._display.message(
            f"trial {job.number}: {score_text(trial.value(job.rung))} after "
            f"{self._search.ends[job.rung]:,} steps with {trial.in_words}"
        )
        for run in self._runs_of(job.number):
            train_process.tell_warnings(run, self._told, self._display.message)

    def _runs_of(self, number: int) -> list[Run]:
        """Returns the runs of a trial. Trials with the same values share those of the first."""
        if number not in self._runs:
            trials = self._folder.trials
            first = min(n for n in trials if trials[n].in_words == trials[number].in_words)
            suite = self._search.suite(first, trials[number].parameters)
            self._runs[number] = plan(suite, self._machines.output_dir, (), self._machines.flags)
        return self._runs[number]

    def _return_at(self, run: Run, rung: int) -> float | None:
        """Returns the mean return of the run's first evaluation at a rung; None if not yet known.

        The mean is NaN if no episode ended in the evaluation.

        Raises:
          UserError: If a file of the run is damaged.
        """
        folder = RunFolder(run.folder)
        if rung == len(self._search.rungs):
            result = folder.finished(run.seed, run.num_env_steps)
            values = [result["evaluation"]["return_mean"]] if result else []
        else:
            evaluations = read_jsonl(folder.evaluations, "env_steps", "return_mean")
            end = self._search.rungs[rung]
            values = [e["return_mean"] for e in evaluations if _env_steps(e, folder) >= end]
        if not values:
            return None
        if values[0] is None:
            return math.nan
        if not math.isfinite(values[0]):
            raise UserError(f"{run.folder}: a mean return is not finite.")
        return values[0]

    def _failure(self, process: Process) -> str:
        """Returns why a process failed; "" if it was stopped or is to be started again.

        Raises:
          UserError: If no trial can be trained, or the cause of the failure is not the trial.
        """
        if self._losses.goes_on(process):
            return ""
        code, error = process.poll(), self._losses.error(process)
        if code == USER_ERROR_CODE and not self._folder.has_begun:
            # The values of one trial may be incompatible; all of them are not by chance.
            failed = [trial for trial in self._folder.trials.values() if trial.error]
            if len(failed) + 1 >= min(_FIRST_TRIALS, self._num_trials):
                raise UserError(f"the trials cannot be trained:\n{error}")
        if code == RETRY_CODE:
            raise RetryableError(f"{process.run.name} cannot be trained now:\n{error}")
        return error

    def _fail(self, job: Job, error: str) -> None:
        for run in self._runs_of(job.number):
            if run.folder in self._running:
                self._running[run.folder].stop()
        trial = self._folder.trials[job.number]._replace(error=error)
        self._folder.put(trial)
        self._display.message(
            f"trial {job.number} failed with {trial.in_words}: {last_line(error)}"
        )

    def _progress(self) -> dict[str, Any]:
        trials, search = self._folder.trials, self._search
        running = {process.run.experiment.name for process in self._running.values()}
        counts = Counter(trial_states(search, trials, self._num_trials).values())
        ended = [counts[state] for state in ENDED]
        at_rung = max(len(trials) - sum(ended) - len(running), 0)
        text = ", ".join(f"{count} {state}" for count, state in zip(ended, ENDED, strict=True))
        text = f"{len(running)} running, {at_rung} at a rung, {text}, "
        text += f"{self._num_trials - len(trials)} left"
        if best := best_trial(trials):
            text += f"; best {score_text(best.value(-1))} (trial {best.number}: {best.in_words})"
        done = trained_steps(search, trials) + sum(map(self._steps_ahead, self._running.values()))
        return {"env_steps": done, "counts": text}

    def _steps_ahead(self, process: Process) -> int:
        """Returns the steps that a running run has taken after the last rung of its trial."""
        trial = self._folder.trials[int(process.run.experiment.environment)]
        last = self._search.ends[len(trial.returns) - 1] if trial.returns else 0
        return max(train_process.env_steps(process.run) - last, 0)


def _check_interval(settings: Mapping[str, str], rungs: Sequence[int]) -> None:
    """Checks that a run with these settings is evaluated at every rung, after its warm-up.

    Raises:
      UserError: If it is not.
    """
    if not rungs:
        return
    try:
        interval = int(float(bound(settings, _EVAL_INTERVAL, "10_000")))
        warm_up = int(float(bound(settings, _WARM_UP, "0")))
    except (OverflowError, ValueError):  # The run will refuse it.
        return
    advice = f'add "{_EVAL_INTERVAL} = {math.gcd(*rungs):_}" to search.bindings.'
    if not interval:
        raise UserError(
            "search.rungs: trials are compared by evaluations during training, but "
            f"{_EVAL_INTERVAL} = {interval} makes none: {advice}"
        )
    if off := [rung for rung in rungs if rung % interval]:
        raise UserError(
            f"search.rungs: {off[0]:_} is not a multiple of {_EVAL_INTERVAL} = {interval:_}. "
            f"Change the rung, or {advice}"
        )
    if rungs[0] <= warm_up:
        raise UserError(
            f"search.rungs: {rungs[0]:_} is within the warm-up, which makes no evaluations "
            f"({_WARM_UP} = {warm_up:_}). Set a later rung, or shorten the warm-up."
        )


def _env_steps(evaluation: dict[str, Any], folder: RunFolder) -> int | float:
    """Returns the environment steps of an evaluation.

    Raises:
      UserError: If a value of the record is not a number.
    """
    steps, value = evaluation["env_steps"], evaluation["return_mean"]
    if not isinstance(steps, int | float) or not isinstance(value, int | float | None):
        raise UserError(f"{folder.evaluations} is damaged: a value is not a number.")
    return steps
