"""Runs Stable-Baselines3, and TRPO of sb3-contrib, as a worker of `throughput`.

    .venv-peers/bin/python benchmarks/workers/sb3_worker.py --workload=dqn_pong_8 \
        --output_dir=/tmp/x
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import workloads
from protocol import STAGES, Answer, Channel, arguments, repeat
from sb3_setup import create_model, make_env
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import safe_mean

_PACKAGES = ("stable-baselines3", "sb3-contrib", "torch", "gymnasium", "ale-py", "numpy")
_FOREVER = 10**9  # environment steps
_PROBE_SECONDS = 3.0
_DRAWN = 1_000  # random actions per environment, drawn before the time measurement starts


class Deadline(BaseCallback):
    """Callback that ends `learn` at the first iteration that begins after a number of seconds.

    Attributes:
      elapsed: Seconds from the start of `learn` to the beginning of that iteration.
      env_steps: Environment steps from the start of `learn` to the beginning of that iteration.
    """

    def __init__(self, seconds: float) -> None:
        """Initializes the callback."""
        super().__init__()
        self._seconds = seconds
        self._started = 0.0
        self.elapsed = 0.0
        self.env_steps = 0
        self._is_over = False

    def _on_training_start(self) -> None:
        self._first_env_step = self.model.num_timesteps
        self._started = time.perf_counter()

    def _on_rollout_start(self) -> None:
        self.elapsed = time.perf_counter() - self._started
        self.env_steps = self.model.num_timesteps - self._first_env_step
        self._is_over = self.elapsed >= self._seconds

    def _on_step(self) -> bool:
        return not self._is_over


class Stages:
    """Stages of one model.

    Each part of its learn loop is timed alone by leaving out the others: collecting without
    `train`, and `train` on one batch that is not sampled anew.
    """

    def __init__(self, workload: workloads.Workload, num_envs: int) -> None:
        """Creates the model and its environments, and warms up the model."""
        self._workload, self._num_envs = workload, num_envs
        self.model = create_model(workload, num_envs)
        self._env = make_env(workload, num_envs)
        self._env.reset()
        self.model.learn(workload.warm_up)

    def environment(self, seconds: float) -> Answer:
        space = self._env.action_space
        drawn = [[space.sample() for _ in range(self._num_envs)] for _ in range(_DRAWN)]
        actions = itertools.cycle(drawn)

        def step() -> int:
            self._env.step(next(actions))
            return self._num_envs

        return repeat(step, seconds, "environment steps")

    def training(self, seconds: float) -> Answer:
        deadline, updates = Deadline(seconds), self.updates()
        self.model.learn(_FOREVER, deadline, reset_num_timesteps=False)
        return {
            "seconds": deadline.elapsed,
            "count": deadline.env_steps,
            "unit": "environment steps",
            "updates": self.updates() - updates,
            "return_mean": float(safe_mean([ep["r"] for ep in self.model.ep_info_buffer])),
        }

    def collect(self, seconds: float) -> Answer:
        with mock.patch.object(self.model, "train", lambda **unused: None):
            return self.training(seconds)

    def _sample(self) -> list[Any]:
        """Returns a batch from a replay buffer, or all batches of an epoch of a rollout."""
        if self._workload.uses_rollouts:
            return list(self.model.rollout_buffer.get(self._workload.batch_size))
        return [self.model.replay_buffer.sample(self._workload.batch_size)]

    def _fill_rollout(self) -> None:
        """Collects a whole rollout, because `Deadline` stops after the buffer has been reset."""
        if self._workload.uses_rollouts:
            num_steps = self._workload.rollout_steps * self._num_envs
            self.model.learn(num_steps, reset_num_timesteps=False)

    def sample(self, seconds: float) -> Answer:
        self._fill_rollout()
        return repeat(lambda: len(self._sample()), seconds, "batches")

    def update(self, seconds: float) -> Answer:
        """Measures `train` without the sampling of its batches.

        For TRPO, the batches that fit the value function are sampled as part of it.
        """
        self._fill_rollout()
        updates = self._workload.updates(self._num_envs)
        train, patch = (
            self._rollout_update if self._workload.uses_rollouts else self._replay_update
        )()

        def act() -> int:
            train()
            return updates

        with patch, self._restored():
            return repeat(act, seconds, "updates")

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        """Restores weights, optimizers and SAC's temperature, which one batch would spoil."""
        model = self.model
        networks = copy.deepcopy(model.get_parameters())
        names = model._get_torch_save_params()[1]  # get_parameters leaves these out
        tensors = {name: getattr(model, name).detach().clone() for name in names}
        yield
        model.set_parameters(networks)
        for name, value in tensors.items():
            getattr(model, name).data.copy_(value)

    def _rollout_update(self) -> tuple[Callable[[], None], Any]:
        buffer, batches = self.model.rollout_buffer, self._sample()
        get = buffer.get

        def given(batch_size: int | None = None) -> Iterable[Any]:
            return batches if batch_size == self._workload.batch_size else get(batch_size)

        return self.model.train, mock.patch.object(buffer, "get", given)

    def _replay_update(self) -> tuple[Callable[[], None], Any]:
        (batch,) = self._sample()
        train = partial(
            self.model.train, self._workload.updates(self._num_envs), self._workload.batch_size
        )
        given = mock.patch.object(self.model.replay_buffer, "sample", lambda *_, **__: batch)
        return train, given

    def updates(self) -> int:
        """Returns the number of updates since the beginning, from the optimizer's step count."""
        model = self.model
        optimizer = (model.critic if self._workload.algorithm == "sac" else model.policy).optimizer
        steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        return steps // max(1, self._workload.value_steps(self._num_envs))

    def num_parameters(self) -> int:
        """Returns the number of trained parameters."""
        model = self.model
        if self._workload.algorithm == "dqn":
            modules = [model.q_net]
        else:
            modules = (
                [model.actor, model.critic] if self._workload.algorithm == "sac" else [model.policy]
            )
        temperature = int(self._workload.algorithm == "sac")
        return temperature + sum(p.numel() for p in {p for m in modules for p in m.parameters()})


def choose_threads(stages: Stages) -> dict[int, float]:
    """Sets torch's threads to the number that trains fastest.

    Returns:
      Environment steps per second by the number of threads.
    """
    speeds = {}
    cores = len(os.sched_getaffinity(0))
    for threads in sorted({2**power for power in range(cores.bit_length())} | {cores}):
        torch.set_num_threads(threads)
        stages.training(_PROBE_SECONDS / 3)
        answer = stages.training(_PROBE_SECONDS)
        speeds[threads] = answer["count"] / answer["seconds"]
    torch.set_num_threads(max(speeds, key=lambda threads: speeds[threads]))
    return speeds


def differences(workload: workloads.Workload, stages: Stages) -> list[str]:
    """Returns how this workload differs from this pipeline's."""
    told = [
        "episode statistics are logged at the default interval, but not written (verbose=0)",
    ]
    if workload.is_atari:
        told.append(
            "environments are stepped one after another in one process (DummyVecEnv, SB3's "
            "default); ours are stepped by ALE's vector environment in as many threads as cores"
        )
        told.append("frames are pooled in RGB and then converted to grey; ours are pooled in grey")
    if workload.is_atari and not workload.continuous:
        told.append("FIRE and then the third action are pressed at the start of each game")
    if workload.uses_rollouts:
        told.append(
            "a rollout has no rows between episodes, so it has a few more environment steps"
        )
    else:
        told.append(workloads.UPDATES_BY_ROWS)
    if workload.is_atari and not workload.uses_rollouts:
        told.append(
            f"the replay buffer has room for {stages.model.buffer_size:,} stacks of four frames, "
            "each stored once, because a million would take 28 GB"
        )
    if not workload.is_atari:
        told.append("environments are wrapped by Monitor and by gymnasium's PassiveEnvChecker")
    if workload.algorithm == "dqn":
        told.append("one random number per vector step decides whether all environments explore")
    if workload.algorithm == "a2c":
        told.append(
            "the optimizer is RMSpropTFLike, as in RL Zoo for Atari, with the formula of ours; "
            "A2C's default is torch's RMSprop"
        )
    if workload.algorithm == "trpo":
        told.append(
            "conjugate gradients start from small random numbers, not from 0, and end at an "
            "absolute residual; ours end at a residual relative to the first one"
        )
        told.append(
            "the gradient of the KL divergence is kept as a graph; ours is computed again for "
            "every product with the Fisher matrix"
        )
    if workload.algorithm == "sac":
        told.append("temperature, critics and actor are updated one after another")
        if workload.is_atari:
            told.append("the actor's loss trains the image encoder; the critics' losses do not")
    return told


def main() -> None:
    channel, options = Channel(), arguments()
    workload, num_envs = workloads.parse(options.workload)
    stages = Stages(workload, num_envs)
    speeds = choose_threads(stages)
    facts = {
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "threads": {"torch": torch.get_num_threads()},
        "threads_tried": speeds,
        "num_parameters": stages.num_parameters(),
        "differences": differences(workload, stages),
    }
    channel.serve(facts, {name: getattr(stages, name) for name in STAGES})


if __name__ == "__main__":
    main()
