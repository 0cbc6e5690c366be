"""The works that are timed on every side, with the hyperparameters that all sides share.

Imports the standard library alone: peers read it too, each in a virtual environment of its own.
"""

from __future__ import annotations

import os
from typing import NamedTuple

PONG = "ALE/Pong-v5"

DISCOUNT = 0.99
EPSILON = 0.01  # of the epsilon-greedy policy that collects
TARGET_UPDATE_TAU = 0.005
RMSPROP_DECAY = 0.99
MAX_KL = 0.01  # nats, of TRPO's step of the policy
LINE_SEARCH_STEPS = 10
LINE_SEARCH_SHRINK = 0.8
FRAME_SKIP = 4
FRAME_STACK = 4
STACK_BYTES = FRAME_STACK * 84 * 84
SEED = 1


class Work(NamedTuple):
    """One line of the table, without the number of environments.

    Attributes:
        algorithm: "dqn", "dqn3", "sac", "ppo", "a2c", "trpo" or "nstep_q".
        environment: a gymnasium id.
        batch_size: transitions an update; None: a whole rollout.
        optimizer: "Adam"; "RMSprop" as in TensorFlow 1, with epsilon inside the root;
            "CenteredRMSprop" as in DQN 3.0.
        units: dense layers of a network that reads vectors, and of SAC's heads on images. Images
            are read by the Nature CNN (Mnih et al. 2015), by n-step Q, which has no peer, with the
            smaller one of its paper (Mnih et al. 2016).
        rollout_steps: vector steps of a rollout, which is learnt from `num_epochs` times and thrown
            away; 0: it learns from a replay buffer.
        env_steps_per_update: of what learns from a replay buffer.
        target_update_period: of DQN in updates, of DQN 3.0 and n-step Q in environment steps.
        gradient_clip_norm: global norm; None: no limit.
        fisher_fraction: of a rollout's states, those that make TRPO's Fisher matrix.
        value_epochs: of TRPO, passes over the rollout that fit the values; all of them and the step
            of the policy are one update.
        value_batch_size: transitions of a step of that fit.
        initial_alpha: SAC's temperature, which is learnt.
        continuous: actions are the joystick's radius, angle and fire (Farebrother & Castro 2024).
        openai_protocol: Atari without sticky actions, with no-ops and lost lives, as in OpenAI
            Baselines; otherwise with sticky actions, until the game is over, as in Dopamine. Not of
            DQN 3.0, which has its own environment.
        replay_capacity: environment steps, at most.
        warm_up: environment steps stored before anything is timed.
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
        """Whether it learns from frames."""
        return self.environment == PONG

    @property
    def uses_rollouts(self) -> bool:
        """Whether it learns from one rollout after the other, and not from a replay buffer."""
        return self.rollout_steps > 0

    @property
    def has_small_layers(self) -> bool:
        """Whether TensorFlow is faster without oneDNN's kernels."""
        return not self.is_atari and max(self.units) < 256

    @property
    def threads(self) -> dict[str, int]:
        """TensorFlow's, fastest as measured: `inter_op` and `intra_op`; 0 is its own choice."""
        if self.is_atari:
            return {"inter_op": 0, "intra_op": 0}
        return {"inter_op": 1 if self.has_small_layers else 2, "intra_op": 1}

    def vector_steps(self, num_envs: int) -> int:
        """Vector steps of an iteration: between updates, or in a rollout."""
        if self.uses_rollouts:
            return self.rollout_steps
        return max(1, self.env_steps_per_update // num_envs)

    def updates(self, num_envs: int) -> int:
        """Updates of an iteration."""
        env_steps = self.vector_steps(num_envs) * num_envs
        if self.uses_rollouts:
            return env_steps * self.num_epochs // (self.batch_size or env_steps)
        return env_steps // self.env_steps_per_update

    def value_steps(self, num_envs: int) -> int:
        """Optimizer steps in an update of TRPO, which fit the values; of all others 0."""
        rows = self.rollout_steps * num_envs
        return self.value_epochs * (rows // min(rows, self.value_batch_size)) if rows else 0


WORKS = {
    "dqn_pong": Work(
        "dqn", PONG, 32, 6.25e-5, 1.5e-4, target_update_period=2_000,
        replay_capacity=1_000_000, warm_up=5_000,
    ),
    "dqn3_pong": Work(
        "dqn3", PONG, 32, 2.5e-4, 0.01, "CenteredRMSprop", target_update_period=10_000,
        replay_capacity=1_000_000, warm_up=5_000,
    ),
    "dqn_cartpole": Work(
        "dqn", "CartPole-v1", 64, 5e-4, units=(64, 64), target_update_period=500,
        gradient_clip_norm=10.0,
    ),
    "ppo_pong": Work(
        "ppo", PONG, 256, 2.5e-4, 1e-5, rollout_steps=128, num_epochs=4, clip_ratio=0.1,
        entropy_coefficient=0.01, gradient_clip_norm=0.5, openai_protocol=True,
    ),
    "ppo_cartpole": Work(
        "ppo", "CartPole-v1", 256, 2.5e-4, 1e-5, units=(64, 64), rollout_steps=128, num_epochs=4,
        gradient_clip_norm=0.5,
    ),
    "a2c_pong": Work(
        "a2c", PONG, None, 7e-4, 1e-5, "RMSprop", rollout_steps=5, gae_lambda=1.0,
        value_coefficient=0.25, entropy_coefficient=0.01, gradient_clip_norm=0.5,
        openai_protocol=True,
    ),
    "a2c_cartpole": Work(
        "a2c", "CartPole-v1", None, 7e-4, 1e-5, "RMSprop", units=(64, 64), rollout_steps=5,
        gae_lambda=1.0, gradient_clip_norm=0.5,
    ),
    "trpo_cartpole": Work(
        "trpo", "CartPole-v1", None, 1e-3, units=(64, 64), rollout_steps=512, gae_lambda=0.98,
        cg_damping=1e-3, value_epochs=20, value_batch_size=512,
    ),
    "trpo_pong": Work(
        "trpo", PONG, None, 1e-3, 1e-5, rollout_steps=64, cg_iterations=10, fisher_fraction=0.1,
        value_epochs=2, value_batch_size=256, openai_protocol=True,
    ),
    "nstep_q_pong": Work(
        "nstep_q", PONG, None, 7e-4, 1e-5, "RMSprop", rollout_steps=5, gradient_clip_norm=10.0,
        target_update_period=10_000, openai_protocol=True,
    ),
    "nstep_q_cartpole": Work(
        "nstep_q", "CartPole-v1", None, 7e-4, 1e-5, "RMSprop", units=(128, 128), rollout_steps=5,
        gradient_clip_norm=10.0, target_update_period=1_000,
    ),
    "sac_pong": Work(
        "sac", PONG, 32, 1e-4, units=(256,), initial_alpha=0.1, continuous=True,
        replay_capacity=1_000_000, warm_up=5_000,
    ),
    "sac_pendulum": Work(
        "sac", "Pendulum-v1", 256, 1e-3, units=(256, 256), env_steps_per_update=1,
    ),
}  # fmt: skip


UPDATES_BY_ROWS = (
    "updates come by environment steps, ours by vector steps, in which a row between two episodes "
    "is no environment step: the shorter the episodes, the more updates ours makes of the steps"
)


def parse(name: str) -> tuple[Work, int]:
    """The work and the number of environments that `dqn_pong_8` names.

    Raises:
        ValueError: there is no such work, or peers could not make as many updates as ours.
    """
    work, _, num_envs = name.rpartition("_")
    if work not in WORKS or not num_envs.isdigit() or int(num_envs) == 0:
        raise ValueError(f"{name!r} is not WORK_N")
    training, count = WORKS[work], int(num_envs)
    if not training.uses_rollouts and training.vector_steps(count) * count % (
        training.env_steps_per_update
    ):
        raise ValueError(
            f"with {count} environments an iteration has no whole number of updates, which it has "
            f"with a divisor or a multiple of {training.env_steps_per_update}"
        )
    return training, count


def stacks_in_memory(share: float) -> int:
    """How many stacks of four frames fit into this share of the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(share * total) // STACK_BYTES
