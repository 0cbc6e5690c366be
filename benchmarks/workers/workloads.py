"""Defines the workloads that all sides are timed with, and the hyperparameters that they share.

It imports only the standard library, because the peers import it in their own virtual environments.
"""

from __future__ import annotations

import os
from typing import NamedTuple

PONG = "ALE/Pong-v5"

DISCOUNT = 0.99
EPSILON = 0.01  # of the epsilon-greedy collect policy
TARGET_UPDATE_TAU = 0.005
RMSPROP_DECAY = 0.99
MAX_KL = 0.01  # in nats, for TRPO's policy step
LINE_SEARCH_STEPS = 10
LINE_SEARCH_SHRINK = 0.8
FRAME_SKIP = 4
FRAME_STACK = 4
STACK_BYTES = FRAME_STACK * 84 * 84
SEED = 1


class Workload(NamedTuple):
    """Training that is timed on every side, without the number of environments.

    Attributes:
      algorithm: "dqn", "dqn3", "sac", "ppo", "a2c", "trpo" or "nstep_q".
      environment: A gymnasium id.
      batch_size: Transitions per update. None: a whole rollout.
      optimizer: "Adam", "RMSprop" as in TensorFlow 1, with epsilon inside the square root, or
        "CenteredRMSprop" as in DQN 3.0.
      units: Units of the dense layers of networks that read vectors, and of SAC's heads on images.
        Images are read by the Nature CNN (Mnih et al. 2015). N-step Q, which has no peer, reads
        them with the smaller network of its paper (Mnih et al. 2016).
      rollout_steps: Vector steps of a rollout, which is used for `num_epochs` epochs and then
        discarded. 0: the algorithm learns from a replay buffer.
      env_steps_per_update: Environment steps per update, for algorithms with a replay buffer.
      target_update_period: For DQN in updates, for DQN 3.0 and n-step Q in environment steps.
      gradient_clip_norm: Limit of the global norm of the gradients. None: no limit.
      fisher_fraction: Fraction of a rollout's states from which TRPO's Fisher matrix is computed.
      value_epochs: Number of passes over the rollout that fit TRPO's value function. All of them
        and the policy step are one update.
      value_batch_size: Transitions per optimizer step of that fit.
      initial_alpha: Initial value of SAC's temperature, which is learned.
      continuous: True if actions are the joystick's radius, angle and fire (Farebrother & Castro
        2024).
      openai_protocol: True for Atari as in OpenAI Baselines: without sticky actions, with no-ops at
        the start, and with lost lives as ends. False as in Dopamine: with sticky actions, and until
        the game is over. DQN 3.0 does not use it, because it has its own environment.
      replay_capacity: Largest number of environment steps in the replay buffer.
      warm_up: Environment steps that are stored before anything is timed.
    """

    algorithm: str
    environment: str
    batch_size: int | None
    learning_rate: float
    optimizer_epsilon: float = 1e-7
    optimizer: str = "Adam"
    units: tuple[int, ...] = ()
    rollout_steps: int = 0
    num_epochs: int = 1
    gae_lambda: float = 0.95
    value_coefficient: float = 0.5
    env_steps_per_update: int = 4
    target_update_period: int = 1
    gradient_clip_norm: float | None = None
    clip_ratio: float = 0.2
    entropy_coefficient: float = 0.0
    cg_damping: float = 0.1
    cg_iterations: int = 15
    fisher_fraction: float = 1.0
    value_epochs: int = 0
    value_batch_size: int = 128
    initial_alpha: float = 1.0
    continuous: bool = False
    openai_protocol: bool = False
    replay_capacity: int = 100_000
    warm_up: int = 1_000

    @property
    def is_atari(self) -> bool:
        """Returns True if the environment is an Atari game."""
        return self.environment == PONG

    @property
    def uses_rollouts(self) -> bool:
        """Returns True if the algorithm learns from rollouts, not from a replay buffer."""
        return self.rollout_steps > 0

    @property
    def has_small_layers(self) -> bool:
        """Returns True if the networks are so small that TensorFlow is faster without oneDNN."""
        return not self.is_atari and max(self.units) < 256

    @property
    def threads(self) -> dict[str, int]:
        """Returns TensorFlow's `inter_op` and `intra_op` threads that were fastest when measured.

        0 leaves the choice to TensorFlow.
        """
        if self.is_atari:
            return {"inter_op": 0, "intra_op": 0}
        return {"inter_op": 1 if self.has_small_layers else 2, "intra_op": 1}

    def vector_steps(self, num_envs: int) -> int:
        """Returns the vector steps of an iteration: those between updates, or of a rollout."""
        if self.uses_rollouts:
            return self.rollout_steps
        return max(1, self.env_steps_per_update // num_envs)

    def updates(self, num_envs: int) -> int:
        """Returns the number of updates of an iteration."""
        env_steps = self.vector_steps(num_envs) * num_envs
        if self.uses_rollouts:
            return env_steps * self.num_epochs // (self.batch_size or env_steps)
        return env_steps // self.env_steps_per_update

    def value_steps(self, num_envs: int) -> int:
        """Returns the optimizer steps in an update of TRPO that fit the values; 0 for others."""
        rows = self.rollout_steps * num_envs
        return self.value_epochs * (rows // min(rows, self.value_batch_size)) if rows else 0


WORKLOADS = {
    "dqn_pong": Workload(
        "dqn", PONG, 32, 6.25e-5, 1.5e-4, target_update_period=2_000,
        replay_capacity=1_000_000, warm_up=5_000,
    ),
    "dqn3_pong": Workload(
        "dqn3", PONG, 32, 2.5e-4, 0.01, "CenteredRMSprop", target_update_period=10_000,
        replay_capacity=1_000_000, warm_up=5_000,
    ),
    "dqn_cartpole": Workload(
        "dqn", "CartPole-v1", 64, 5e-4, units=(64, 64), target_update_period=500,
        gradient_clip_norm=10.0,
    ),
    "ppo_pong": Workload(
        "ppo", PONG, 256, 2.5e-4, 1e-5, rollout_steps=128, num_epochs=4, clip_ratio=0.1,
        entropy_coefficient=0.01, gradient_clip_norm=0.5, openai_protocol=True,
    ),
    "ppo_cartpole": Workload(
        "ppo", "CartPole-v1", 256, 2.5e-4, 1e-5, units=(64, 64), rollout_steps=128, num_epochs=4,
        gradient_clip_norm=0.5,
    ),
    "a2c_pong": Workload(
        "a2c", PONG, None, 7e-4, 1e-5, "RMSprop", rollout_steps=5, gae_lambda=1.0,
        value_coefficient=0.25, entropy_coefficient=0.01, gradient_clip_norm=0.5,
        openai_protocol=True,
    ),
    "a2c_cartpole": Workload(
        "a2c", "CartPole-v1", None, 7e-4, 1e-5, "RMSprop", units=(64, 64), rollout_steps=5,
        gae_lambda=1.0, gradient_clip_norm=0.5,
    ),
    "trpo_cartpole": Workload(
        "trpo", "CartPole-v1", None, 1e-3, units=(64, 64), rollout_steps=512, gae_lambda=0.98,
        cg_damping=1e-3, value_epochs=20, value_batch_size=512,
    ),
    "trpo_pong": Workload(
        "trpo", PONG, None, 1e-3, 1e-5, rollout_steps=64, cg_iterations=10, fisher_fraction=0.1,
        value_epochs=2, value_batch_size=256, openai_protocol=True,
    ),
    "nstep_q_pong": Workload(
        "nstep_q", PONG, None, 7e-4, 1e-5, "RMSprop", rollout_steps=5, gradient_clip_norm=10.0,
        target_update_period=10_000, openai_protocol=True,
    ),
    "nstep_q_cartpole": Workload(
        "nstep_q", "CartPole-v1", None, 7e-4, 1e-5, "RMSprop", units=(128, 128), rollout_steps=5,
        gradient_clip_norm=10.0, target_update_period=1_000,
    ),
    "sac_pong": Workload(
        "sac", PONG, 32, 1e-4, units=(256,), initial_alpha=0.1, continuous=True,
        replay_capacity=1_000_000, warm_up=5_000,
    ),
    "sac_pendulum": Workload(
        "sac", "Pendulum-v1", 256, 1e-3, units=(256, 256), env_steps_per_update=1,
    ),
}  # fmt: skip


UPDATES_BY_ROWS = (
    "updates are due by environment steps; ours are due by vector steps, which include the rows "
    "between episodes. So ours makes more updates per environment step if episodes are short"
)


def parse(name: str) -> tuple[Workload, int]:
    """Returns the workload and the number of environments of a name such as `dqn_pong_8`.

    Raises:
      ValueError: If there is no such workload, or if peers could not make as many updates as ours.
    """
    workload, _, num_envs = name.rpartition("_")
    if workload not in WORKLOADS or not num_envs.isdigit() or int(num_envs) == 0:
        raise ValueError(f"{name!r} is not WORKLOAD_N")
    training, count = WORKLOADS[workload], int(num_envs)
    if not training.uses_rollouts and training.vector_steps(count) * count % (
        training.env_steps_per_update
    ):
        raise ValueError(
            f"with {count} environments, an iteration would not have a whole number of updates; "
            f"use a divisor or a multiple of {training.env_steps_per_update}"
        )
    return training, count


def stacks_in_memory(share: float) -> int:
    """Returns how many stacks of four frames fit into a share of the machine's memory.

    Args:
      share: Share of the machine's memory, from 0 to 1.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(share * total) // STACK_BYTES
