"""Policies, and the collect driver and the evaluator that run them."""

from pipeline.acting.collect_driver import Carry, CollectDriver, initial_carry
from pipeline.acting.episode_statistics import EpisodeStatistics
from pipeline.acting.evaluation import Evaluator, record_video
from pipeline.acting.policies import EpsilonGreedyPolicy, GreedyPolicy, RandomPolicy, SampledPolicy

__all__ = [
    "Carry",
    "CollectDriver",
    "EpisodeStatistics",
    "EpsilonGreedyPolicy",
    "Evaluator",
    "GreedyPolicy",
    "RandomPolicy",
    "SampledPolicy",
    "initial_carry",
    "record_video",
]
