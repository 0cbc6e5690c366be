"""Tests of SAC against plain NumPy, and of its differences from TF-Agents' agent."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_references import (
    FIRST,
    FOUR_ACTIONS,
    GO_ON,
    LAST,
    MID,
    PIXELS,
    TERMINATE,
    THREE_NUMBERS,
    TRUNCATE,
    TWO_MOTORS,
    Array,
    as_float32,
    as_float64,
    assert_close,
    assert_same,
    check_train_applies_gradients,
    dense_layers,
    env_steps,
    float64,
    numeric_gradients,
    random_events,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from tf_agents.agents.ddpg import critic_network
from tf_agents.agents.sac import sac_agent as stock_sac
from tf_agents.agents.sac import tanh_normal_projection_network
from tf_agents.networks import actor_distribution_network
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import Trajectory, restart

from pipeline.agents.sac import SacAgent, create_sac_agent
from pipeline.networks.sac_networks import CriticNetwork, SquashedGaussianHead, squashed_gaussian
from pipeline.ops.optimizers import Adam
from pipeline.ops.randomness import stateless_seed, stream_key
from pipeline.ops.schedules import linear_schedule
from pipeline.utils.errors import UserError

GAMMA, SEED, ROWS = 0.9, 11, 24
SGD = tf.keras.optimizers.legacy.SGD


def create(observation_spec=THREE_NUMBERS, action_spec=TWO_MOTORS, **kwargs: Any) -> SacAgent:
    settings = {
        "discount": GAMMA,
        "num_envs": 1,
        "seed": SEED,
        "env_steps": env_steps(),
        "actor_units": (4,),
        "critic_units": (5,),
        "initial_alpha": 0.4,
        "target_entropy": -0.7,
    } | kwargs
    agent = create_sac_agent(specs(observation_spec), action_spec, **settings)
    rng = np.random.default_rng(7)
    networks = (*agent.critics, agent.actor_network)
    targets = agent.target_critics
    for part in (*networks, *targets):
        randomize(rng, part.trainable_variables)
    return agent


@pytest.fixture(scope="module")
def agent() -> SacAgent:
    """Returns an agent that no test trains."""
    return create()


def random_batch(seed: int, observation_spec=THREE_NUMBERS, rows: int = ROWS) -> Trajectory:
    rng = np.random.default_rng(seed)
    starts = rng.choice([FIRST, MID, LAST], rows)
    events = random_events(rng, (rows, 2))
    return random_sequences(rng, TWO_MOTORS, events, starts, observation_spec)


class Weights(NamedTuple):
    """All weights that the losses use, in float64."""

    actor: list[Array]
    critics: tuple[list[Array], list[Array]]
    targets: tuple[list[Array], list[Array]]
    log_alpha: float


def weights_of(agent: SacAgent) -> Weights:
    def of(network: CriticNetwork) -> list[Array]:
        return float64(network.layers_on_features.trainable_weights)

    return Weights(
        float64(agent.actor_network.head.trainable_weights),
        (of(agent.critics[0]), of(agent.critics[1])),
        (of(agent.target_critics[0]), of(agent.target_critics[1])),
        float(agent.gradient_variables()["alpha"][0]),
    )


def squash(action: Array) -> Array:
    low, high = TWO_MOTORS.minimum, TWO_MOTORS.maximum
    return (action - (low + high) / 2) / ((high - low) / 2)


def act(actor: list[Array], observation: Array, noise: Array) -> tuple[Array, Array]:
    """Returns squashed actions and the logarithm of their density in [-1, 1]^2."""
    parameters = dense_layers(observation, actor)
    mean, log_std = parameters[:, :2], np.clip(parameters[:, 2:], -20, 2)
    std = np.exp(log_std)
    u = mean + std * noise
    log_normal = -((u - mean) ** 2) / (2 * std**2) - log_std - np.log(2 * np.pi) / 2
    return np.tanh(u), np.sum(log_normal - np.log(1 - np.tanh(u) ** 2), -1)


def q_values(critics: tuple[list[Array], ...], observation: Array, squashed: Array) -> list[Array]:
    inputs = np.concatenate([observation, squashed], -1)
    return [dense_layers(inputs, critic)[:, 0] for critic in critics]


def noise_of(update: int) -> Array:
    """Returns noise [2, ROWS, 2] for the critics' target and for the actor."""
    seed = stateless_seed(stream_key(SEED, "sac"), tf.constant(update, tf.int64))
    return tf.random.stateless_normal([2, ROWS, 2], seed).numpy().astype(np.float64)


def reference_target(weights: Weights, batch: Trajectory, noise: Array) -> Array:
    targets = as_float64(batch.reward[:, 0])
    squashed, log_prob = act(weights.actor, batch.observation[:, 1], noise)
    values = np.minimum(*q_values(weights.targets, batch.observation[:, 1], squashed))
    for row in range(ROWS):
        if batch.discount[row, 0] == 1.0:
            entropy_bonus = -np.exp(weights.log_alpha) * log_prob[row]
            targets[row] += GAMMA * (values[row] + entropy_bonus)
    return targets


def transitions(batch: Trajectory) -> Array:
    return np.flatnonzero(batch.step_type[:, 0] != LAST)


def reference_critic_loss(
    critics: tuple[list[Array], ...], targets: Array, batch: Trajectory
) -> float:
    rows = transitions(batch)
    estimates = q_values(critics, batch.observation[rows, 0], squash(batch.action[rows, 0]))
    return sum(np.mean((q - targets[rows]) ** 2) / 2 for q in estimates)


def reference_actor_loss(
    actor: list[Array], weights: Weights, batch: Trajectory, noise: Array
) -> float:
    rows = transitions(batch)
    observation = batch.observation[rows, 0]
    squashed, log_prob = act(actor, observation, noise[rows])
    values = np.minimum(*q_values(weights.critics, observation, squashed))
    return np.mean(np.exp(weights.log_alpha) * log_prob - values)


def test_the_standard_deviation_is_bounded() -> None:
    head = SquashedGaussianHead(TWO_MOTORS, (1,), tf.keras.initializers.Zeros)
    head(tf.zeros([1, 3]))
    head.parameters.bias.assign([0.0, 0.0, -50.0, 9.0])
    assert_same(head(tf.zeros([1, 3]))[1], as_float32([[-20, 2]]))


@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients(agent: SacAgent, seed: int) -> None:
    batch, weights, noise = random_batch(seed), weights_of(agent), noise_of(0)
    assert {FIRST, MID, LAST} == set(batch.step_type[:, 0])
    assert {0.0, 1.0} == set(batch.discount[transitions(batch), 0])
    gradients, loss_info = agent.gradients(tensors(batch), tf.ones(ROWS))
    targets = reference_target(weights, batch, noise[0])

    def critic_loss(flat: list[Array]) -> float:
        half = len(flat) // 2
        return reference_critic_loss((flat[:half], flat[half:]), targets, batch)

    flat = [*weights.critics[0], *weights.critics[1]]
    assert_close(loss_info.extra["critic_loss"], critic_loss(flat), 1e-4)
    assert_close(gradients["critic"], numeric_gradients(critic_loss, flat), 1e-3)

    def actor_loss(actor: list[Array]) -> float:
        return reference_actor_loss(actor, weights, batch, noise[1])

    assert_close(loss_info.extra["actor_loss"], actor_loss(weights.actor), 1e-4)
    assert_close(gradients["actor"], numeric_gradients(actor_loss, weights.actor), 1e-3)

    rows = transitions(batch)
    _, log_prob = act(weights.actor, batch.observation[rows, 0], noise[1][rows])

    def alpha_loss(log_alpha: list[Array]) -> float:
        return float(-np.mean(log_alpha[0] * (log_prob - 0.7)))

    expected = numeric_gradients(alpha_loss, [np.array(weights.log_alpha)])
    assert_close(gradients["alpha"], expected, 1e-4)
    assert_close(loss_info.extra["entropy"], -log_prob.mean(), 1e-4)
    assert_close(loss_info.extra["alpha"], 0.4)
    taken = q_values(weights.critics, batch.observation[rows, 0], squash(batch.action[rows, 0]))[0]
    assert_close(loss_info.extra["q_mean"], taken.mean(), 1e-4)
    assert set(agent.loss_names) <= loss_info.extra.keys()


@pytest.mark.parametrize(("event", "bootstraps"), [(TRUNCATE, True), (TERMINATE, False)])
def test_only_truncation_bootstraps_with_the_final_observation(
    agent: SacAgent, event: int, bootstraps: bool
) -> None:
    rng = np.random.default_rng(0)
    events = np.tile([event, GO_ON], (ROWS, 1))
    batch = random_sequences(rng, TWO_MOTORS, events, np.full(ROWS, MID))
    other = batch.replace(observation=batch.observation.copy())
    other.observation[:, 1] = rng.normal(size=(ROWS, 3))
    errors = [
        agent.gradients(tensors(b), tf.ones(ROWS))[1].extra["td_error"].numpy()
        for b in (batch, other)
    ]
    moved = abs(errors[0] - errors[1])
    assert np.all(moved > 0) if bootstraps else not moved.any()


def with_other_boundary_rows(batch: Trajectory) -> Trajectory:
    """Returns the same transitions with different contents in the boundary rows."""
    other, boundary = random_batch(99), batch.step_type[:, 0] == LAST

    def mix(old: Array, new: Array) -> Array:
        return np.where(boundary.reshape(ROWS, *[1] * (old.ndim - 1)), new, old)

    return batch.replace(
        observation=mix(batch.observation, other.observation),
        action=mix(batch.action, other.action),
        reward=mix(batch.reward, other.reward + 100.0),
        discount=mix(batch.discount, other.discount),
    )


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_boundary_rows_move_nothing(agent: SacAgent, seed: int) -> None:
    batch = random_batch(seed)
    results = [
        agent.gradients(tensors(b), tf.ones(ROWS)) for b in (batch, with_other_boundary_rows(batch))
    ]
    assert_same(results[0][0], results[1][0])
    for name in agent.loss_names:
        assert_same(results[0][1].extra[name], results[1][1].extra[name])


def stock_agent() -> stock_sac.SacAgent:
    return stock_sac.SacAgent(
        specs(),
        TWO_MOTORS,
        critic_network=critic_network.CriticNetwork((THREE_NUMBERS, TWO_MOTORS)),
        actor_network=actor_distribution_network.ActorDistributionNetwork(
            THREE_NUMBERS,
            TWO_MOTORS,
            continuous_projection_net=tanh_normal_projection_network.TanhNormalProjectionNetwork,
        ),
        actor_optimizer=SGD(0.1),
        critic_optimizer=SGD(0.1),
        alpha_optimizer=SGD(0.1),
    )


def test_stock_agent_learns_from_boundary_rows() -> None:
    rng = np.random.default_rng(1)
    events = np.tile([GO_ON, GO_ON], (ROWS, 1))
    batch = random_sequences(rng, TWO_MOTORS, events, np.full(ROWS, LAST))
    ours, stock, changed = create(optimizer=SGD), stock_agent(), {}
    for name, learner, trained in (
        ("ours", ours, tf.nest.flatten(ours.gradient_variables())),
        ("stock", stock, stock.collect_policy.variables()),
    ):
        before = values_of(trained)
        learner.train(tensors(batch), tf.ones(ROWS))
        pairs = zip(values_of(trained), before, strict=True)
        changed[name] = any(np.any(x != y) for x, y in pairs)
    assert changed == {"ours": False, "stock": True}


def test_a_batch_of_boundary_rows_teaches_nothing(agent: SacAgent) -> None:
    batch = random_batch(0)
    batch = batch.replace(step_type=np.full((ROWS, 2), LAST, np.int32))
    gradients, loss_info = agent.gradients(tensors(batch), tf.ones(ROWS))
    assert not any(np.any(g) for g in tf.nest.flatten(gradients))
    assert loss_info.loss == 0.0


def test_squashed_gaussian_equals_the_transformed_distribution() -> None:
    rng = np.random.default_rng(0)
    mean, log_std = rng.normal(size=(2, 50, 3))
    noise = rng.normal(size=(50, 3))
    action, log_prob = squashed_gaussian(*map(tf.constant, (mean, log_std, noise)))
    reference = tfp.distributions.TransformedDistribution(
        tfp.distributions.MultivariateNormalDiag(mean, np.exp(log_std)), tfp.bijectors.Tanh()
    )
    assert_close(action, np.tanh(mean + np.exp(log_std) * noise))
    # Actions near the bounds are left out: the inverse of tanh is not exact enough there.
    inside = np.abs(action).max(-1) < 1 - 1e-9
    assert inside.sum() > 25
    assert_close(log_prob[inside], reference.log_prob(action)[inside], 1e-6)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.5, -1.0), (-0.3, 0.7)])
def test_squashed_gaussian_integrates_to_one(mean: float, log_std: float) -> None:
    noise = np.linspace(-9, 9, 40_001)[:, None]
    action, log_prob = squashed_gaussian(
        tf.fill([40_001, 1], tf.constant(mean, tf.float64)),
        tf.constant([[log_std]], tf.float64),
        tf.constant(noise),
    )
    assert np.trapezoid(np.exp(log_prob), action[:, 0]) == pytest.approx(1.0, abs=1e-5)


def test_squashed_gaussian_is_finite_at_the_bounds() -> None:
    noise = tf.Variable([[-40.0], [40.0]])
    with tf.GradientTape() as tape:
        action, log_prob = squashed_gaussian(tf.zeros([2, 1]), tf.zeros([2, 1]), noise)
    assert_same(action, as_float32([[-1], [1]]))
    assert np.isfinite(log_prob).all() and np.isfinite(tape.gradient(log_prob, noise)).all()


def test_policies_stay_within_bounds_and_have_their_density(agent: SacAgent) -> None:
    rng = np.random.default_rng(0)
    observation = as_float32(np.tile(rng.normal(size=(1, 3)), (5000, 1)))
    time_step = restart(tf.constant(observation), 5000)
    seed = stateless_seed(5, tf.constant(0, tf.int64))
    actions = agent.collect_policy.action(time_step, (), seed).action.numpy()
    assert np.all((actions >= TWO_MOTORS.minimum) & (actions <= TWO_MOTORS.maximum))
    weights = weights_of(agent)
    mean = dense_layers(observation[:1], weights.actor)[:, :2]
    greedy = agent.policy.action(restart(tf.constant(observation[:1]), 1)).action
    assert_close(squash(greedy.numpy()), np.tanh(mean), 1e-4)
    # tanh keeps the median, so half of all draws lie on either side of the greedy action.
    assert np.all(abs(np.mean(actions > greedy, axis=0) - 0.5) < 0.03)
    distribution = agent.collect_policy.distribution(time_step).action
    head = agent.actor_network.head
    mean, log_std = head(tf.constant(observation))
    noise = tf.constant(as_float32(rng.normal(size=(5000, 2))))
    squashed, log_prob = squashed_gaussian(mean, log_std, noise)
    stretched = log_prob - np.log(2.0 * 0.25)  # half the ranges of the two motors
    inside = np.abs(squashed).max(-1) < 0.999
    low, high = TWO_MOTORS.minimum, TWO_MOTORS.maximum
    stretched_actions = low + (squashed + 1) / 2 * (high - low)
    density = distribution.log_prob(stretched_actions)
    assert_close(density[inside], stretched[inside], 2e-3)
    assert_close(head.from_action(stretched_actions), squashed, 1e-5)


@pytest.fixture(scope="module")
def pixel_agent() -> SacAgent:
    return create(PIXELS, optimizer=SGD, learning_rate=0.1, target_update_tau=0.25)


def encoder_variables(agent: SacAgent) -> list[tf.Variable]:
    return agent.trained["encoder"].trainable_variables


def test_both_critics_and_the_actor_share_one_encoder(pixel_agent: SacAgent) -> None:
    encoder = pixel_agent.trained["encoder"]
    assert pixel_agent.critics[0].encoder is encoder
    assert pixel_agent.critics[1].encoder is encoder
    assert pixel_agent.actor_network.encoder is encoder
    target = pixel_agent.target_critics[0].encoder
    assert pixel_agent.target_critics[1].encoder is target
    assert target is not encoder and len(encoder_variables(pixel_agent)) == 6
    trained = pixel_agent.gradient_variables()
    assert not {id(v) for v in trained["actor"]} & {id(v) for v in trained["critic"]}
    assert len({id(v) for v in trained["critic"]}) == len(trained["critic"])


def test_the_critics_alone_train_the_encoder(pixel_agent: SacAgent) -> None:
    gradients, _ = pixel_agent.gradients(tensors(random_batch(0, PIXELS)), tf.ones(ROWS))
    variables, start = encoder_variables(pixel_agent), values_of(encoder_variables(pixel_agent))
    nothing = tf.nest.map_structure(tf.zeros_like, gradients)
    everything = values_of(pixel_agent.variables)

    def moved(name: str) -> list[bool]:
        pixel_agent.apply({**nothing, name: gradients[name]})
        result = [bool(np.any(v.numpy() != s)) for v, s in zip(variables, start, strict=True)]
        for variable, value in zip(pixel_agent.variables, everything, strict=True):
            variable.assign(value)
        return result

    assert all(moved("critic"))
    assert not any(moved("actor")) and not any(moved("alpha"))


def test_the_target_reads_the_target_encoder(pixel_agent: SacAgent) -> None:
    batch, weights = random_batch(0, PIXELS), weights_of(pixel_agent)
    online, target = (
        network.encoder(tf.constant(batch.observation[:, 1])).numpy()
        for network in (pixel_agent.critics[0], pixel_agent.target_critics[0])
    )
    squashed, log_prob = act(weights.actor, online, noise_of(0)[0])
    value = np.minimum(*q_values(weights.targets, target, squashed))
    soft_value = value - np.exp(weights.log_alpha) * log_prob
    expected = batch.reward[:, 0] + GAMMA * batch.discount[:, 0] * soft_value
    features = pixel_agent.critics[0].encoder(tf.constant(batch.observation[:, 0])).numpy()
    q_1, _ = q_values(weights.critics, features, squash(batch.action[:, 0]))
    _, loss_info = pixel_agent.gradients(tensors(batch), tf.ones(ROWS))
    assert_close(loss_info.extra["td_error"], expected - q_1, 1e-3)


def test_the_actor_sees_the_encoder_under_stop_gradient(pixel_agent: SacAgent) -> None:
    observation = tf.constant(random_batch(0, PIXELS).observation[:, 0])
    with tf.GradientTape() as tape:
        parameters, _ = pixel_agent.actor_network(observation)
    assert tape.gradient(parameters, encoder_variables(pixel_agent)) == [None] * 6


@pytest.mark.parametrize(
    "observation_spec",
    [
        pytest.param(THREE_NUMBERS, id="vector", marks=pytest.mark.crash),
        pytest.param(PIXELS, id="pixels"),
    ],
)
def test_targets_move_by_tau_once_an_update(observation_spec) -> None:
    learner = create(observation_spec, optimizer=SGD, learning_rate=0.1, target_update_tau=0.25)
    pairs = [
        (learner.critics[0], learner.target_critics[0]),
        (learner.critics[1], learner.target_critics[1]),
    ]
    online = [v for network, _ in pairs for v in network.trainable_variables]
    target = [v for _, network in pairs for v in network.trainable_variables]
    batch = tensors(random_batch(0, observation_spec))
    train = tf.function(learner.train, autograph=False)
    for _ in range(2):
        before, start = values_of(target), values_of(online)
        train(batch, tf.ones(ROWS))
        after = values_of(online)
        assert all(np.any(x != y) for x, y in zip(after, start, strict=True))
        expected = [0.75 * t + 0.25 * w for t, w in zip(before, after, strict=True)]
        assert_close(values_of(target), expected, 1e-6)


def test_targets_start_as_copies() -> None:
    learner = create_sac_agent(specs(PIXELS), TWO_MOTORS, num_envs=1, seed=0, env_steps=env_steps())
    first, second = learner.critics[0], learner.critics[1]
    assert_same(values_of(first.variables), values_of(learner.target_critics[0].variables))
    assert_same(values_of(second.variables), values_of(learner.target_critics[1].variables))
    kernels = [critic.layers_on_features.trainable_weights[0] for critic in (first, second)]
    assert np.any(kernels[0].numpy() != kernels[1].numpy()), "the twins are one critic"


def test_noise_depends_on_the_update_alone() -> None:
    learner, batch = create(), tensors(random_batch(0))
    gradients = tf.function(learner.gradients, autograph=False)

    def at(update: int) -> Any:
        learner.train_step_counter.assign(update)
        return gradients(batch, tf.ones(ROWS))[0]

    first, second = at(3), at(4)
    assert np.any(first["actor"][0] != second["actor"][0])
    assert np.any(first["critic"][0] != second["critic"][0])
    assert_same(at(3), first)
    other_seed = create(seed=SEED + 1)
    other_seed.train_step_counter.assign(3)
    other = other_seed.gradients(batch, tf.ones(ROWS))[0]
    assert np.any(abs(other["actor"][0] - first["actor"][0]) > 1e-4)


def test_gradients_change_nothing_and_train_applies_them() -> None:
    first, second = create(), create()
    check_train_applies_gradients(first, second, random_batch(0))
    trained = [*first.trained["critic_2"].variables, *first.gradient_variables()["actor"]]
    expected = [*second.trained["critic_2"].variables, *second.gradient_variables()["actor"]]
    assert_same(values_of(trained), values_of(expected))


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_step_follows_the_schedule_and_the_clipped_gradients(clip: float | None) -> None:
    steps = env_steps(4)
    rate = linear_schedule(0.5, 0.0, num_steps=10)
    learner = create(env_steps=steps, learning_rate=rate, optimizer=SGD, gradient_clip_norm=clip)
    batch = tensors(random_batch(0))
    gradients, _ = learner.gradients(batch, tf.ones(ROWS))
    trained = learner.gradient_variables()
    before = {name: values_of(v) for name, v in trained.items()}
    learner.train(batch, tf.ones(ROWS))
    for name in ("critic", "actor", "alpha"):
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients[name]))
        scale = 0.3 * (1.0 if clip is None else min(1.0, clip / norm))
        expected = [w - scale * g for w, g in zip(before[name], gradients[name], strict=True)]
        assert_close(values_of(trained[name]), expected)


@pytest.mark.parametrize(
    ("optimizer", "rate", "at_4"),
    [(Adam, 0.0, 0.0), (SGD, 0.25, 0.25), (SGD, linear_schedule(0.5, 0.0, num_steps=8), 0.25)],
)
def test_the_temperature_may_have_a_learning_rate_of_its_own(optimizer, rate, at_4) -> None:
    steps = env_steps(4)
    learner, other = (
        create(env_steps=steps, initial_alpha=0.2, optimizer=optimizer, learning_rate=0.5, **own)
        for own in ({"alpha_learning_rate": rate}, {})
    )
    batch = tensors(random_batch(0))
    (gradient,) = learner.gradients(batch, tf.ones(ROWS))[0]["alpha"]
    learner.train(batch, tf.ones(ROWS))
    other.train(batch, tf.ones(ROWS))
    (log_alpha,) = values_of(learner.gradient_variables()["alpha"])
    assert_close(log_alpha, np.log(0.2) - at_4 * gradient)
    assert (log_alpha == np.float32(np.log(0.2))) == (rate == 0.0)
    for name in "critic", "actor":
        assert_same(*(values_of(x.gradient_variables()[name]) for x in (learner, other)))


def test_the_target_entropy_is_minus_the_size_of_the_action() -> None:
    batch = tensors(random_batch(0))
    default, same, other = (
        create(target_entropy=x).gradients(batch, tf.ones(ROWS))[0]["alpha"][0]
        for x in (None, -2.0, -1.0)
    )
    assert default == same != other


def test_a_target_entropy_that_no_policy_has_is_refused() -> None:
    create(target_entropy=1.38)  # uniform actions in [-1, 1]^2 have 2 log 2 = 1.386
    with pytest.raises(UserError, match=r"= 2: must be below 1.38629, .* usual target is .*, -2\."):
        create(target_entropy=2.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (FOUR_ACTIONS, "SAC needs continuous actions"),
        (tensor_spec.BoundedTensorSpec((2,), tf.float32, -np.inf, np.inf), "infinite or coincide"),
        (
            tensor_spec.BoundedTensorSpec((2,), tf.float32, [-1.0, -np.inf], 1.0),
            "infinite or coincide",
        ),
        (tensor_spec.BoundedTensorSpec((), tf.float32, 0.0, np.inf), "infinite or coincide"),
    ],
)
def test_other_actions_are_refused(spec: tensor_spec.BoundedTensorSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create(action_spec=spec)
