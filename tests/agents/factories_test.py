"""Tests that numbers outside their ranges are refused before anything is built."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import time_step_spec

from pipeline import configuration
from pipeline.agents.a2c import create_a2c_agent
from pipeline.agents.dqn import create_dqn_agent
from pipeline.agents.impala import create_impala_agent
from pipeline.agents.nstep_q import create_nstep_q_agent
from pipeline.agents.ppo import create_ppo_agent
from pipeline.agents.sac import create_sac_agent
from pipeline.agents.trpo import create_trpo_agent
from pipeline.ops.schedules import as_schedule
from pipeline.utils.errors import UserError

DISCRETE = tensor_spec.BoundedTensorSpec((), tf.int32, 0, 1)
MOTOR = tensor_spec.BoundedTensorSpec((1,), tf.float32, -1.0, 1.0)
FACTORIES = {
    "dqn": create_dqn_agent,
    "nstep_q": create_nstep_q_agent,
    "a2c": create_a2c_agent,
    "impala": create_impala_agent,
    "ppo": create_ppo_agent,
    "trpo": create_trpo_agent,
    "sac": create_sac_agent,
}
ALL = list(FACTORIES)
ON_POLICY = ["a2c", "ppo", "trpo"]


def create(algorithm: str, **kwargs: Any) -> Any:
    return FACTORIES[algorithm](
        time_step_spec(tf.TensorSpec((3,), tf.float32)),
        MOTOR if algorithm == "sac" else DISCRETE,
        num_envs=1,
        seed=0,
        env_steps=tf.Variable(0, dtype=tf.int64),
        **kwargs,
    )


@pytest.mark.parametrize(
    ("algorithm", "name", "value"),
    [
        *((algorithm, "discount", 99) for algorithm in ALL),
        *((algorithm, "learning_rate", -1) for algorithm in ALL),
        *((algorithm, "gradient_clip_norm", -1.0) for algorithm in ALL),
        *((x, "accumulate_updates", value) for x in ALL for value in (0, -1, 1.0, 1.5, True)),
        *((algorithm, "gae_lambda", 95) for algorithm in ON_POLICY),
        ("impala", "trace_lambda", 95),
        ("impala", "rho_clip", 0.0),
        *((algorithm, "epsilon", value) for algorithm in ("dqn", "nstep_q") for value in (7, "a")),
        *((algorithm, "entropy_coefficient", -0.01) for algorithm in ("a2c", "ppo")),
        *((algorithm, "value_coefficient", None) for algorithm in ("a2c", "ppo")),
        *(("dqn", "target_update_tau", value) for value in (5.0, 0.0)),
        *(("dqn", "target_update_env_steps", value) for value in (0, 2.5)),
        *(("nstep_q", "target_update_env_steps", value) for value in (0, 2.5, None)),
        *(("trpo", "value_epochs", value) for value in (0, -4, None)),
        *(("trpo", "value_minibatch_size", value) for value in (0, -4, None)),
        ("sac", "target_update_tau", 5.0),
        ("sac", "initial_alpha", 0.0),
        ("ppo", "clip_ratio", -0.2),
        ("ppo", "value_clip", -0.2),
        ("dqn", "discount", None),
        ("dqn", "discount", float("nan")),
    ],
)
def test_a_number_out_of_its_range_is_refused(algorithm: str, name: str, value: Any) -> None:
    message = rf"^create_{algorithm}_agent.{name} = {value!r}: must be a (whole )?number"
    with pytest.raises(UserError, match=message):
        create(algorithm, **{name: value})


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ("dqn", "double_q"), ("dqn", "sum_losses"), ("nstep_q", "one_step"),
        *((algorithm, "normalize_returns") for algorithm in ON_POLICY),
    ],
)  # fmt: skip
def test_a_flag_is_true_or_false(algorithm: str, name: str) -> None:
    binding = f"create_{algorithm}_agent.{name} = 1"
    with pytest.raises(UserError, match=f"{binding}: must be True or False.$"):
        configuration.load([f"agents/{algorithm}"], [binding])


@pytest.mark.parametrize("algorithm", ALL)
def test_the_class_of_the_agent_can_be_chosen(algorithm: str) -> None:
    made = mock.Mock(spec=[])
    assert create(algorithm, agent_class=made) is made.return_value
    made.assert_called_once()


@pytest.mark.parametrize("name", ["actor_units", "critic_units"])
def test_a_layer_without_units_is_refused(name: str) -> None:
    message = re.escape(f"create_sac_agent.{name}[1] = 0: must be a whole number, at least 1.")
    with pytest.raises(UserError, match=message):
        create("sac", **{name: (8, 0)})


def test_limits_schedules_and_the_ends_of_ranges_are_taken() -> None:
    create("dqn", epsilon=1, discount=0, learning_rate=0.0, gradient_clip_norm=None)
    create("ppo", clip_ratio=as_schedule(0.1), value_clip=None, gae_lambda=0, discount=1.0)
