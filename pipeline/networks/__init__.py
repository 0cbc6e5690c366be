"""Observation encoders, heads, and the networks of the agents."""

from pipeline.networks.actor_critic import ActorCritic, ActorCriticPolicy
from pipeline.networks.encoders import (
    QNetwork,
    create_encoder,
    mlp_encoder,
    nature_cnn_encoder,
    small_cnn_encoder,
)
from pipeline.networks.heads import GaussianHead, QHead
from pipeline.networks.initializers import GlorotUniform, HeUniform, Orthogonal, TorchUniform
from pipeline.networks.sac_networks import ActorNetwork, ActorPolicy, CriticNetwork

__all__ = [
    "ActorCritic",
    "ActorCriticPolicy",
    "ActorNetwork",
    "ActorPolicy",
    "CriticNetwork",
    "GaussianHead",
    "GlorotUniform",
    "HeUniform",
    "Orthogonal",
    "QHead",
    "QNetwork",
    "TorchUniform",
    "create_encoder",
    "mlp_encoder",
    "nature_cnn_encoder",
    "small_cnn_encoder",
]
