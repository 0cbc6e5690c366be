"""Observation encoders, heads, and the networks of the agents.

actor_critic.py    network and policy of the on-policy agents
encoder_checks.py  checks of the encoders' parameters and of layers that users write
encoders.py        encoders by observation spec, and the networks that hold them
heads.py           heads for Q-values, state values and policies
initializers.py    kernel and bias initialisers
layers.py          Keras layers that prepare observations
sac_networks.py    actor and critics of SAC
summary.py         summary of an agent's networks, layer by layer
"""
