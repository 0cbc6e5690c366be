"""Adapts vector environments of gymnasium and the ALE to TF-Agents, with exact restore."""

from pipeline.environments.atari import atari_environment
from pipeline.environments.deepmind_atari import deepmind_atari_environment
from pipeline.environments.gymnasium_envs import gymnasium_environment
from pipeline.environments.training_environment import TrainingEnvironment
from pipeline.environments.vector_environment import VectorEnvironment
from pipeline.environments.vectors import GymnasiumVector, Vector
from pipeline.environments.watchdog import Watchdog, watched

__all__ = [
    "GymnasiumVector",
    "TrainingEnvironment",
    "Vector",
    "VectorEnvironment",
    "Watchdog",
    "atari_environment",
    "deepmind_atari_environment",
    "gymnasium_environment",
    "watched",
]
