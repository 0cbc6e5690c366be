"""Creates environments and algorithms as users of Stable-Baselines3 do, for `sb3_worker`."""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium
import torch
import workloads
from sb3_contrib import TRPO
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.atari_wrappers import ClipRewardEnv, MaxAndSkipEnv, WarpFrame
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecTransposeImage

gymnasium.register_envs(ale_py)

_REPLAY_SHARE = 0.5  # of the machine's memory


def make_env(workload: workloads.Workload, num_envs: int) -> VecEnv:
    """Creates environments with `make_atari_env` or `make_vec_env`.

    They are in one process and stepped one after another.
    """
    if not workload.is_atari:
        return make_vec_env(workload.environment, num_envs, workloads.SEED)
    emulator = {
        "frameskip": 1,
        "repeat_action_probability": 0.0 if workload.openai_protocol else 0.25,
        "full_action_space": False,
    }
    if workload.continuous:
        emulator["continuous"] = True
        env = make_vec_env(
            workload.environment,
            num_envs,
            workloads.SEED,
            env_kwargs=emulator,
            wrapper_class=_continuous,
        )
    else:
        game_only = {"noop_max": 0, "terminal_on_life_loss": False}
        wrapper = {} if workload.openai_protocol else game_only
        env = make_atari_env(
            workload.environment,
            num_envs,
            workloads.SEED,
            env_kwargs=emulator,
            wrapper_kwargs=wrapper,
        )
    return VecTransposeImage(VecFrameStack(env, workloads.FRAME_STACK))


def _continuous(env: gymnasium.Env) -> gymnasium.Env:
    """Wraps an environment as `AtariWrapper` does, but without no-ops and FIRE at the start.

    These need discrete actions.
    """
    return ClipRewardEnv(WarpFrame(MaxAndSkipEnv(env, workloads.FRAME_SKIP)))


def create_model(workload: workloads.Workload, num_envs: int) -> BaseAlgorithm:
    """Creates the algorithm with the hyperparameters of the workload and SB3's other defaults."""
    common = {
        "policy": "CnnPolicy" if workload.is_atari else "MlpPolicy",
        "env": make_env(workload, num_envs),
        "learning_rate": workload.learning_rate,
        "gamma": workloads.DISCOUNT,
        "seed": workloads.SEED,
        "device": "cpu",
    }
    create = {"dqn": _dqn, "sac": _sac, "ppo": _ppo, "a2c": _a2c, "trpo": _trpo}[workload.algorithm]
    experience = _rollout(workload) if workload.uses_rollouts else _replay(workload, num_envs)
    return create(workload, common | experience)


def _replay(workload: workloads.Workload, num_envs: int) -> dict[str, Any]:
    capacity = workload.replay_capacity
    if workload.is_atari:
        capacity = min(capacity, workloads.stacks_in_memory(_REPLAY_SHARE))
    return {
        "batch_size": workload.batch_size,
        "buffer_size": capacity,
        "optimize_memory_usage": workload.is_atari,
        "replay_buffer_kwargs": {"handle_timeout_termination": not workload.is_atari},
        "learning_starts": workload.warm_up,
        "train_freq": (workload.vector_steps(num_envs), "step"),
        "gradient_steps": workload.updates(num_envs),
    }


def _rollout(workload: workloads.Workload) -> dict[str, Any]:
    """Returns the arguments of the algorithms that learn from rollouts."""
    return {
        "n_steps": workload.rollout_steps,
        "gae_lambda": workload.gae_lambda,
        "policy_kwargs": {
            "net_arch": {"pi": list(workload.units), "vf": list(workload.units)},
            **_optimizer(workload),
        },
    }


def _optimizer(workload: workloads.Workload) -> dict[str, Any]:
    if workload.optimizer == "Adam":
        return {
            "optimizer_class": torch.optim.Adam,
            "optimizer_kwargs": {"eps": workload.optimizer_epsilon},
        }
    return {
        "optimizer_class": RMSpropTFLike,
        "optimizer_kwargs": {"eps": workload.optimizer_epsilon, "alpha": workloads.RMSPROP_DECAY},
    }


def _losses(workload: workloads.Workload) -> dict[str, Any]:
    return {
        "ent_coef": workload.entropy_coefficient,
        "vf_coef": workload.value_coefficient,
        "max_grad_norm": workload.gradient_clip_norm,
    }


def _ppo(workload: workloads.Workload, common: dict[str, Any]) -> PPO:
    return PPO(
        batch_size=workload.batch_size,
        n_epochs=workload.num_epochs,
        clip_range=workload.clip_ratio,
        **_losses(workload),
        **common,
    )


def _a2c(workload: workloads.Workload, common: dict[str, Any]) -> A2C:
    return A2C(**_losses(workload), **common)


def _trpo(workload: workloads.Workload, common: dict[str, Any]) -> TRPO:
    return TRPO(
        target_kl=workloads.MAX_KL,
        cg_max_steps=workload.cg_iterations,
        cg_damping=workload.cg_damping,
        line_search_max_iter=workloads.LINE_SEARCH_STEPS,
        line_search_shrinking_factor=workloads.LINE_SEARCH_SHRINK,
        n_critic_updates=workload.value_epochs,
        batch_size=workload.value_batch_size,
        **common,
    )


def _dqn(workload: workloads.Workload, common: dict[str, Any]) -> DQN:
    return DQN(
        target_update_interval=workload.target_update_period * workload.env_steps_per_update,
        exploration_initial_eps=workloads.EPSILON,
        exploration_final_eps=workloads.EPSILON,
        max_grad_norm=workload.gradient_clip_norm or float("inf"),
        policy_kwargs={"net_arch": list(workload.units), **_optimizer(workload)},
        **common,
    )


def _sac(workload: workloads.Workload, common: dict[str, Any]) -> SAC:
    return SAC(
        tau=workloads.TARGET_UPDATE_TAU,
        ent_coef=f"auto_{workload.initial_alpha}",
        policy_kwargs={
            "net_arch": list(workload.units),
            "share_features_extractor": workload.is_atari,
            **_optimizer(workload),
        },
        **common,
    )
