"""Trains Stable-Baselines3 with the settings of RL Baselines3 Zoo and prints its score as JSON.

    .venv-peers/bin/python benchmarks/workers/zoo_runs.py --workload=trpo:Acrobot-v1 --seed=1

The settings are those of `hyperparams/*.yml` in DLR-RM/rl-baselines3-zoo. The score is the mean
return of deterministic episodes with the final weights. `benchmarks.throughput --peers` creates
.venv-peers; for LunarLander, install box2d==2.3.10 and pygame in it.
"""

import argparse
import json
from typing import Any, NamedTuple

import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize


class Workload(NamedTuple):
    """Settings of a run.

    Attributes:
      num_env_steps: Environment steps.
      num_envs: Training environments.
      normalize: Whether observations and rewards are normalised.
      settings: Arguments of the algorithm.
    """

    num_env_steps: int
    num_envs: int
    normalize: bool
    settings: dict[str, Any]


def _annealed(rate: float) -> LinearSchedule:
    return LinearSchedule(rate, 0.0, 1.0)


WORKLOADS = {
    "trpo:CartPole-v1": Workload(
        100_000, 2, False,
        dict(n_steps=512, batch_size=512, cg_damping=1e-3, gae_lambda=0.98, n_critic_updates=20),
    ),
    "trpo:Acrobot-v1": Workload(100_000, 2, True, dict(n_steps=1024)),
    "trpo:MountainCar-v0": Workload(100_000, 2, True, dict(n_steps=1024, n_critic_updates=20)),
    "trpo:Pendulum-v1": Workload(
        100_000, 2, False,
        dict(n_steps=1024, gamma=0.9, n_critic_updates=15, use_sde=True, sde_sample_freq=4),
    ),
    "trpo:LunarLander-v3": Workload(
        200_000, 2, False, dict(n_steps=512, cg_damping=0.01, gae_lambda=0.98, n_critic_updates=15)
    ),
    "trpo:LunarLanderContinuous-v3": Workload(
        200_000, 2, True, dict(n_steps=1024, n_critic_updates=20)
    ),
    "ppo:Acrobot-v1": Workload(
        1_000_000, 16, True, dict(n_steps=256, gae_lambda=0.94, gamma=0.99, n_epochs=4)
    ),
    "ppo:MountainCar-v0": Workload(
        1_000_000, 16, True, dict(n_steps=16, gae_lambda=0.98, gamma=0.99, n_epochs=4)
    ),
    "ppo:LunarLanderContinuous-v3": Workload(
        1_000_000, 16, False,
        dict(n_steps=1024, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01),
    ),
    "a2c:LunarLander-v3": Workload(
        200_000, 8, False,
        dict(n_steps=5, gamma=0.995, ent_coef=1e-5, learning_rate=_annealed(8.3e-4)),
    ),
    "a2c:Pendulum-v1": Workload(
        1_000_000, 8, True,
        dict(
            n_steps=8, gamma=0.9, gae_lambda=0.9, vf_coef=0.4, learning_rate=_annealed(7e-4),
            use_sde=True, policy_kwargs=dict(log_std_init=-2, ortho_init=False),
        ),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--num_episodes", default=100, type=int)
    arguments = parser.parse_args()
    workload, seed = WORKLOADS[arguments.workload], arguments.seed
    algorithm, _, environment = arguments.workload.partition(":")
    torch.set_num_threads(1)

    def environments(count: int, seed: int) -> Any:
        kwargs = {"continuous": True} if "Continuous" in environment else {}
        name = environment.replace("Continuous", "")
        return make_vec_env(name, count, seed=seed, env_kwargs=kwargs)

    training, evaluation = environments(workload.num_envs, seed), environments(10, seed + 1000)
    if workload.normalize:
        gamma = workload.settings.get("gamma", 0.99)
        training = VecNormalize(training, gamma=gamma)
        evaluation = VecNormalize(evaluation, training=False, norm_reward=False)
        evaluation.obs_rms = training.obs_rms
    classes = {"trpo": sb3_contrib.TRPO, "ppo": stable_baselines3.PPO, "a2c": stable_baselines3.A2C}
    create = classes[algorithm]
    model = create("MlpPolicy", training, seed=seed, device="cpu", **workload.settings)
    model.learn(workload.num_env_steps)
    returns, _ = evaluate_policy(
        model, evaluation, arguments.num_episodes, deterministic=True, return_episode_rewards=True
    )
    record = {
        "workload": arguments.workload,
        "seed": seed,
        "num_episodes": arguments.num_episodes,
        "env_steps": model.num_timesteps,
        "return_mean": round(float(np.mean(returns)), 1),
        "return_std": round(float(np.std(returns)), 1),
        "version": stable_baselines3.__version__,
    }
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
