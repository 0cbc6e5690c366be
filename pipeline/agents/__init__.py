"""Agents, with one module per algorithm; `agent.py` holds the interface to the train loop.

Importing this package registers everything that gin can bind in an agent.
"""

from pipeline.agents import a2c, dqn, impala, nstep_q, ppo, sac, trpo

__all__ = ["a2c", "dqn", "impala", "nstep_q", "ppo", "sac", "trpo"]
