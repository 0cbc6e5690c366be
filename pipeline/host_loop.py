"""The host's side of training: graph calls, and logs, evaluations and checkpoints between them.

When these happen depends on counters alone. An interval is due at the first iteration that has
crossed a multiple of it since the last time; what was done when is part of the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from pipeline.checkpoints import Checkpoints, Part
from pipeline.chunks import Chunks
from pipeline.circumstances import Circumstances
from pipeline.collect import interrupt_episodes
from pipeline.components import Components
from pipeline.errors import UserError, WriteError
from pipeline.failures import hinting, named_failures, named_write_errors, resume_hint, untold
from pipeline.finiteness import check_losses, check_weights, unsound_weights
from pipeline.iteration import Chunk, Halted, LoopState, clear_losses
from pipeline.metrics import metrics_record
from pipeline.parts import HostState, Tensors, Variables, weights_sha256
from pipeline.patience import Patience
from pipeline.plan import Plan
from pipeline.progress import EVALUATING, TRAINING, WARMING_UP, Progress
from pipeline.run_folder import RunFolder
from pipeline.run_logs import RunLogs
from pipeline.shutdown import Stopped, StopSignal
from pipeline.stopwatch import Stopwatch
from pipeline.watchdog import Watchdog


class HostLoop:
    """Drives one run from wherever its newest checkpoint stands to its end."""

    def __init__(
        self,
        components: Components,
        plan: Plan,
        folder: RunFolder,
        progress: Progress,
        stop: StopSignal,
        circumstances: Circumstances | None = None,
    ):
        self._parts = components
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._stop = stop
        self._runner = components.runner
        with named_failures(components.environment):
            self._state = self._runner.initial_state()
        self._host = HostState(
            wall_seconds=0.0, evaluations=0, evaluated=0, logged=0, checkpointed=0
        )
        parts: dict[str, Part] = {
            "agent": Variables(agent=components.agent),
            "experience": components.experience,
            "environment": components.environment,
            "loop": Tensors(lambda: self._state, self._set_state),
            "host": self._host,
            **({"circumstances": circumstances} if circumstances else {}),
        }
        with named_write_errors(folder.path):
            self._checkpoints = Checkpoints(folder.checkpoints, parts)
        self._resume_hint = functools.partial(resume_hint, self._checkpoints.latest)
        self._logs = RunLogs(folder)
        self._flush = hinting(self._resume_hint)(self._logs.flush)
        environments = [driver.environment for driver in self._runner.drivers]
        environments.append(components.evaluator.environment)
        self._watchdog = Watchdog(environments, self._resume_hint)
        # Two, for a record may fit on a disk where a checkpoint does not.
        self._log_patience = Patience(progress.message, self._check_stop)
        self._save_patience = Patience(progress.message, self._check_stop)
        self._stopwatch = Stopwatch(components.environment, self._runner.at_once)
        self._chunks = Chunks(self._runner, self._stopwatch)
        self._clock = time.monotonic()
        self._returned: tuple[int, float] | None = None  # env_steps and mean of an evaluation

    @property
    def env_steps(self) -> int:
        """Environment steps taken so far, over all processes of the run."""
        return int(self._state.carry.statistics.env_steps)

    def restore(self) -> bool:
        """Goes back to the newest intact checkpoint; False if there is none.

        Raises:
          UserError: all checkpoints are damaged or gone, or it is of another configuration.
        """
        restored = self._checkpoints.restore()
        if not restored:
            self._folder.check_none_lost()
        for warning in restored.warnings if restored else []:
            self._progress.message(f"warning: {warning}")
        if self._parts.environment.divergence:  # episodes in flight end here, as if truncated
            for driver in self._runner.drivers:
                driver.environment.abandon()
            self._parts.experience.truncate()
            self._set_state(self._state._replace(carry=interrupt_episodes(self._state.carry)))
        self._stopwatch.restart(self._state)
        self._clock = time.monotonic()
        return restored is not None

    def cut_logs(self) -> None:
        """Removes what came after the checkpoint: once it is clear that the run goes on from it."""
        newest = self.env_steps or -1  # without a checkpoint nothing stays
        self._logs.truncate_after(self._host["logged"], self._host["evaluated"], newest)

    def collect_randomly(self, until: int) -> None:
        """Warms up to `until` environment steps; a checkpoint follows, for it may have been long.

        Raises:
          Stopped, UserError: see `train`.
        """
        is_cold = self.env_steps < until
        if is_cold:
            self._advance(self._runner.collect_randomly, until, WARMING_UP)
            self._host |= {"logged": self.env_steps, "evaluated": self.env_steps}
            self._stopwatch.restart(self._state)
        self._parts.experience.check_ready()  # first: its advice may be another configuration
        if is_cold:
            self._save_patience.attempt(self._save)

    def train(self) -> dict[str, Any]:
        """Trains to the end and evaluates the final weights.

        Returns:
          What result.json holds, which it writes.

        Raises:
          Stopped: a signal came; a checkpoint has been written.
          UserError: a loss is not finite, an environment failed, the disk has been full for long.
        """
        self._handle_due()
        while self.env_steps < self._plan.num_env_steps:
            self._advance(self._runner.train, self._plan.next_stop(self.env_steps), TRAINING)
            self._handle_due()
        return self._finish()

    def close(self) -> None:
        """Closes its files; the components are their owner's."""
        self._watchdog.close()
        self._logs.close()

    def _wall_seconds(self) -> float:
        """Seconds that the run has taken, over all its processes from checkpoint to checkpoint."""
        now = time.monotonic()
        self._host["wall_seconds"] += now - self._clock
        self._clock = now
        return self._host["wall_seconds"]

    def _set_state(self, state: LoopState) -> None:
        self._state = state
        self._parts.env_steps.assign(state.carry.statistics.env_steps)

    def _advance(self, chunk: Chunk, until: int, phase: str) -> None:
        """Runs chunks until the run has taken `until` environment steps."""
        if not self._chunks.is_built(chunk):
            if not tf.config.functions_run_eagerly():
                self._progress.message(f"building the graph for {phase} ...")
            self._chunks.build(chunk, self._state)
        while self.env_steps < until:
            self._check_stop()
            with hinting(self._resume_hint), self._failing_well():
                self._state = self._chunks.run(chunk, self._state, until)
                self._check_losses()
            self._progress.update(self._record(), phase)
            self._log_patience.retry(self._flush)
            self._save_patience.retry(self._save)

    @contextlib.contextmanager
    def _failing_well(self) -> Iterator[None]:
        """Names what fails, and saves what other actors did before one of them failed."""
        parts = self._parts
        with named_failures(parts.environment, lambda: unsound_weights(parts.agent)):
            try:
                yield
            except Halted as halted:
                self._set_state(halted.state)
                self._check_losses()  # what weights that are NaN do is what environments refuse
                try:
                    self._save()
                except UserError as error:
                    self._progress.message(f"no checkpoint could be made of what is left: {error}")
                environments = [driver.environment for driver in self._runner.drivers]
                for other in untold(halted.errors, environments):
                    self._progress.message(f"another failure: {other}")
                raise halted.errors[0] from halted.errors[0].__cause__

    def _check_losses(self) -> None:
        parts = self._parts
        check_losses(self._state.loss_sums, parts.agent, parts.experience, self.env_steps)

    def _due(self, name: str, interval: int) -> bool:
        return bool(interval) and self.env_steps // interval > self._host[name] // interval

    def _handle_due(self) -> None:
        """Logs, evaluates and checkpoints, in this order, what is due."""
        is_unlogged_end = self._host["logged"] < self.env_steps >= self._plan.num_env_steps
        if is_unlogged_end or self._due("logged", self._plan.log_interval):
            self._log()
        if self._due("evaluated", self._plan.eval_interval):
            self._evaluate()
        if self._due("checkpointed", self._plan.checkpoint_interval):
            self._save_patience.attempt(self._save)

    def _log(self) -> None:
        self._logs.add_metrics(self._record())
        self._log_patience.attempt(self._flush)
        self._host["logged"] = self.env_steps
        self._state = clear_losses(self._state)
        self._stopwatch.restart(self._state)

    def _record(self) -> dict[str, Any]:
        state, count = self._state, float(self._state.loss_count)
        losses = {k: float(v) / count if count else None for k, v in state.loss_sums.items()}
        counter = self._parts.env_steps
        return metrics_record(
            state.carry.statistics,
            updates=int(self._parts.agent.train_step_counter),
            wall_seconds=self._wall_seconds(),
            env_steps_per_second=self._stopwatch.env_steps_per_second(self._state),
            **losses,
            **{name: float(value(counter)) for name, value in self._parts.agent.schedules.items()},
            **self._stopwatch.shares(self._state),
            **self._runner.measurements(),
        )

    def _evaluate(self) -> None:
        result = self._play(self._plan.num_eval_episodes)
        self._logs.add_evaluation({"env_steps": self.env_steps, **result})
        self._log_patience.attempt(self._flush)
        self._host |= {"evaluations": self._host["evaluations"] + 1, "evaluated": self.env_steps}
        self._returned = self.env_steps, result["return_mean"]
        self._save_patience.attempt(lambda: self._save_if_best(result["return_mean"]))

    def _save_if_best(self, return_mean: float) -> None:
        with hinting(self._resume_hint):
            best = self._checkpoints.best()
        # One that failed before is made up for, too: what returns here counts as written.
        if best is None or return_mean > best.return_mean or self._save_patience.is_failing:
            self._save()

    def _play(self, num_episodes: int) -> dict[str, Any]:
        length = self._parts.evaluator.length(num_episodes)

        def look_around(done: int) -> bool:
            self._progress.update({}, EVALUATING, (done, length))
            return self._stop.requested

        with hinting(self._resume_hint):
            result = self._parts.evaluator.run(num_episodes, self._host["evaluations"], look_around)
        self._check_stop()
        assert result is not None  # it is None only if a stop was requested
        self._progress.update({"evaluation_return_mean": result["return_mean"]}, EVALUATING)
        return result

    def _save(self) -> None:
        with hinting(self._resume_hint):
            check_weights(self._parts.agent, self.env_steps)
            self._logs.sync()  # or a resume from this checkpoint would miss records
        of, mean = self._returned or (None, None)
        before = self._host["checkpointed"]
        self._host |= {"checkpointed": self.env_steps, "wall_seconds": self._wall_seconds()}
        try:
            self._checkpoints.save(self.env_steps, mean if of == self.env_steps else None)
            if not before:
                self._folder.note_checkpoint()
        except WriteError:
            self._host["checkpointed"] = before
            raise

    def _check_stop(self) -> None:
        if self._stop.requested:
            if self._host["checkpointed"] != self.env_steps:
                self._save()
            raise Stopped

    def _finish(self) -> dict[str, Any]:
        self._log_patience.insist(self._flush)
        if self._host["checkpointed"] != self.env_steps:
            self._save_patience.insist(self._save)
        evaluation = self._play(self._plan.num_final_episodes)
        result = {
            "evaluation": evaluation,
            "env_steps": self.env_steps,
            "updates": int(self._parts.agent.train_step_counter),
            "episodes": int(self._state.carry.statistics.episodes),
            "wall_seconds": self._wall_seconds(),
            "weights_sha256": weights_sha256(self._parts.agent.trained),
            **self._runner.description,
        }
        self._save_patience.insist(lambda: self._folder.write_json("result.json", result))
        return result
