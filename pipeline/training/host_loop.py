"""Runs the part of training that is in Python: graph calls, logs, evaluations, checkpoints.

All of these depend on counters alone, never on the clock. For example, an evaluation is due at the
first iteration that crosses a multiple of its interval. The counts of the last log, evaluation and
checkpoint are part of the checkpoint.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.acting.episode_statistics import metrics_record
from pipeline.agents.agent import Agent
from pipeline.checkpointing.checkpoints import Checkpoints, Part
from pipeline.checkpointing.exactness import Circumstances
from pipeline.checkpointing.saveables import HostState, Tensors, Variables, weights_sha256
from pipeline.environments.episodes import WINDOW
from pipeline.environments.training_environment import named_failures
from pipeline.environments.watchdog import Watchdog
from pipeline.replay import Experience
from pipeline.runs.run_folder import RunFolder
from pipeline.runs.run_logs import RunLogs, named_write_errors
from pipeline.training.components import Components, closed_on_error
from pipeline.training.graph_calls import GraphCalls
from pipeline.training.intervals import Plan
from pipeline.training.iteration import Chunk, LoopState, clear_losses
from pipeline.training.nan_checks import check_losses, check_state, unsound_weights
from pipeline.utils.errors import UserError, WriteError, hinting
from pipeline.utils.progress import EVALUATING, TRAINING, WARMING_UP, Progress
from pipeline.utils.retry import Patience
from pipeline.utils.shutdown import Stopped, StopSignal

# The number of the final evaluation, above those of the evaluations during training. Its episodes
# depend on the seed but not on how often the run was evaluated.
_FINAL_EVALUATION = 2**31 - 1


class HostLoop:
    """Drives one run from its newest checkpoint to its end.

    Call `restore` first, then `collect_randomly`, then `train`.

    Attributes:
      state: State of the run after the newest graph call.
    """

    def __init__(
        self,
        components: Components,
        plan: Plan,
        folder: RunFolder,
        progress: Progress,
        stop: StopSignal,
        circumstances: Circumstances | None = None,
    ):
        """Initializes the loop and resets the environments.

        Args:
          components: Components of the run, newly built.
          plan: Length of the run and its intervals.
          folder: Folder of the run, open for writing.
          progress: Shows progress and messages.
          stop: Signal to stop, which is polled between graph calls.
          circumstances: Compared with those of the checkpoint before anything is restored.
        """
        self._components = components
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._stop = stop
        self._runner = components.runner
        self._calls = GraphCalls(components.runner, components.environment)
        self._host = HostState(
            wall_seconds=0.0, evaluations=0, evaluated=0, logged=0, checkpointed=0
        )
        self._agent = Variables(agent=components.agent)
        parts: dict[str, Part] = {
            **({"circumstances": circumstances} if circumstances else {}),
            "agent": self._agent,
            "experience": components.experience,
            "environment": components.environment,
            "loop": Tensors(lambda: self.state, self._set_state),
            "host": self._host,
        }
        with named_write_errors(folder.path):
            folder.check_held()
            self._checkpoints = Checkpoints(folder.checkpoints, parts)
        self._resume_hint = functools.partial(_resume_hint, folder, self._checkpoints)
        self._logs = RunLogs(folder)
        self._flush = hinting(self._resume_hint)(self._logs.flush)
        self._watched = [*self._runner.watched]
        if not components.evaluator.shares_environment:
            self._watched.append(components.evaluator.environment.episodes)
        self._watchdog = Watchdog(self._watched, self._resume_hint, stop)
        # Two, because a record may fit on a disk where a checkpoint does not.
        self._log_patience = Patience(progress.message, self._check_stop)
        self._save_patience = Patience(progress.message, self._check_stop)
        self._clock = time.monotonic()
        # Environment steps and mean of the last evaluation.
        self._returned: tuple[int, float | None] | None = None
        with closed_on_error(self), named_failures(components.environment):
            self.state = self._runner.initial_state()

    @property
    def env_steps(self) -> int:
        """Returns the number of environment steps taken so far, over all processes of the run."""
        return int(self.state.carry.statistics.env_steps)

    @property
    def _is_saved(self) -> bool:
        """Returns True if a checkpoint has the current state."""
        return self._host["checkpointed"] == self.env_steps

    def restore(self) -> bool:
        """Restores the newest intact checkpoint.

        Returns:
          True if there was one.

        Raises:
          UserError: If all checkpoints are damaged or missing, or if the checkpoint belongs to
            another configuration.
        """
        restored = self._checkpoints.restore()
        if not restored:
            self._folder.check_none_lost()
        for warning in restored.warnings if restored else []:
            self._progress.message(f"warning: {warning}")
        watched = self._runner.watched
        self._watched[: len(watched)] = watched  # collectors may have been replaced
        if self._components.environment.divergence:
            self._set_state(self._runner.begin_new_episodes(self.state))
        self._calls.restart_timing(self.state)
        self._clock = time.monotonic()
        self._stop.ends_at_once = False  # From now on, something would be lost.
        return restored is not None

    def cut_logs(self) -> None:
        """Removes the records that were logged after the restored checkpoint."""
        newest = self.env_steps or -1  # without a checkpoint nothing stays
        host = self._host
        metrics, evaluations = self._logs.truncate_after(host["logged"], host["evaluated"], newest)
        # A record resets `loss_count`, which is then smaller than the number of updates.
        has_logged = int(self.state.loss_count) < int(self._components.agent.train_step_counter)
        if metrics[-1]["env_steps"] != host["logged"] if metrics else has_logged:
            self._warn_of_missing("metrics.jsonl")
        last = evaluations[-1]["env_steps"] if evaluations else host["evaluated"]
        if last != host["evaluated"] or len(evaluations) != host["evaluations"]:
            self._warn_of_missing("eval.jsonl")

    def _warn_of_missing(self, log: str) -> None:
        self._progress.message(
            f"warning: {log} lacks records of this run. The run continues without them."
        )

    def collect_randomly(self, until: int) -> None:
        """Collects with a random policy until the run has taken `until` environment steps.

        If the run has already taken them, nothing is done. Otherwise, checkpoints are saved when
        they are due and afterwards, because the warm-up may be long.

        Raises:
          Stopped, UserError: See `train`.
        """
        is_cold = self.env_steps < until
        saves = self._plan._replace(log_interval=0, eval_interval=0)
        while self.env_steps < until:
            stop = min(until, saves.next_stop(self.env_steps))
            self._call(self._runner.collect_randomly, stop, WARMING_UP)
            if self.env_steps < until:  # The one after the warm-up also has the counts set below.
                self._save_patience.retry(self.save)
                if self._due("checkpointed", self._plan.checkpoint_interval):
                    self._save_patience.attempt(self.save)
        if is_cold:
            if self.env_steps >= self._plan.num_env_steps:
                raise UserError(
                    f"the warm-up took {self.env_steps:_} environment steps, because it ends with "
                    f"a whole iteration, and train.num_env_steps = {self._plan.num_env_steps:_} "
                    "leaves nothing to train: raise it."
                )
            if not int(self._components.agent.train_step_counter):  # else there may be records
                self._host |= {"logged": self.env_steps, "evaluated": self.env_steps}
            self._calls.restart_timing(self.state)
        self._components.experience.check_ready()
        if is_cold:
            self._save_patience.attempt(self.save)

    def train(self) -> dict[str, Any]:
        """Trains to the end and evaluates the final weights.

        Returns:
          The contents of result.json, which it writes.

        Raises:
          Stopped: If a signal arrived. A checkpoint has been written.
          UserError: If a loss is not finite, an environment failed, or the disk has been full for
            too long.
        """
        self._handle_due()
        while self.env_steps < self._plan.num_env_steps:
            self.advance()
        return self._finish()

    def advance(self) -> None:
        """Makes one graph call of training, and then logs, evaluates and saves if that is due.

        Raises:
          Stopped, UserError: See `train`.
        """
        until = self._plan.next_stop(self.env_steps)
        self._call(self._runner.train, until, TRAINING)
        self._save_patience.retry(self.save)
        if self.env_steps >= until:
            self._handle_due()

    def record(self) -> dict[str, Any]:
        """Returns the record of metrics.jsonl for the current state."""
        state, count = self.state, int(self.state.loss_count)
        losses = {k: float(v) / count if count else None for k, v in state.loss_sums.items()}
        agent, counter = self._components.agent, self._components.env_steps
        schedules = {k: float(schedule(counter)) for k, schedule in agent.schedules.items()}
        of_environments = [x.episodes for x in self._runner.environments]
        # All together they count about as many episodes as one alone, but one of each at least.
        newest = max(1, WINDOW // max(1, len(of_environments)))
        own = [x for episodes in of_environments for _, x in list(episodes.own_returns)[-newest:]]
        own_sum = sum(episodes.own_return_sum for episodes in of_environments)
        return metrics_record(
            state.carry.statistics,
            updates=int(agent.train_step_counter),
            wall_seconds=self._wall_seconds(),
            env_steps_per_second=self._calls.env_steps_per_second(state),
            **losses,
            **schedules,
            **self._calls.shares(state),
            **self._runner.measurements(),
            **({"return_mean_100": float(np.mean(own)), "return_sum": own_sum} if own else {}),
        )

    def close(self) -> None:
        """Closes the files of the loop; the caller closes the components."""
        self._watchdog.close()
        self._logs.close()

    def _wall_seconds(self) -> float:
        """Returns the seconds that the run has taken, over all its processes."""
        now = time.monotonic()
        self._host["wall_seconds"] += now - self._clock
        self._clock = now
        return self._host["wall_seconds"]

    def _set_state(self, state: LoopState) -> None:
        self.state = state
        self._components.env_steps.assign(state.carry.statistics.env_steps)

    def _call(self, chunk: Chunk, until: int, phase: str) -> None:
        """Makes one graph call of `chunk`, which ends once the run has taken `until` steps."""
        self._check_stop()
        if not self._calls.is_traced(chunk):
            if not tf.config.functions_run_eagerly():
                self._progress.message(f"building the graph for {phase} ...")
            self._calls.trace(chunk, self.state)
            self._agent.check_complete()
        self._check_stop()
        components = self._components
        weights = functools.partial(unsound_weights, components.agent, components.experience)
        with hinting(self._resume_hint), named_failures(components.environment, weights):
            self.state = self._calls.run(chunk, self.state, until)
            check_losses(self.state.loss_sums, *self._checked())
            self._components.experience.check_rows()  # before such rows are in a checkpoint
        self._progress.update(self.record(), phase)
        self._log_patience.retry(self._flush)

    def _checked(self) -> tuple[Agent, Experience, int, str]:
        """Returns the arguments of `nan_checks`."""
        environments = self._runner.environments
        source = environments[0].source if environments else ""
        return self._components.agent, self._components.experience, self.env_steps, source

    def _due(self, name: str, interval: int) -> bool:
        return bool(interval) and self.env_steps // interval > self._host[name] // interval

    def _handle_due(self) -> None:
        """Logs, evaluates and saves a checkpoint, in this order and each only if it is due."""
        is_unlogged_end = self._host["logged"] < self.env_steps >= self._plan.num_env_steps
        if is_unlogged_end or self._due("logged", self._plan.log_interval):
            self._log()
        if self._due("evaluated", self._plan.eval_interval):
            self._evaluate()
        if self._due("checkpointed", self._plan.checkpoint_interval):
            self._save_patience.attempt(self.save)

    def _log(self) -> None:
        self._logs.add_metrics(self.record())
        self._log_patience.attempt(self._flush)
        self._host["logged"] = self.env_steps
        self.state = clear_losses(self.state)
        self._calls.restart_timing(self.state)

    def _evaluate(self) -> None:
        result = self._play(self._plan.num_eval_episodes, self._host["evaluations"])
        self._logs.add_evaluation({"env_steps": self.env_steps, **result})
        self._log_patience.attempt(self._flush)
        self._host |= {"evaluations": self._host["evaluations"] + 1, "evaluated": self.env_steps}
        mean = result["return_mean"]
        self._returned = self.env_steps, mean
        self._save_patience.attempt(lambda: self._save_if_best(mean))

    def _save_if_best(self, return_mean: float | None) -> None:
        # If the best one cannot be read now, another is saved rather than none.
        best = self._checkpoints.best(unreadable=set())
        is_best = return_mean is not None and (best is None or return_mean > best.return_mean)
        if is_best or self._save_patience.is_failing:  # Also retry an earlier failed save.
            self.save()

    def _play(self, num_episodes: int, index: int) -> dict[str, Any]:
        def on_progress(done: int, length: int, longest: int) -> bool:
            self._progress.update({"episode_steps": longest}, EVALUATING, (done, length))
            return self._stop.requested

        with hinting(self._resume_hint):
            check_state(self.state.carry.time_step, *self._checked())
            result = self._components.evaluator.run(num_episodes, index, on_progress)
        if self._components.evaluator.shares_environment:
            self._set_state(self._runner.begin_new_episodes(self.state))
        self._check_stop()
        assert result is not None  # it is None only if a stop was requested
        if truncated := result.get("truncated"):
            self._progress.message(
                f"{truncated} evaluation episodes were truncated (Evaluator.max_episode_steps)"
            )
        if not result["returns"]:
            self._progress.message(
                "no episode ended in this evaluation, so it has no mean return: increase "
                "Evaluator.num_env_steps"
            )
        self._progress.update({"evaluation_return_mean": result["return_mean"]})
        return result

    def save(self) -> None:
        """Saves a checkpoint of the current state.

        Raises:
          UserError: If weights or rows are not finite; a WriteError if it cannot be written.
        """
        with hinting(self._resume_hint):
            check_state(self.state.carry.time_step, *self._checked())
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
            if not self._is_saved:
                self.save()
            raise Stopped

    def _finish(self) -> dict[str, Any]:
        self._log_patience.insist(hinting(self._resume_hint)(self._logs.sync))
        if not self._is_saved:
            self._save_patience.insist(self.save)
        evaluation = self._play(self._plan.num_final_episodes, _FINAL_EVALUATION)
        result = {
            "evaluation": evaluation,
            "env_steps": self.env_steps,
            "updates": int(self._components.agent.train_step_counter),
            "episodes": int(self.state.carry.statistics.episodes),
            "wall_seconds": self._wall_seconds(),
            "weights_sha256": weights_sha256(self._components.agent.trained),
            **self._runner.description,
        }
        self._save_patience.insist(lambda: self._folder.write_json("result.json", result))
        return result


def _resume_hint(folder: RunFolder, checkpoints: Checkpoints) -> str:
    """Returns a sentence about the latest checkpoint, or "" if that cannot be read now.

    The sentence is added to the message of another error. An error while reading the checkpoint
    must not hide that error.
    """
    try:
        folder.check_held()
        newest = checkpoints.latest()
    except UserError:
        return ""
    return f"The checkpoint {newest} is intact." if newest else "There is no checkpoint yet."
