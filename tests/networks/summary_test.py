"""Tests of the summary of networks."""

import re

import numpy as np
import pytest
import tensorflow as tf
from numpy_references import FOUR_ACTIONS, TWO_MOTORS, env_steps, specs
from tf_agents.specs import tensor_spec

from pipeline.agents.dqn import create_dqn_agent
from pipeline.agents.ppo import create_ppo_agent
from pipeline.agents.sac import create_sac_agent
from pipeline.networks.encoders import create_encoder
from pipeline.networks.summary import summarize

FRAMES = tensor_spec.BoundedTensorSpec((4, 84, 84), tf.uint8, 0, 255)
NESTED = {
    "picture": tensor_spec.BoundedTensorSpec((8, 8, 3), tf.uint8, 0, 255),
    "speed": TWO_MOTORS,
}


def agent_and_summary(creator, observation_spec, action_spec):
    agent = creator(specs(observation_spec), action_spec, num_envs=1, seed=0, env_steps=env_steps())
    return agent, summarize(agent.trained, observation_spec)


def test_what_has_no_weights_is_left_out():
    encoder = create_encoder(TWO_MOTORS, of_vectors=lambda: [])
    encoder(tf.zeros([1, 2]))
    assert summarize({"encoder": encoder}, TWO_MOTORS) == ""


def numbers(text):
    """Returns the numbers of weights at the ends of lines, by the depth of the line."""
    found = re.findall(r"^( *).*?([\d,]+)$", text, re.MULTILINE)
    return [(len(indent), int(number.replace(",", ""))) for indent, number in found]


@pytest.mark.parametrize(
    ("creator", "observation_spec", "action_spec"),
    [
        (create_dqn_agent, FRAMES, FOUR_ACTIONS),
        (create_ppo_agent, NESTED, FOUR_ACTIONS),
        (create_ppo_agent, TWO_MOTORS, TWO_MOTORS),
        (create_sac_agent, NESTED, TWO_MOTORS),
    ],
)
def test_the_weights_of_all_layers_are_those_of_the_networks(
    creator, observation_spec, action_spec
):
    agent, text = agent_and_summary(creator, observation_spec, action_spec)
    weights = [
        sum(int(np.prod(v.shape)) for v in network.trainable_variables)
        for network in agent.trained.values()
    ]
    found = numbers(text)
    assert [number for depth, number in found if depth == 0] == weights
    alpha = 1 if "alpha" in agent.trained else 0  # a weight that belongs to no layer
    assert sum(number for depth, number in found if depth > 0) == sum(weights) - alpha


def test_shapes_are_those_of_the_nature_network():
    _, text = agent_and_summary(create_dqn_agent, FRAMES, FOUR_ACTIONS)
    for line in (
        r"Conv2D +\(20, 20, 32\) +8,224",
        r"Conv2D +\(9, 9, 64\) +32,832",
        r"Conv2D +\(7, 7, 64\) +36,928",
        r"Dense +\(512,\) +1,606,144",
        r"Dense +\(4,\) +2,052",
    ):
        assert re.search(line, text), text
