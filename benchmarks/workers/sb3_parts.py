"""Creates environments and algorithms as users of Stable-Baselines3 do, for `sb3_worker`."""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium
import torch
import works
from sb3_contrib import TRPO
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.atari_wrappers import ClipRewardEnv, MaxAndSkipEnv, WarpFrame
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecTransposeImage

gymnasium.register_envs(ale_py)

_REPLAY_SHARE = 0.5  # of the machine's memory


def make_env(work: works.Work, num_envs: int) -> VecEnv:
    """Creates environments with `make_atari_env` or `make_vec_env`.

    They are in one process and stepped one after another.
    """
    if not work.is_atari:
        return make_vec_env(work.environment, num_envs, works.SEED)
    emulator = {
        "frameskip": 1,
        "repeat_action_probability": 0.0 if work.openai_protocol else 0.25,
        "full_action_space": False,
    }
    if work.continuous:
        emulator["continuous"] = True
        env = make_vec_env(
            work.environment, num_envs, works.SEED, env_kwargs=emulator, wrapper_class=_continuous
        )
    else:
        game_only = {"noop_max": 0, "terminal_on_life_loss": False}
        wrapper = {} if work.openai_protocol else game_only
        env = make_atari_env(
            work.environment, num_envs, works.SEED, env_kwargs=emulator, wrapper_kwargs=wrapper
        )
    return VecTransposeImage(VecFrameStack(env, works.FRAME_STACK))


def _continuous(env: gymnasium.Env) -> gymnasium.Env:
    """Wraps an environment as `AtariWrapper` does, but without no-ops and FIRE at the start.

    These need discrete actions.
    """
    return ClipRewardEnv(WarpFrame(MaxAndSkipEnv(env, works.FRAME_SKIP)))


def create_model(work: works.Work, num_envs: int) -> BaseAlgorithm:
    """Creates the algorithm with the hyperparameters of the work and SB3's other defaults."""
    common = {
        "policy": "CnnPolicy" if work.is_atari else "MlpPolicy",
        "env": make_env(work, num_envs),
        "learning_rate": work.learning_rate,
        "gamma": works.DISCOUNT,
        "seed": works.SEED,
        "device": "cpu",
    }
    create = {"dqn": _dqn, "sac": _sac, "ppo": _ppo, "a2c": _a2c, "trpo": _trpo}[work.algorithm]
    experience = _rollout(work) if work.uses_rollouts else _replay(work, num_envs)
    return create(work, common | experience)


def _replay(work: works.Work, num_envs: int) -> dict[str, Any]:
    capacity = work.replay_capacity
    if work.is_atari:
        capacity = min(capacity, works.stacks_in_memory(_REPLAY_SHARE))
    return {
        "batch_size": work.batch_size,
        "buffer_size": capacity,
        "optimize_memory_usage": work.is_atari,
        "replay_buffer_kwargs": {"handle_timeout_termination": not work.is_atari},
        "learning_starts": work.warm_up,
        "train_freq": (work.vector_steps(num_envs), "step"),
        "gradient_steps": work.updates(num_envs),
    }


def _rollout(work: works.Work) -> dict[str, Any]:
    """Returns the arguments of the algorithms that learn from rollouts."""
    return {
        "n_steps": work.rollout_steps,
        "gae_lambda": work.gae_lambda,
        "policy_kwargs": {
            "net_arch": {"pi": list(work.units), "vf": list(work.units)},
            **_optimizer(work),
        },
    }


def _optimizer(work: works.Work) -> dict[str, Any]:
    if work.optimizer == "Adam":
        return {
            "optimizer_class": torch.optim.Adam,
            "optimizer_kwargs": {"eps": work.optimizer_epsilon},
        }
    return {
        "optimizer_class": RMSpropTFLike,
        "optimizer_kwargs": {"eps": work.optimizer_epsilon, "alpha": works.RMSPROP_DECAY},
    }


def _losses(work: works.Work) -> dict[str, Any]:
    return {
        "ent_coef": work.entropy_coefficient,
        "vf_coef": work.value_coefficient,
        "max_grad_norm": work.gradient_clip_norm,
    }


def _ppo(work: works.Work, common: dict[str, Any]) -> PPO:
    return PPO(
        batch_size=work.batch_size,
        n_epochs=work.num_epochs,
        clip_range=work.clip_ratio,
        **_losses(work),
        **common,
    )


def _a2c(work: works.Work, common: dict[str, Any]) -> A2C:
    return A2C(**_losses(work), **common)


def _trpo(work: works.Work, common: dict[str, Any]) -> TRPO:
    return TRPO(
        target_kl=works.MAX_KL,
        cg_max_steps=work.cg_iterations,
        cg_damping=work.cg_damping,
        line_search_max_iter=works.LINE_SEARCH_STEPS,
        line_search_shrinking_factor=works.LINE_SEARCH_SHRINK,
        n_critic_updates=work.value_epochs,
        batch_size=work.value_batch_size,
        **common,
    )


def _dqn(work: works.Work, common: dict[str, Any]) -> DQN:
    return DQN(
        target_update_interval=work.target_update_period * work.env_steps_per_update,
        exploration_initial_eps=works.EPSILON,
        exploration_final_eps=works.EPSILON,
        max_grad_norm=work.gradient_clip_norm or float("inf"),
        policy_kwargs={"net_arch": list(work.units), **_optimizer(work)},
        **common,
    )


def _sac(work: works.Work, common: dict[str, Any]) -> SAC:
    return SAC(
        tau=works.TARGET_UPDATE_TAU,
        ent_coef=f"auto_{work.initial_alpha}",
        policy_kwargs={
            "net_arch": list(work.units),
            "share_features_extractor": work.is_atari,
            **_optimizer(work),
        },
        **common,
    )
