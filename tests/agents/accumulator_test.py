"""Tests that the gradients of k batches make the same update as one batch of all their rows."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import combinations
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    LAST,
    MID,
    TWO_MOTORS,
    Array,
    as_float32,
    assert_close,
    assert_same,
    bound,
    env_steps,
    random_events,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from tf_agents.trajectories import Trajectory, restart
from tiny_runs import variables

from pipeline.agents.a2c import create_a2c_agent
from pipeline.agents.accumulator import Accumulator
from pipeline.agents.agent import Agent
from pipeline.agents.dqn import create_dqn_agent
from pipeline.agents.nstep_q import create_nstep_q_agent
from pipeline.agents.ppo import create_ppo_agent
from pipeline.agents.q_learning import squared_loss
from pipeline.agents.sac import create_sac_agent
from pipeline.checkpointing.saveables import Variables
from pipeline.ops.optimizers import Adam, RMSprop

SGD = tf.keras.optimizers.legacy.SGD
ROWS, BATCHES = 6, 4
AGENTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dqn": (create_dqn_agent, FOUR_ACTIONS, {"n_step": 2, "target_update_period": 1}),
    "dqn, summed": (
        create_dqn_agent,
        FOUR_ACTIONS,
        {"sum_losses": True, "target_update_period": 1},
    ),
    "nstep_q": (create_nstep_q_agent, FOUR_ACTIONS, {}),
    "ppo": (create_ppo_agent, FOUR_ACTIONS, {"normalize_advantages": "rollout"}),
    "ppo, continuous": (create_ppo_agent, TWO_MOTORS, {"normalize_advantages": None}),
    "a2c": (create_a2c_agent, FOUR_ACTIONS, {}),
    "sac": (create_sac_agent, TWO_MOTORS, {"actor_units": (5,), "critic_units": (5,)}),
}


def create(name: str, **kwargs: Any) -> Agent:
    constructor, action_spec, settings = AGENTS[name]
    given = {"num_envs": 1, "seed": 4, "env_steps": env_steps(), "learning_rate": 0.05}
    # The norm is small enough to clip, so that clipping too early or too often would show.
    given |= {"optimizer": SGD, "gradient_clip_norm": 0.05} | settings | kwargs
    tf.keras.utils.set_random_seed(1)  # makes target networks equal
    with bound({"mlp_encoder.units": (5,)}):
        agent = constructor(specs(), action_spec, **given)
    rng = np.random.default_rng(7)
    randomize(rng, tf.nest.flatten(agent.gradient_variables()))
    return agent


def batch_for(name: str, agent: Agent, num_rows: int, seed: int = 0) -> Trajectory:
    """Returns rows that include boundary rows; the whole third batch consists of them."""
    rng = np.random.default_rng(seed)
    length = agent.train_sequence_length
    starts = rng.choice([FIRST, MID, LAST], num_rows, p=[0.3, 0.4, 0.3])
    starts[2 * ROWS : 3 * ROWS] = LAST
    starts[0] = MID
    events = random_events(rng, (num_rows, length))
    rows = random_sequences(rng, AGENTS[name][1], events, starts)
    info = tf.nest.map_structure(
        lambda _: as_float32(rng.normal(scale=0.5, size=(num_rows, length))),
        agent.training_data_spec.policy_info,
    )
    return rows.replace(policy_info=info)


def part(batch: Trajectory, index: int) -> Trajectory:
    rows = slice(index * ROWS, (index + 1) * ROWS)
    return tensors(tf.nest.map_structure(lambda x: x[rows], batch))


def weights(agent: Agent) -> list[Array]:
    return values_of(tf.nest.flatten(agent.gradient_variables()))


def train_once(whole: Agent, parts: Agent, batch: Trajectory) -> None:
    """Trains `whole` on the whole batch and `parts` on its parts, for one update each."""
    whole.train(tensors(batch), tf.ones(BATCHES * ROWS))
    for i in range(BATCHES):
        parts.train(part(batch, i), tf.ones(ROWS))


@pytest.mark.parametrize(
    ("name", "optimizer", "clip"),
    # Without clipping, a wrong scale shows; the other optimizers are those of the ready configs.
    [
        pytest.param(name, SGD, clip, marks=pytest.mark.crash)
        for name in AGENTS
        for clip in (None, 0.05)
    ]
    + [("dqn", Adam, 0.05), ("a2c", RMSprop, 0.05)]
    + [pytest.param(name, Adam, 0.05, marks=pytest.mark.crash) for name in ("ppo", "sac")]
    + [pytest.param("nstep_q", RMSprop, 0.05, marks=pytest.mark.crash)],
)
def test_k_batches_make_the_update_of_one_batch_of_all_their_rows(
    name: str, optimizer, clip: float | None
) -> None:
    settings = {"optimizer": optimizer, "gradient_clip_norm": clip}
    whole, parts = create(name, **settings), create(name, **settings, accumulate_updates=BATCHES)
    before = weights(whole)
    assert_same(weights(parts), before)
    train_whole = tf.function(whole.train, autograph=False)
    train_part = tf.function(parts.train, autograph=False)
    for update in range(2):
        batch = batch_for(name, whole, BATCHES * ROWS, seed=update)
        train_whole(tensors(batch), tf.ones(BATCHES * ROWS))
        for i in range(BATCHES):
            held = weights(parts)
            train_part(part(batch, i), tf.ones(ROWS))
            if i < BATCHES - 1:
                assert_same(weights(parts), held)
                assert parts.train_step_counter == update
        assert parts.train_step_counter == update + 1
        tolerance = 1e-6 if optimizer is SGD else 1e-4  # the others divide by the size of gradients
        assert_close(weights(parts), weights(whole), tolerance)
    assert max(np.abs(x - y).max() for x, y in zip(weights(whole), before, strict=True)) > 1e-3
    assert train_part.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("name", combinations(AGENTS, often=[("dqn, summed",), ("sac",)]))
def test_every_optimizer_is_handed_the_gradients_of_all_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the gradients to 1e-6, before the optimizer uses them."""
    handed: list[list[Array]] = []
    agents = [create(name, accumulate_updates=k) for k in (1, BATCHES)]
    for agent in agents:
        monkeypatch.setattr(agent, "apply", lambda x: handed.append(values_of(tf.nest.flatten(x))))
    batch = batch_for(name, agents[0], BATCHES * ROWS)
    train_once(agents[0], agents[1], batch)
    whole, parts = handed
    assert_close(parts, whole, 1e-6)
    assert max(np.abs(x).max() for x in whole) > 1e-2


def dyadic(rng: np.random.Generator, shape: Any) -> Array:
    """Returns small integers over 8, whose sums and products are exact in float32."""
    return as_float32(rng.integers(-8, 8, shape) / 8)


@pytest.mark.parametrize("name", ["dqn", "nstep_q"])
def test_where_sums_are_exact_so_is_the_update(name: str) -> None:
    agents = [
        create(name, td_loss=squared_loss, gradient_clip_norm=None, discount=0.5,
               learning_rate=0.125, accumulate_updates=k)
        for k in (1, BATCHES)
    ]  # fmt: skip
    rng = np.random.default_rng(3)
    values = [dyadic(rng, x.shape) for x in weights(agents[0])]
    for agent in agents:
        for variable, value in zip(agent.gradient_variables(), values, strict=True):
            variable.assign(value)
        if name == "dqn":
            agent.target_q_network.set_weights(values)
    batch = batch_for(name, agents[0], BATCHES * ROWS)
    # 4 valid rows in each batch make 16 together: dividing by a power of two is exact.
    batch.step_type[:, 0] = np.where(np.arange(BATCHES * ROWS) % ROWS < 4, MID, LAST)
    length = agents[0].train_sequence_length
    batch = batch.replace(
        observation=dyadic(rng, (BATCHES * ROWS, length, 3)),
        reward=dyadic(rng, (BATCHES * ROWS, length)),
        policy_info=tf.nest.map_structure(lambda x: dyadic(rng, x.shape), batch.policy_info),
    )
    train_once(agents[0], agents[1], batch)
    assert_same(weights(agents[0]), weights(agents[1]))
    assert any(np.any(x != y) for x, y in zip(weights(agents[0]), values, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.crash] * (", " in name))
        for name in AGENTS
        if name not in ("dqn", "nstep_q")
    ],
)
def test_one_valid_row_or_two_alike_make_the_very_bits_of_its_update(name: str) -> None:
    """Checks batches whose other rows add only zeros, or the first row's gradients once more."""
    whole, parts = create(name), create(name, accumulate_updates=BATCHES)
    batch = batch_for(name, whole, BATCHES * ROWS)
    batch.step_type[1:, 0] = LAST
    if name != "sac":  # its noise differs from row to row
        for leaf in tf.nest.flatten(batch):
            leaf[3 * ROWS] = leaf[0]
    before = weights(whole)
    train_once(whole, parts, batch)
    assert_same(weights(whole), weights(parts))
    assert any(np.any(x != y) for x, y in zip(weights(whole), before, strict=True))


def test_a_target_network_that_follows_steps_waits_for_the_next_update() -> None:
    steps = env_steps()
    period = {"target_update_period": None, "target_update_env_steps": 100}
    agent = create("dqn", env_steps=steps, accumulate_updates=2, **period)
    batch = batch_for("dqn", agent, 2 * ROWS)
    variables = agent.target_q_network.variables
    steps.assign(99)
    agent.train(part(batch, 0), tf.ones(ROWS))
    before = values_of(variables)
    steps.assign(100)
    agent.train(part(batch, 1), tf.ones(ROWS))
    assert_same(values_of(variables), before)
    updated = weights(agent)
    agent.train(part(batch, 0), tf.ones(ROWS))
    assert_same(values_of(variables), updated)


def test_a_target_network_waits_through_the_rollouts_of_an_update() -> None:
    steps = env_steps()
    agent = create("nstep_q", env_steps=steps, accumulate_updates=2, target_update_env_steps=100)
    rows = tf.nest.map_structure(lambda x: x[:, :1], batch_for("nstep_q", agent, ROWS))
    final = restart(tf.zeros([1, 3]), 1)

    def learn_from_a_rollout() -> None:
        prepared = agent.prepare(tensors(rows.replace(policy_info=())), final)
        agent.train(prepared, tf.ones(ROWS))

    variables = agent.target_q_network.variables
    learn_from_a_rollout()
    before = values_of(variables)
    steps.assign(100)
    learn_from_a_rollout()
    assert_same(values_of(variables), before)
    updated = weights(agent)
    learn_from_a_rollout()
    assert_same(values_of(variables), updated)


def test_the_target_network_moves_only_with_an_update() -> None:
    agent = create("dqn", accumulate_updates=2)
    batch = batch_for("dqn", agent, 2 * ROWS)
    target = values_of(agent.target_q_network.variables)
    agent.train(part(batch, 0), tf.ones(ROWS))
    assert_same(values_of(agent.target_q_network.variables), target)
    agent.train(part(batch, 1), tf.ones(ROWS))
    assert_same(values_of(agent.target_q_network.variables), weights(agent))


def test_what_is_left_of_a_rollout_waits_for_the_next_one() -> None:
    agent = create("ppo", accumulate_updates=2)
    batch = batch_for("ppo", agent, BATCHES * ROWS)
    updates = []
    for i in (0, 1, 3, 0):
        agent.train(part(batch, i), tf.ones(ROWS))
        agent.finish(part(batch, i))
        updates.append(int(agent.train_step_counter))
    assert updates == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "name",
    [
        "dqn",
        "sac",  # has an optimizer for each of its networks
        *(pytest.param(name, marks=pytest.mark.crash) for name in ("nstep_q", "a2c", "ppo")),
    ],
)
def test_a_checkpoint_holds_a_half_filled_accumulator(name: str, tmp_path: pathlib.Path) -> None:
    # Clipping would hide a wrong divisor.
    settings = {"accumulate_updates": BATCHES, "gradient_clip_norm": None}
    agent, restored = (create(name, **settings) for _ in range(2))
    batch = batch_for(name, agent, BATCHES * ROWS)
    for i in range(2):
        agent.train(part(batch, i), tf.ones(ROWS))
    Variables(agent=agent).save(tmp_path)
    Variables(agent=restored).restore(tmp_path)
    for i in range(2, BATCHES):
        agent.train(part(batch, i), tf.ones(ROWS))
        restored.train(part(batch, i), tf.ones(ROWS))
    assert agent.train_step_counter == restored.train_step_counter == 1
    assert_same(variables(agent), variables(restored))


def test_more_sums_than_batches_are_applied_at_once(tmp_path: pathlib.Path) -> None:
    """Tests an inexact resume with a lower `accumulate_updates`, where noise is drawn for each."""
    agent, restored = create("sac", accumulate_updates=4), create("sac", accumulate_updates=2)
    batch = batch_for("sac", agent, 4 * ROWS)
    for i in range(3):
        agent.train(part(batch, i), tf.ones(ROWS))
    Variables(agent=agent).save(tmp_path)
    Variables(agent=restored).restore(tmp_path)
    restored.train(part(batch, 3), tf.ones(ROWS))
    assert restored.train_step_counter == 1


def test_variables_without_a_gradient_stay_without() -> None:
    seen: list[Any] = []
    accumulator = Accumulator([tf.Variable([1.0, 2.0]), tf.Variable(3.0)], 2)
    for rows, gradient in ((1.0, [4.0, 0.0]), (3.0, [0.0, 4.0])):
        accumulator.add([tf.constant(gradient), None], tf.constant(rows), seen.append)
    (applied,) = seen
    assert applied[1] is None
    assert_same(applied[0], as_float32([1.0, 3.0]))


def test_batches_without_a_valid_row_give_no_gradient() -> None:
    seen: list[Any] = []
    accumulator = Accumulator([tf.Variable(1.0)], 2)
    for _ in range(2):
        accumulator.add([tf.constant(5.0)], tf.constant(0.0), seen.append)
    assert seen[0][0] == 0.0
