"""Tiny runs in this process: chunks of iterations, and host loops."""

import io
import shutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console
from tf_agents.trajectories import StepType
from tiny_runs import build_components, saved, variables

from pipeline.checkpointing.checkpoints import Checkpoints
from pipeline.checkpointing.saveables import Tensors
from pipeline.runs.run_folder import RunFolder
from pipeline.training.host_loop import HostLoop
from pipeline.training.intervals import Plan
from pipeline.utils.jsonl import read_jsonl
from pipeline.utils.progress import TRAINING, Progress
from pipeline.utils.shutdown import Stopped, StopSignal

PLAN = Plan(
    num_env_steps=300,
    log_interval=40,
    eval_interval=120,
    checkpoint_interval=100,
    num_eval_episodes=4,
    num_final_episodes=6,
)
WARM_UP = 60


def saved_components(parts):
    """Returns everything that a checkpoint holds of the agent, the experience and environments."""
    return {**variables(parts.agent), **saved(parts.experience), **saved(parts.environment)}


class Chunks:
    """New components, and the state that is passed between chunks of iterations."""

    def __init__(self, algorithm, **overrides):
        self.parts = build_components(algorithm, **overrides)
        self.runner = self.parts.runner
        self.state = self.runner.initial_state()

    @property
    def env_steps(self):
        return int(self.state.carry.statistics.env_steps)

    @property
    def updates(self):
        return int(self.parts.agent.train_step_counter)

    def call(self, chunk, max_iterations, until):
        self.state = chunk(
            self.state,
            tf.constant(max_iterations, tf.int64),
            tf.constant(until, tf.int64),
        )

    def collect(self, max_iterations, until):
        self.call(self.runner.collect_randomly, max_iterations, until)

    def train(self, max_iterations, until):
        self.call(self.runner.train, max_iterations, until)

    def snapshot(self):
        """Returns everything that a checkpoint holds, except wall time."""
        state = self.state._replace(collect_seconds=tf.zeros([]))
        return {
            **saved_components(self.parts),
            **saved(Tensors(lambda: state, lambda _: None)),
            "env_steps": self.parts.env_steps.numpy(),
        }


def actor_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("actor")]


class Watching(Progress):
    """Progress that calls `hook(record, phase)` at every update."""

    def __init__(self):
        super().__init__(300, console=Console(file=io.StringIO()))
        self.hook: Callable[[Any, str], Any] = lambda record, phase: None
        self.said: list[str] = []

    def message(self, text):
        super().message(text)
        self.said.append(text)

    def update(self, record, phase=TRAINING, of_phase=None):
        super().update(record, phase, of_phase)
        self.hook(record, phase)


class Run:
    """Host loop over `parts` or newly built components, in a folder that may hold a run.

    Files in the folder `switches` act on the environments, as `tiny_runs.Walk` says.
    """

    def __init__(self, path, plan=PLAN, algorithm="dqn", parts=None, **overrides):
        self.parts = parts or self.build(path, algorithm, **overrides)
        self.switches = path.parent
        self.folder = RunFolder(path)
        path.mkdir(exist_ok=True)
        self.progress = Watching()
        self.stop = StopSignal()  # not installed; tests request it themselves
        self.loop = HostLoop(self.parts, plan, self.folder, self.progress, self.stop)
        self.warm_up = WARM_UP if self.parts.experience.keeps_rows else 0

    def build(self, path, algorithm, **overrides):
        return build_components(algorithm, path.parent, **overrides)

    def train(self):
        self.loop.restore()
        self.loop.cut_logs()
        self.loop.collect_randomly(self.warm_up)
        return self.loop.train()

    def go_on(self):
        """Trains to the end after a stop, with what is in memory."""
        self.stop.requested = False
        self.progress.hook = lambda record, phase: None
        return self.loop.train()

    def close(self):
        self.loop.close()
        self.parts.close()

    def train_until(self, env_steps, phase=TRAINING):
        """Trains until a signal stops the run, at or after `env_steps` in this phase."""

        def hook(record, current):
            self.stop.requested |= self.loop.env_steps >= env_steps and current == phase

        self.progress.hook = hook
        with pytest.raises(Stopped):
            self.train()

    def count_into(self, counts):
        """Appends the environment steps to `counts` at every update."""
        self.progress.hook = lambda record, phase: counts.append(self.loop.env_steps)

    def at(self, env_steps, act):
        """Calls `act` at every update once `env_steps` are taken."""

        def hook(record, phase):
            if self.loop.env_steps >= env_steps:
                act()

        self.progress.hook = hook

    def copy_at(self, env_steps, path):
        """Copies the folder to `path` once, as a kill would leave it after `env_steps`."""
        self.at(env_steps, lambda: path.exists() or shutil.copytree(self.folder.path, path))

    @property
    def metrics(self):
        return read_jsonl(self.folder.metrics)

    @property
    def evaluations(self):
        return read_jsonl(self.folder.evaluations)

    @property
    def best(self):
        return Checkpoints(self.folder.checkpoints, {}, writable=False).best()

    @property
    def checkpoints(self):
        return sorted(path.name for path in self.folder.checkpoints.glob("step-*"))


def events(folder):
    """Yields the step and the value of all that TensorBoard would show, from old to new."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            yield from ((event.step, value) for value in event.summary.value)


def check_streams(buffer, min_truncated):
    """Checks that rows of `Walk` follow from those before, and that some episodes were cut."""
    cut = set()
    next_batch = tf.function(buffer.next_batch, autograph=False)
    for _ in range(300):
        rows, _, _ = next_batch()
        follows = rows.step_type.numpy()[:, :-1] != StepType.LAST
        after = rows.step_type.numpy()[:, 1:]
        np.testing.assert_array_equal(after[follows], rows.next_step_type.numpy()[:, :-1][follows])
        assert (after[~follows] != StepType.MID).all()
        episode, time, _ = np.moveaxis(rows.observation.numpy(), -1, 0)
        np.testing.assert_array_equal(time[:, 1:][follows], time[:, :-1][follows] + 1)
        lasts = rows.observation.numpy()[rows.step_type.numpy() == StepType.LAST]
        cut |= {last.tobytes() for last in lasts if last[1] not in (7, 11)}
        np.testing.assert_array_equal(episode[:, 1:][follows], episode[:, :-1][follows])
    assert len(cut) >= min_truncated
