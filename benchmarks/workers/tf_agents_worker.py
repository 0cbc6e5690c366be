"""Runs TF-Agents, as its own examples assemble it, as a worker of `throughput`.

    python benchmarks/workers/tf_agents_worker.py --workload=dqn_pong_8 --output_dir=/tmp/x

DQN and SAC follow tf_agents/agents/{dqn,sac}/examples/v2/train_eval.py, with the network of
examples/dqn/mnih15. PPO follows examples/ppo/schulman17, but with the driver and the buffer of the
other examples in place of Reverb.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipeline.utils.tensorflow_import import import_tensorflow

import_tensorflow(freeze=True)  # Must be first, because the import of TF-Agents fails without it.

import tensorflow as tf
import workloads
from protocol import STAGES, Answer, Channel, arguments, repeat
from tf_agents.drivers.dynamic_step_driver import DynamicStepDriver
from tf_agents.metrics import tf_metrics
from tf_agents.policies.random_tf_policy import RandomTFPolicy
from tf_agents.replay_buffers.tf_uniform_replay_buffer import TFUniformReplayBuffer
from tf_agents.specs import array_spec
from tf_agents.train.ppo_learner import PPOLearner
from tf_agents.utils import common
from tf_agents_setup import create_agent, make_env, set_threads

from pipeline.benchmarks.throughput import restored

_PACKAGES = ("tf-agents", "tensorflow", "gymnasium", "ale-py", "numpy")
_SUMMARY_INTERVAL = 1_000  # updates
_DRAWN = 1_000  # random actions per environment, drawn before the time measurement starts
_REPLAY_SHARE = 0.125  # of the machine's memory; the buffer allocates all of it at once


class Stages:
    """Common parts of the examples: environment, agent, metrics and collect driver."""

    def __init__(
        self, workload: workloads.Workload, num_envs: int, capacity: int, driver_steps: int
    ) -> None:
        """Creates the environment, the agent, the metrics and the driver.

        Args:
          workload: The workload to time.
          num_envs: Number of environments.
          capacity: Capacity of the replay buffer, in rows per environment.
          driver_steps: Minimum number of environment steps of a call of the driver.
        """
        self.workload, self.num_envs, self.capacity = workload, num_envs, capacity
        self._env = make_env(workload, num_envs)
        self.updates = tf.compat.v1.train.get_or_create_global_step()
        self.agent = create_agent(workload, self._env, self.updates)
        self._buffer = TFUniformReplayBuffer(self.agent.collect_data_spec, num_envs, capacity)
        self._env_steps = tf_metrics.EnvironmentSteps()
        self._metrics = [
            tf_metrics.NumberOfEpisodes(),
            self._env_steps,
            tf_metrics.AverageReturnMetric(batch_size=num_envs),
            tf_metrics.AverageEpisodeLengthMetric(batch_size=num_envs),
        ]
        self._drive = common.function(self._driver(self.agent.collect_policy, driver_steps).run)
        self._train = common.function(self.agent.train)
        self._time_step: Any = None
        self._policy_state = self.agent.collect_policy.get_initial_state(num_envs)

    def _driver(self, policy: Any, num_steps: int) -> DynamicStepDriver:
        observers = [self._buffer.add_batch, *self._metrics]
        return DynamicStepDriver(self._env, policy, observers, num_steps=num_steps)

    def num_parameters(self) -> int:
        """Returns the number of trained parameters."""
        agent = self.agent
        if self.workload.algorithm == "dqn":
            networks = [agent._q_network]
        elif self.workload.uses_rollouts:
            networks = [agent.actor_net, agent._value_net]
        else:
            networks = [agent._actor_network, agent._critic_network_1, agent._critic_network_2]
        weights = {id(w): w for network in networks for w in network.trainable_weights}
        temperature = int(self.workload.algorithm == "sac")
        return temperature + sum(int(tf.size(w)) for w in weights.values())

    def warm_up(self) -> None:
        """Fills the replay buffer with random actions."""
        policy = RandomTFPolicy(self._env.time_step_spec(), self._env.action_spec())
        common.function(self._driver(policy, self.workload.warm_up).run)()

    def environment(self, seconds: float) -> Answer:
        """Measures the steps of the Python environments, with actions that are drawn before."""
        env = make_env(self.workload, self.num_envs).pyenv
        env.reset()
        spec, random = env.action_spec(), np.random.RandomState(workloads.SEED)
        drawn = array_spec.sample_bounded_spec(
            array_spec.add_outer_dims_nest(spec, (_DRAWN, self.num_envs)), random
        )
        actions = itertools.cycle(drawn)

        def step() -> int:
            return self.num_envs - int(env.step(next(actions)).is_first().sum())

        answer = repeat(step, seconds, "environment steps")
        env.close()
        return answer

    def collect_once(self) -> None:
        """Runs the driver once."""
        self._time_step, self._policy_state = self._drive(self._time_step, self._policy_state)

    def update_all(self) -> None:
        """Makes the updates of an iteration."""
        raise NotImplementedError

    def _iterate(self) -> None:
        self.collect_once()
        self.update_all()
        if int(self.updates) % _SUMMARY_INTERVAL < self.workload.updates(self.num_envs):
            for metric in self._metrics:
                metric.tf_summaries(self.updates, self._metrics[:2])

    def _counts(self) -> tuple[int, int]:
        return int(self._env_steps.result()), int(self.updates)

    def _done(self) -> tuple[int, int]:
        """Returns the environment steps and the updates since the stage began."""
        now, start = self._counts(), self._start
        return now[0] - start[0], now[1] - start[1]

    def _count_env_steps(self, act: Callable[[], None], seconds: float) -> Answer:
        self._start = self._counts()
        answer = repeat(act, seconds, "environment steps")
        env_steps, updates = self._done()
        episodes, _, mean, _ = (float(metric.result()) for metric in self._metrics)
        return_mean = mean if episodes else None
        return answer | {"count": env_steps, "updates": updates, "return_mean": return_mean}

    def collect(self, seconds: float) -> Answer:
        return self._count_env_steps(self.collect_once, seconds)

    def training(self, seconds: float) -> Answer:
        return self._count_env_steps(self._iterate, seconds)

    def _batches(self) -> Iterator[Any]:
        """Returns an endless iterator over batches of trajectories [B, T]."""
        raise NotImplementedError

    def sample(self, seconds: float) -> Answer:
        batches = self._batches()
        return repeat(lambda: len([next(batches)]), seconds, "batches")

    def update(self, seconds: float) -> Answer:
        experience, _ = next(self._batches())

        def act() -> int:
            self._train(experience)
            return 1

        def measure() -> Answer:
            act()  # Trace the graph, so that tracing is not timed.
            return repeat(act, seconds, "updates")

        return restored(self.agent, measure)


class ReplayStages(Stages):
    """Stages of DQN and SAC, which alternate steps into a replay buffer and updates from it."""

    def __init__(self, workload: workloads.Workload, num_envs: int, output_dir: str) -> None:
        del output_dir
        capacity = workload.replay_capacity
        if workload.is_atari:
            capacity = min(capacity, workloads.stacks_in_memory(_REPLAY_SHARE))
        # A driver that counts to N would take two vector steps when a game ends, so it counts to 1.
        driver_steps = workload.vector_steps(num_envs) if num_envs == 1 else 1
        super().__init__(workload, num_envs, capacity // num_envs, driver_steps)
        dataset = self._buffer.as_dataset(
            num_parallel_calls=3, sample_batch_size=workload.batch_size, num_steps=2
        )
        self._dataset = dataset.prefetch(3)
        self.warm_up()
        iterator = iter(self._dataset)
        self._train_step = common.function(lambda: self._train(next(iterator)[0]))

    def _batches(self) -> Iterator[Any]:
        return iter(self._dataset)

    def update_all(self) -> None:
        # Rows between episodes are not environment steps, so the number of updates that are due
        # follows from the count of environment steps.
        env_steps, updates = self._done()
        for _ in range(env_steps // self.workload.env_steps_per_update - updates):
            self._train_step()


class RolloutStages(Stages):
    """Stages of PPO. `PPOLearner` shuffles the first rows of a rollout into minibatches."""

    def __init__(self, workload: workloads.Workload, num_envs: int, output_dir: str) -> None:
        rows = workload.rollout_steps
        # The capacity is twice the rollout, because rows between episodes are stored too.
        super().__init__(workload, num_envs, 2 * rows, rows * num_envs)
        self._learner = PPOLearner(
            output_dir,
            self.updates,
            self.agent,
            experience_dataset_fn=self._rollout,
            normalization_dataset_fn=self._rollout,
            num_samples=1,
            num_epochs=workload.num_epochs,
            minibatch_size=workload.batch_size,
            shuffle_buffer_size=rows * num_envs,
        )
        self._hold_back()

    def _hold_back(self) -> None:
        """Prevents tf.data from reading ahead, because it would read the previous rollout again.

        In the examples, Reverb makes the reader wait for the next rollout.
        """
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        learner = self._learner
        self._dataset = learner._train_dataset.with_options(options)
        learner._train_iterator = iter(self._dataset)
        learner._normalization_iterator = iter(learner._normalization_dataset.with_options(options))

    def _rollout(self) -> tf.data.Dataset:
        dataset = self._buffer.as_dataset(
            sample_batch_size=self.num_envs,
            num_steps=self.workload.rollout_steps,
            single_deterministic_pass=True,
        )
        return dataset.map(lambda rows, info: (self.agent.preprocess_sequence(rows), info))

    def _batches(self) -> Iterator[Any]:
        self.collect_once()
        return iter(self._dataset)

    def collect_once(self) -> None:
        self._buffer.clear()
        super().collect_once()

    def update_all(self) -> None:
        self._learner.run()


def differences(stages: Stages) -> list[str]:
    """Returns how this workload differs from this pipeline's."""
    workload = stages.workload
    told = [
        "environments are stepped one after another in one process (BatchedPyEnvironment; a "
        "thread or a process for each was slower on CartPole, and no faster on Pong)",
        f"metrics are written every {_SUMMARY_INTERVAL:,} updates, as Actor and Learner do; the v2 "
        "examples do so after every update. There are no checkpoints and no evaluations",
        "the optimizer is tf.compat.v1's Adam, as in the examples. The threads and kernels (oneDNN "
        "or not) are those of ours; the examples choose none",
    ]
    if workload.uses_rollouts:
        told.append("PPOLearner reads each rollout once more, for normalizers that are off here")
        told.append("tf.data does not read ahead; with Reverb in place of this buffer it could")
        told.append(
            f"only the first {workload.rollout_steps} rows of each environment's rollout are "
            "learned from; the last one and those between episodes have no advantage and are masked"
        )
        if workload.is_atari:
            told.append(
                "policy and value share their layers, but PPOAgent evaluates one network after "
                "the other, so the encoder runs twice"
            )
        return told
    told.append(workloads.UPDATES_BY_ROWS)
    if workload.is_atari:
        told.append(
            f"the replay buffer has room for {stages.capacity * stages.num_envs:,} stacks of four "
            "frames, because a million would take 28 GB"
        )
    if workload.algorithm == "dqn" and workload.gradient_clip_norm is not None:
        told.append("each gradient is clipped by its own norm; ours by their global norm")
    if workload.algorithm == "sac":
        told.append("critics, actor and temperature are updated one after another")
        told.append("rows between episodes are learned from, because as_dataset includes them")
    return told


def main() -> None:
    channel, options = Channel(), arguments()
    workload, num_envs = workloads.parse(options.workload)
    threads = set_threads(workload)
    writer = tf.summary.create_file_writer(options.output_dir)
    updates = tf.compat.v1.train.get_or_create_global_step()
    with writer.as_default(), tf.summary.record_if(lambda: updates % _SUMMARY_INTERVAL == 0):
        create = RolloutStages if workload.uses_rollouts else ReplayStages
        stages = create(workload, num_envs, options.output_dir)
        stages.training(5.0)
        facts = {
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "threads": threads,
            "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
            "num_parameters": stages.num_parameters(),
            "differences": differences(stages),
        }
        channel.serve(facts, {name: getattr(stages, name) for name in STAGES})


if __name__ == "__main__":
    main()
