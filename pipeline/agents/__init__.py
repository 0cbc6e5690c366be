"""Agents, with one module per algorithm; `agent.py` holds the interface to the train loop."""

from pipeline.agents.a2c import A2CAgent, create_a2c_agent
from pipeline.agents.agent import Agent, agent_factory
from pipeline.agents.dqn import DqnAgent, create_dqn_agent
from pipeline.agents.impala import ImpalaAgent, create_impala_agent
from pipeline.agents.nstep_q import NStepQAgent, create_nstep_q_agent
from pipeline.agents.ppo import PPOAgent, create_ppo_agent
from pipeline.agents.sac import SacAgent, create_sac_agent
from pipeline.agents.trpo import TRPOAgent, create_trpo_agent

__all__ = [
    "A2CAgent",
    "Agent",
    "DqnAgent",
    "ImpalaAgent",
    "NStepQAgent",
    "PPOAgent",
    "SacAgent",
    "TRPOAgent",
    "agent_factory",
    "create_a2c_agent",
    "create_dqn_agent",
    "create_impala_agent",
    "create_nstep_q_agent",
    "create_ppo_agent",
    "create_sac_agent",
    "create_trpo_agent",
]
