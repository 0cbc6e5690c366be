"""Stores collected experience in a replay buffer or a rollout, behind one interface."""

from pipeline.replay.block_replay_buffer import BlockReplayBuffer
from pipeline.replay.experience import Experience
from pipeline.replay.replay_buffer import ReplayBuffer
from pipeline.replay.rollout import Rollout

__all__ = [
    "BlockReplayBuffer",
    "Experience",
    "ReplayBuffer",
    "Rollout",
]
