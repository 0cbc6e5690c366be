"""Trains SAC of Stable-Baselines3 on HalfCheetah-v5, with RL Baselines3 Zoo's settings.

Prints the environment steps and the mean return of greedy episodes, every 25,000 steps:

    python benchmarks/workers/sac_halfcheetah.py SEED
"""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
from stable_baselines3 import SAC
from stable_baselines3.common.monitor import Monitor


def play(model: SAC, num_episodes: int, seed: int) -> float:
    """Returns the mean return of greedy episodes."""
    env, returns = gymnasium.make("HalfCheetah-v5"), []
    for number in range(num_episodes):
        observation, _ = env.reset(seed=seed + number)
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def main() -> None:
    """Trains with the seed of the command line."""
    seed = int(sys.argv[1])
    env = Monitor(gymnasium.make("HalfCheetah-v5"))
    model = SAC("MlpPolicy", env, learning_starts=10_000, seed=seed, device="cpu")
    for env_steps in (25_000, 50_000, 75_000, 100_000):
        model.learn(25_000, reset_num_timesteps=False)
        print(env_steps, play(model, 20 if env_steps == 100_000 else 5, 10_000 * seed), flush=True)


if __name__ == "__main__":
    main()
