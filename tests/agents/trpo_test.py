"""Tests of TRPO against an explicit Fisher matrix, a direct solver and its constraints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import combinations
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    GO_ON,
    LAST,
    MID,
    PIXELS,
    THREE_NUMBERS,
    TWO_MOTORS,
    Array,
    as_float32,
    as_float64,
    assert_close,
    assert_same,
    bound,
    each_action_spec,
    env_steps,
    random_leaf,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from tf_agents.trajectories import Trajectory

from pipeline.agents.trpo import TRPOAgent, create_trpo_agent
from pipeline.networks.actor_critic import OnPolicyInfo
from pipeline.networks.heads import GaussianHead
from pipeline.ops.natural_gradient import (
    TrustRegion,
    conjugate_gradient,
    fisher_vector_product,
    flatten,
    line_search,
    unflatten,
)
from pipeline.ops.randomness import permutations, stateless_seed, stream_key
from pipeline.ops.schedules import linear_schedule
from pipeline.utils.errors import UserError

ROWS = 40
SGD = tf.keras.optimizers.legacy.SGD


def create(
    action_spec=FOUR_ACTIONS,
    seed: int = 7,
    region=None,
    observation_spec=THREE_NUMBERS,
    **kwargs: Any,
) -> TRPOAgent:
    given = {"num_envs": 1, "seed": 0, "env_steps": env_steps(), "optimizer": SGD} | kwargs
    region = {f"TrustRegion.{name}": value for name, value in (region or {}).items()}
    networks: dict[str, Any] = {"mlp_encoder.units": (3,), "small_cnn_encoder.units": (3,)}
    networks |= {"small_cnn_encoder.filters": ((2, 3, 2),), "ActorCritic.share_encoder": False}
    with bound(networks | region):
        agent = create_trpo_agent(specs(observation_spec), action_spec, **given)
    randomize(np.random.default_rng(seed), agent.actor_critic.trainable_variables)
    return agent


def rollout(agent: TRPOAgent, action_spec, seed: int = 0) -> tuple[Trajectory, Array]:
    """Returns prepared rows [ROWS, 1] of the agent's policy, and a mask of the transitions."""
    rng = np.random.default_rng(seed)
    starts = rng.choice([FIRST, MID, LAST], ROWS)
    rows = random_sequences(rng, action_spec, np.full((ROWS, 1), GO_ON), starts)
    valid = starts != LAST
    advantage = rng.normal(size=ROWS)
    advantage = (advantage - advantage[valid].mean()) / advantage[valid].std()
    distribution, value = agent.actor_critic(tf.constant(rows.observation[:, 0]))
    action = distribution.sample(seed=[seed, 1]).numpy()
    info = OnPolicyInfo(
        distribution.log_prob(action).numpy()[:, None],
        value.numpy()[:, None],
        as_float32(advantage)[:, None],
        as_float32(rng.normal(size=(ROWS, 1))),
    )
    return rows.replace(action=action[:, None], policy_info=info), valid


def assign(variables: Sequence[tf.Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def policy_parameters(agent: TRPOAgent, observation: Array) -> tuple[Array, Array | None]:
    """Returns probabilities [B, n], or means [B, A] and standard deviations, in float64."""
    distribution = agent.actor_critic.distribution(tf.constant(observation))
    if isinstance(agent.actor_critic.policy_head, GaussianHead):
        normal = distribution.distribution
        return as_float64(normal.loc), as_float64(normal.scale)
    logits = as_float64(distribution.logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True), None


def mean_kl(old: tuple[Array, Array | None], new: tuple[Array, Array | None]) -> float:
    if old[1] is None:
        each = np.sum(old[0] * np.log(old[0] / new[0]), -1)
    else:
        assert new[1] is not None
        squares = (old[1] ** 2 + (old[0] - new[0]) ** 2) / (2 * new[1] ** 2)
        each = np.sum(np.log(new[1] / old[1]) + squares - 0.5, -1)
    return float(each.mean())


def explicit_fisher(agent: TRPOAgent, observation: Array) -> Array:
    """Returns the mean over states of the expected outer product of grad log pi, [n, n]."""
    variables = agent.policy_variables
    probabilities, std = policy_parameters(agent, observation)
    with tf.GradientTape() as tape:
        distribution = agent.actor_critic.distribution(tf.constant(observation))
        if std is None:
            outputs = tf.nn.log_softmax(distribution.logits)
        else:
            outputs = distribution.distribution.loc
    blocks = tape.jacobian(outputs, variables, unconnected_gradients="zero")
    # [B, outputs, n]
    jacobian = np.concatenate([as_float64(b).reshape(*outputs.shape, -1) for b in blocks], -1)
    weights = probabilities if std is None else std**-2.0
    fisher = np.einsum("bin,bi,bim->nm", jacobian, weights, jacobian) / len(observation)
    if std is not None:  # the second derivative with respect to each log std is 2
        names = [v is agent.actor_critic.policy_head.log_std for v in variables]
        sizes = [v.shape.num_elements() for v in variables]
        fisher += np.diag(2.0 * np.repeat(names, sizes))
    return fisher


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 8))
def test_conjugate_gradient_solves_as_numpy_does(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size))
    matrix = as_float32(root @ root.T + np.eye(size))
    b = as_float32(rng.normal(size=size))
    found = conjugate_gradient(
        lambda v: tf.linalg.matvec(matrix, v), tf.constant(b), 3 * size, 1e-12
    )
    assert_close(found, np.linalg.solve(as_float64(matrix), as_float64(b)), 1e-3)


def test_conjugate_gradient_solves_however_small_the_right_hand_side_is() -> None:
    matrix = as_float32(np.diag([1.0, 4.0]))
    b = as_float32([1e-6, 2e-6])
    found = conjugate_gradient(lambda v: tf.linalg.matvec(matrix, v), tf.constant(b), 9)
    np.testing.assert_allclose(found, [1e-6, 0.5e-6], rtol=1e-4)


def test_conjugate_gradient_ends_after_its_iterations() -> None:
    matrix, b = as_float32(np.diag([1.0, 4.0])), as_float32([1.0, 2.0])
    found = conjugate_gradient(lambda v: tf.linalg.matvec(matrix, v), tf.constant(b), 1)
    assert_close(found, 5 / 17 * b)


def test_conjugate_gradient_of_nothing_is_nothing() -> None:
    assert_same(conjugate_gradient(lambda v: v, tf.zeros(3), 5), np.zeros(3, np.float32))


def test_flat_vectors_take_their_shapes_again() -> None:
    variables = [tf.Variable(tf.random.stateless_normal(s, [1, 2])) for s in ([2, 3], [4], [])]
    assert_same(unflatten(flatten(variables), variables), values_of(variables))


@each_action_spec
@pytest.mark.parametrize(
    ("damping", "observation_spec"),
    [
        pytest.param(0.0, THREE_NUMBERS, marks=pytest.mark.crash),
        (0.3, THREE_NUMBERS),
        (0.3, PIXELS),
    ],
)
def test_fisher_vector_products_equal_an_explicit_matrix(
    action_spec, damping: float, observation_spec
) -> None:
    agent = create(action_spec, observation_spec=observation_spec)
    rng = np.random.default_rng(1)
    observation = random_leaf(rng, observation_spec, (9,))
    old = agent.actor_critic.distribution(tf.constant(observation))

    def divergence() -> tf.Tensor:
        new = agent.actor_critic.distribution(tf.constant(observation))
        return tf.reduce_mean(old.kl_divergence(new))

    fisher = explicit_fisher(agent, observation)
    matrix = fisher + damping * np.eye(len(fisher))
    for _ in range(3):
        vector = as_float32(rng.normal(size=len(fisher)))
        product = fisher_vector_product(
            divergence, agent.policy_variables, tf.constant(vector), damping
        )
        assert_close(product, matrix @ vector, 1e-4)


@pytest.mark.parametrize(
    ("action_spec", "fraction"),
    combinations(
        (FOUR_ACTIONS, TWO_MOTORS), (1.0, 0.4), often=[(FOUR_ACTIONS, 1.0), (TWO_MOTORS, 0.4)]
    ),
)
def test_the_step_is_the_natural_gradient_shortened(action_spec, fraction: float) -> None:
    region = {"cg_iterations": 60, "cg_damping": 0.1, "max_kl": 0.02, "fisher_fraction": fraction}
    agent = create(action_spec, region=region)
    rows, valid = rollout(agent, action_spec)
    observation = rows.observation[:, 0]
    advantage = rows.policy_info.advantage[:, 0]
    with tf.GradientTape() as tape:
        log_prob = agent.actor_critic.distribution(observation).log_prob(rows.action[:, 0])
        surrogate = tf.reduce_mean((log_prob * advantage)[valid])
    gradient = as_float64(flatten(tape.gradient(surrogate, agent.policy_variables)))
    first = slice(round(fraction * ROWS))
    fisher = explicit_fisher(agent, observation[first][valid[first]])
    matrix = fisher + 0.1 * np.eye(len(fisher))
    direction = np.linalg.solve(matrix, gradient)
    longest = np.sqrt(2 * 0.02 / (direction @ matrix @ direction)) * direction
    before = as_float64(flatten(agent.policy_variables))
    old = policy_parameters(agent, observation[valid])
    extra = agent.train(tensors(rows), tf.ones(ROWS)).extra
    assert extra["accepted"] == 1.0
    taken = float(extra["step_fraction"])
    moved = as_float64(flatten(agent.policy_variables)) - before
    assert_close(moved, taken * longest, 1e-3)
    assert any(abs(taken - 0.8**i) < 1e-6 for i in range(10))
    # The previous try, if any, exceeded the bound; there is one if only few states are used.
    assert taken < 1 or fraction == 1.0 or action_spec is FOUR_ACTIONS
    if taken < 1:
        longer = unflatten(as_float32(before + taken / 0.8 * longest), agent.policy_variables)
        assign(agent.policy_variables, longer)
        assert mean_kl(old, policy_parameters(agent, observation[valid])) > 0.02


@pytest.fixture(scope="module", params=[FOUR_ACTIONS, TWO_MOTORS], ids=["discrete", "continuous"])
def traced(request):
    """Returns an agent that tests share, its traced `train`, its first values and action spec."""
    agent = create(request.param, region={"max_kl": 0.05, "cg_damping": 1e-3})
    train = tf.function(agent.train, autograph=False)
    return agent, train, values_of(agent.variables), request.param


def test_accepted_steps_improve_within_the_bound(traced) -> None:
    agent, train, initial, action_spec = traced
    for offset in (0.0, 2.0):  # with 2 the surrogate is not 0 before the step
        assign(agent.variables, initial)
        for seed in range(6):
            rows, valid = rollout(agent, action_spec, seed)
            rows.policy_info.advantage[:] += offset
            check_accepted_step(agent, rows, valid, train)


def check_accepted_step(agent: TRPOAgent, rows: Trajectory, valid: Array, train: Any) -> None:
    observation = rows.observation[:, 0]
    old = policy_parameters(agent, observation[valid])
    extra = train(tensors(rows), tf.ones(ROWS)).extra
    assert extra["accepted"] == 1.0
    kl = mean_kl(old, policy_parameters(agent, observation[valid]))
    assert 0.0 < kl <= 0.05 * (1 + 1e-4)
    assert_close(extra["kl"], kl, 1e-4)
    advantage = rows.policy_info.advantage[:, 0]
    log_prob = agent.actor_critic.distribution(observation).log_prob(rows.action[:, 0])
    ratio = np.exp(log_prob - rows.policy_info.log_probability[:, 0])
    improvement = np.mean((ratio * advantage)[valid]) - np.mean(advantage[valid])
    assert improvement > 0
    assert_close(extra["surrogate"], improvement, 1e-4)


@pytest.mark.parametrize(
    ("improvement", "kl", "tries"),
    [
        (lambda x: 1.0, lambda x: x, 7),  # 0.8^6 is the first value within the bound of 0.3
        (lambda x: 0.5 - x, lambda x: 0.0, 5),  # 0.8^4 is the first value below a half
        (lambda x: 0.5 - x, lambda x: x, 7),
        (lambda x: 0.0, lambda x: 0.0, None),
        (lambda x: 1.0, lambda x: 0.31, None),
    ],
)
def test_the_search_ends_with_the_first_step_that_improves_within_the_bound(
    improvement: Any, kl: Any, tries: int | None
) -> None:
    variables = [tf.Variable([[1.0, 2.0], [3.0, 4.0]]), tf.Variable([5.0, 6.0])]
    before = flatten(variables)
    longest, seen = tf.one_hot(4, len(before)), []

    def evaluate() -> tuple[tf.Tensor, tf.Tensor]:
        seen.append((flatten(variables) - before)[4])
        return tf.constant(improvement(seen[-1])), tf.constant(kl(seen[-1]))

    outcome = line_search(TrustRegion(max_kl=0.3), variables, longest, evaluate)
    assert_close(seen, [0.8**i for i in range(tries or 10)])
    assert outcome.accepted == (tries is not None)
    assert_close(outcome.fraction, seen[-1] if tries else 0.0)
    assert_same(flatten(variables), before + outcome.fraction * longest)


@pytest.mark.parametrize(
    "action_spec", combinations((FOUR_ACTIONS, TWO_MOTORS), often=[(FOUR_ACTIONS,)])
)
def test_a_rejected_step_leaves_the_weights_untouched(action_spec) -> None:
    # The Fisher matrix is computed from states of zeros, so that along the other weights the step
    # is far too long, and two tries cannot shorten it enough.
    region = {"fisher_fraction": 0.1, "cg_damping": 1e-4, "line_search_steps": 2}
    agent = create(action_spec, region=region)
    rows, _ = rollout(agent, action_spec)
    rows.observation[: ROWS // 10] = 0.0
    rows.step_type[: ROWS // 10] = MID
    rows.observation[ROWS // 10 :] *= 100.0
    before = values_of(agent.policy_variables)
    value_before = values_of(agent.gradient_variables())
    extra = tf.function(agent.train, autograph=False)(tensors(rows), tf.ones(ROWS)).extra
    assert extra["accepted"] == 0.0
    assert extra["kl"] == extra["surrogate"] == extra["step_fraction"] == 0.0
    assert_same(values_of(agent.policy_variables), before)
    assert any(
        np.any(x != y)
        for x, y in zip(values_of(agent.gradient_variables()), value_before, strict=True)
    )


def test_without_advantages_nothing_moves() -> None:
    agent = create()
    rows, _ = rollout(agent, FOUR_ACTIONS)
    info = rows.policy_info._replace(advantage=np.zeros((ROWS, 1), np.float32))
    before = values_of(agent.policy_variables)
    assert (
        agent.train(tensors(rows.replace(policy_info=info)), tf.ones(ROWS)).extra["accepted"] == 0
    )
    assert_same(values_of(agent.policy_variables), before)


def test_boundary_rows_never_enter(traced) -> None:
    agent, train, initial, action_spec = traced
    assign(agent.variables, initial)
    rows, valid = rollout(agent, action_spec)
    assert not valid.all()
    train(tensors(rows), tf.ones(ROWS))
    trained = values_of(agent.actor_critic.trainable_variables)
    info = tf.nest.map_structure(
        lambda x: np.where(valid[:, None], x, np.float32(3.0)), rows.policy_info
    )
    garbage = np.where(valid[:, None, None], rows.observation, np.float32(5.0))
    assign(agent.variables, initial)
    train(tensors(rows.replace(observation=garbage, policy_info=info)), tf.ones(ROWS))
    assert_same(values_of(agent.actor_critic.trainable_variables), trained)


def test_the_value_function_learns_by_minibatches() -> None:
    agent = create(value_epochs=3, value_minibatch_size=12, learning_rate=0.05)
    train, (rows, _) = tf.function(agent.train, autograph=False), rollout(agent, FOUR_ACTIONS)
    losses = [float(train(tensors(rows), tf.ones(ROWS)).extra["value_loss"]) for _ in range(15)]
    # Three epochs of 40 // 12 minibatches, and a step of the policy unless it is rejected.
    assert 15 * 3 * 3 < agent.train_step_counter <= 15 * (1 + 3 * 3)
    assert losses[-1] < 0.9 * losses[0]


def test_every_epoch_fits_the_value_function_to_other_minibatches() -> None:
    steps = env_steps(4)
    settings: Any = {"value_epochs": 2, "value_minibatch_size": 12, "gradient_clip_norm": 0.01}
    settings |= {"learning_rate": linear_schedule(0.5, 0.0, num_steps=10), "env_steps": steps}
    agent, twin = create(**settings), create(**settings)
    rows, _ = rollout(agent, FOUR_ACTIONS)
    extra = agent.train(tensors(rows), tf.ones(ROWS)).extra
    accepted, losses = extra["accepted"], []
    seed = stateless_seed(stream_key(0, "trpo"), tf.cast(accepted, tf.int64))
    for part in permutations(2, ROWS, seed).numpy()[:, :36].reshape(-1, 12):
        batch = tensors(tf.nest.map_structure(lambda x, part=part: x[part], rows))
        gradients, loss_info = twin.differentiate(batch, tf.ones(12))
        losses.append(float(loss_info.loss))
        scale = 0.3 * 0.01 / loss_info.extra["gradient_norm"]
        for variable, gradient in zip(twin.gradient_variables(), gradients, strict=True):
            variable.assign_sub(scale * gradient)
    assert_close(values_of(agent.gradient_variables()), values_of(twin.gradient_variables()))
    # Two epochs of 40 // 12 minibatches, and a step of the policy unless it is rejected.
    assert agent.train_step_counter == int(accepted) + 2 * 3
    assert_close(extra["value_loss"], np.mean(losses))


def test_a_minibatch_of_all_rows_is_a_plain_gradient_step() -> None:
    agent = create(value_epochs=1, value_minibatch_size=1000, learning_rate=0.1)
    rows, valid = rollout(agent, FOUR_ACTIONS)
    distribution, _ = agent.actor_critic(rows.observation[:, 0])
    entropy = distribution.entropy()[valid]
    with tf.GradientTape() as tape:
        value = agent.actor_critic.value(rows.observation[:, 0])
        errors = rows.policy_info.value_target[:, 0] - value
        loss = tf.reduce_mean((errors**2)[valid])
    gradients = tape.gradient(loss, agent.gradient_variables())
    before = values_of(agent.gradient_variables())
    logged = agent.train(tensors(rows), tf.ones(ROWS)).extra
    assert_close(logged["value_loss"], loss)
    assert_close(logged["loss"], loss - logged["surrogate"])
    assert_close(logged["entropy"], tf.reduce_mean(entropy))
    expected = [w - 0.1 * g for w, g in zip(before, gradients, strict=True)]
    assert_close(values_of(agent.gradient_variables()), expected)


def test_user_errors() -> None:
    shared = {"num_envs": 1, "seed": 0, "env_steps": env_steps()}
    with (
        bound({"ActorCritic.share_encoder": True}),
        pytest.raises(UserError, match="ActorCritic.share_encoder = False"),
    ):
        create_trpo_agent(specs(), FOUR_ACTIONS, **shared)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_kl", (0, -0.1, None)),
        ("cg_iterations", (0, 2.5)),
        ("cg_damping", (-1, 0)),
        ("fisher_fraction", (0, 1.5)),
        ("line_search_steps", (0, None)),
        ("line_search_shrink", (0, 1.5)),
    ],
)
def test_a_trust_region_that_makes_no_sense_is_refused(name: str, values: tuple) -> None:
    for value in values:
        with pytest.raises(UserError, match=f"TrustRegion.{name} = {value}: must be a "):
            TrustRegion(**{name: value})


def test_gradients_are_not_accumulated() -> None:
    with pytest.raises(UserError, match="collect a longer rollout"):
        create(accumulate_updates=2)
