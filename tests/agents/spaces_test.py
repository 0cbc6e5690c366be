"""Tests of agents with nested observations, action masks and several discrete actions."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from numpy_references import (
    LAST,
    Array,
    as_float32,
    assert_close,
    assert_same,
    bound,
    dense_layers,
    env_steps,
    float64,
    numeric_gradients,
    random_events,
    random_rollout,
    random_sequences,
    randomize,
    specs,
    tensors,
    values_of,
)
from scipy import special, stats
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import restart

from pipeline.acting.policies import RandomPolicy
from pipeline.agents.a2c import create_a2c_agent
from pipeline.agents.dqn import DqnAgent, create_dqn_agent
from pipeline.agents.nstep_q import create_nstep_q_agent
from pipeline.agents.ppo import create_ppo_agent
from pipeline.agents.sac import create_sac_agent
from pipeline.agents.trpo import create_trpo_agent
from pipeline.checkpointing.saveables import weights_sha256
from pipeline.networks.encoders import create_encoder
from pipeline.networks.heads import CategoricalHead, GaussianHead
from pipeline.networks.initializers import GlorotUniform
from pipeline.ops.normalizers import ObservationNormalizer
from pipeline.ops.observations import CategoricalSpec
from pipeline.training.nan_checks import check_state, unsound_weights
from pipeline.utils.errors import UserError

ACTIONS = 5
ONE_ACTION = tensor_spec.BoundedTensorSpec((), tf.int32, 0, ACTIONS - 1)
MASK = tensor_spec.BoundedTensorSpec((ACTIONS,), tf.int8, 0, 1)
NUMBERS = tensor_spec.BoundedTensorSpec((2,), tf.float32, -1, 1)
MASKED = {"observation": NUMBERS, "action_mask": MASK}
NESTED = {
    "numbers": NUMBERS,
    "place": CategoricalSpec((), tf.int64, 2, 4),
    "cards": (CategoricalSpec((2,), tf.int64, 0, [1, 2]), tf.TensorSpec((2, 2), tf.bool)),
    "bytes": tensor_spec.BoundedTensorSpec((3,), tf.uint8, 0, 255),
}
THREE_NUMBERS_OF_SIZES = tensor_spec.BoundedTensorSpec((3,), tf.int32, 0, [1, 4, 2])
MASKED_AGENTS = {
    "dqn": create_dqn_agent,
    "nstep_q": create_nstep_q_agent,
    "ppo": create_ppo_agent,
    "a2c": create_a2c_agent,
    "trpo": create_trpo_agent,
}


def create(creator: Any, observation_spec: Any, action_spec: Any = ONE_ACTION, **kwargs: Any):
    settings = {"num_envs": 1, "seed": 0, "env_steps": env_steps()} | kwargs
    return creator(specs(observation_spec), action_spec, **settings)


def random_masks(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns masks of which each forbids most actions, and some forbid all."""
    masks = np.zeros((*shape, ACTIONS), np.int8)
    for index in np.ndindex(*shape):
        masks[index][rng.choice(ACTIONS, rng.integers(0, 3), replace=False)] = 1
    return masks


def masked_observation(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, Array]:
    numbers = as_float32(rng.uniform(-1, 1, (*shape, 2)))
    return {"observation": numbers, "action_mask": random_masks(rng, shape)}


def is_allowed(masks: Array, actions: Array) -> Array:
    chosen = np.take_along_axis(masks, actions[..., None].astype(int), -1)[..., 0]
    return (chosen == 1) | ~masks.any(-1)


# Encoders.


def one_hot(category: Array, first: int, size: int) -> Array:
    return np.eye(size)[np.asarray(category) - first]


def encoded_by_numpy(x: dict[str, Any]) -> Array:
    """Concatenates the arrays in the order of the sorted keys."""
    cards, flags = x["cards"]
    return np.concatenate(
        [
            x["bytes"] / 255,
            one_hot(cards[:, 0], 0, 2),
            one_hot(cards[:, 1], 0, 3),
            flags.reshape(len(flags), 4),
            x["numbers"],
            one_hot(x["place"], 2, 3),
        ],
        -1,
    )


def nested_observation(rng: np.random.Generator, count: int) -> dict[str, Any]:
    return {
        "numbers": as_float32(rng.uniform(-1, 1, (count, 2))),
        "place": rng.integers(2, 5, count),
        "cards": (rng.integers(0, [2, 3], (count, 2)), rng.random((count, 2, 2)) < 0.5),
        "bytes": rng.integers(0, 256, (count, 3)).astype(np.uint8),
    }


def test_a_nest_is_encoded_as_all_its_arrays() -> None:
    rng = np.random.default_rng(0)
    x = nested_observation(rng, 7)
    encoder = create_encoder(NESTED)
    encoder(tensors(x))
    randomize(rng, encoder.trainable_variables)
    weights = float64(encoder.trainable_variables)
    expected = np.maximum(dense_layers(encoded_by_numpy(x), weights), 0)
    assert_close(encoder(tensors(x)), expected)


@pytest.mark.parametrize(
    "dtype", ["uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_categories_of_the_same_sizes_are_one_hot(dtype: str) -> None:
    spec = CategoricalSpec((2, 2), dtype, 1, 3)
    x = np.random.default_rng(0).integers(1, 4, (5, 2, 2)).astype(dtype)
    flat = create_encoder(spec, of_vectors=lambda: [tf.keras.layers.Flatten()])
    assert_same(flat(tf.constant(x)), one_hot(x, 1, 3).reshape(5, 12))


def test_images_in_a_nest_have_encoders_of_their_own() -> None:
    spec = {
        "image": tensor_spec.BoundedTensorSpec((8, 8, 3), tf.uint8, 0, 255),
        "frames": tensor_spec.BoundedTensorSpec((4, 40, 40), tf.uint8, 0, 255),
        "speed": NUMBERS,
    }
    encoder = create_encoder(spec, of_vectors=lambda: [tf.keras.layers.Flatten()])
    features = encoder(tensor_spec.zero_spec_nest(spec, outer_dims=[3]))
    assert features.shape == (3, 512 + 128 + 2)  # Nature CNN, small CNN, the numbers themselves


def test_layers_of_the_user_follow_the_concatenation() -> None:
    encoder = create_encoder(NESTED, layers=lambda: [tf.keras.layers.Dense(9)])
    encoder(tensor_spec.zero_spec_nest(NESTED, outer_dims=[1]))
    assert encoder.trainable_variables[0].shape == (17, 9)


def test_a_mask_beside_several_arrays_is_not_encoded_either() -> None:
    encoder = create_encoder(MASKED | {"speed": NUMBERS})
    x = masked_observation(np.random.default_rng(0), (4,))
    x["speed"] = x["observation"]
    encoder(tensors(x))
    assert encoder.trainable_variables[0].shape[0] == 2 + 2
    agent = create(create_dqn_agent, MASKED | {"speed": NUMBERS})
    actions = agent.policy.action(restart(tensors(x), 4), (), tf.constant([1, 2])).action
    assert is_allowed(x["action_mask"], actions.numpy()).all()


def test_the_mask_is_not_encoded() -> None:
    encoder = create_encoder(MASKED)
    rng = np.random.default_rng(0)
    first, other = (masked_observation(rng, (4,)) for _ in range(2))
    other["observation"] = first["observation"]
    assert_same(encoder(tensors(first)), encoder(tensors(other)))


# Masks.


@pytest.mark.parametrize("name", MASKED_AGENTS)
def test_no_policy_chooses_a_forbidden_action(name: str) -> None:
    kwargs = {"epsilon": 0.5} if "q" in name else {}
    agent = create(MASKED_AGENTS[name], MASKED, **kwargs)
    rng = np.random.default_rng(0)
    x = masked_observation(rng, (2_000,))
    time_step = restart(tensors(x), 2_000)
    random_policy = RandomPolicy(agent.time_step_spec, agent.action_spec)
    for policy in (agent.policy, agent.collect_policy, random_policy):
        actions = policy.action(time_step, (), tf.constant([1, 2])).action
        assert actions.dtype == tf.int32
        assert is_allowed(x["action_mask"], actions.numpy()).all()
        if policy is not agent.policy:
            assert set(actions.numpy()) == set(range(ACTIONS))


def masked_batch(agent: DqnAgent, rng: np.random.Generator, count: int = 24) -> Any:
    events = random_events(rng, (count, 2))
    batch = random_sequences(rng, ONE_ACTION, events, rng.integers(0, 3, count), NUMBERS)
    return batch.replace(observation=masked_observation(rng, (count, 2)))


@pytest.mark.parametrize("double_q", [False, True])
def test_dqn_bootstraps_with_allowed_actions(double_q: bool) -> None:
    with bound({"mlp_encoder.units": (5,)}):
        agent = create(create_dqn_agent, MASKED, double_q=double_q, discount=0.9)
    rng = np.random.default_rng(1)
    randomize(rng, agent.q_network.variables)
    randomize(rng, agent.target_q_network.variables)
    batch = masked_batch(agent, rng)
    online, target = (float64(n.variables) for n in (agent.q_network, agent.target_q_network))
    expected = []
    for b in range(24):
        if batch.step_type[b, 0] == LAST:
            continue
        following = batch.observation["observation"][b, 1]
        mask = batch.observation["action_mask"][b, 1]
        actions = np.flatnonzero(mask) if mask.any() else np.arange(ACTIONS)
        of_target = dense_layers(following, target)[actions]
        chooser = dense_layers(following, online)[actions] if double_q else of_target
        value = of_target[np.argmax(chooser)]
        expected.append(batch.reward[b, 0] + 0.9 * batch.discount[b, 0] * value)
    taken = batch.action[batch.step_type[:, 0] != LAST, 0]

    def loss(weights: list[Array]) -> float:
        valid = batch.step_type[:, 0] != LAST
        q_values = dense_layers(batch.observation["observation"][valid, 0], weights)
        masks = batch.observation["action_mask"][valid, 0]
        q_taken = q_values[np.arange(len(taken)), taken]
        errors = abs(np.array(expected) - np.where(is_allowed(masks, taken), q_taken, -1e9))
        return np.where(errors <= 1, 0.5 * errors**2, errors - 0.5).mean()

    # Rows whose action was forbidden cannot be collected; they would dominate the loss.
    masks = batch.observation["action_mask"][:, 0]
    masks[np.arange(24), batch.action[:, 0]] = 1
    gradients, loss_info = agent.gradients(tensors(batch), tf.ones(24))
    assert_close(loss_info.loss, loss(online))
    assert_close(gradients, numeric_gradients(loss, online), 1e-4)


@pytest.mark.parametrize("name", ["ppo", "a2c", "trpo"])
def test_probabilities_of_allowed_actions_sum_to_one(name: str) -> None:
    agent = create(MASKED_AGENTS[name], MASKED)
    rng = np.random.default_rng(2)
    randomize(rng, agent.actor_critic.trainable_variables)
    x = masked_observation(rng, (50,))
    weights = float64(agent.actor_critic.policy_variables)
    logits = dense_layers(x["observation"], weights)
    masks = x["action_mask"] | ~x["action_mask"].any(-1, keepdims=True)
    expected = special.softmax(np.where(masks == 1, logits, -np.inf), axis=-1)
    distribution = agent.actor_critic.distribution(tensors(x))
    assert_close(distribution.probs_parameter(), expected)
    assert_close(distribution.entropy(), stats.entropy(expected, axis=-1))
    other = agent.actor_critic.distribution(tensors(masked_observation(rng, (50,))))
    assert np.isfinite(distribution.kl_divergence(distribution).numpy()).all()
    with tf.GradientTape() as tape:
        distribution = agent.actor_critic.distribution(tensors(x))
        value = tf.reduce_sum(distribution.entropy()) + tf.reduce_sum(distribution.log_prob(0))
    assert other.batch_shape == (50,)
    for gradient in tape.gradient(value, agent.actor_critic.policy_variables):
        assert np.isfinite(gradient.numpy()).all()


# Several discrete actions.


def multi_categorical(rng: np.random.Generator) -> tuple[Any, Array, Array]:
    head = CategoricalHead(THREE_NUMBERS_OF_SIZES, GlorotUniform)
    features = as_float32(rng.normal(size=(6, 4)))
    head(tf.constant(features))
    randomize(rng, head.trainable_variables)
    kernel, bias = float64(head.trainable_variables)
    logits = (features @ kernel + bias).reshape(6, 3, 5)
    for number, size in enumerate([2, 5, 3]):
        logits[:, number, size:] = -np.inf
    return head(tf.constant(features)), special.log_softmax(logits, -1), features


def test_several_discrete_actions_are_independent() -> None:
    rng = np.random.default_rng(0)
    distribution, log_probs, _ = multi_categorical(rng)
    actions = rng.integers(0, [2, 5, 3], (6, 3)).astype(np.int32)
    expected = np.take_along_axis(log_probs, actions[..., None], -1)[..., 0].sum(-1)
    assert_close(distribution.log_prob(actions), expected)
    assert_close(distribution.entropy(), stats.entropy(np.exp(log_probs), axis=-1).sum(-1))
    assert_same(distribution.mode(), log_probs.argmax(-1))
    assert distribution.mode().dtype == tf.int32


def test_several_discrete_actions_are_drawn_with_their_probabilities() -> None:
    distribution, log_probs, _ = multi_categorical(np.random.default_rng(3))
    drawn = distribution.sample(40_000, seed=(1, 2)).numpy()
    assert drawn.dtype == np.int32
    for number, size in enumerate([2, 5, 3]):
        shares = (drawn[:, :, number, None] == np.arange(size)).mean(0)
        np.testing.assert_allclose(shares, np.exp(log_probs[:, number, :size]), atol=0.012)


def test_random_actions_are_uniform_in_each_number() -> None:
    policy = RandomPolicy(specs(NUMBERS), THREE_NUMBERS_OF_SIZES)
    time_step = restart(tf.zeros([30_000, 2]), 30_000)
    actions = policy.action(time_step, (), tf.constant([3, 4])).action.numpy()
    for number, size in enumerate([2, 5, 3]):
        shares = (actions[:, number, None] == np.arange(size)).mean(0)
        np.testing.assert_allclose(shares, 1 / size, atol=0.01)


@pytest.mark.parametrize("creator", [create_dqn_agent, create_nstep_q_agent])
def test_q_learning_refuses_several_actions(creator: Any) -> None:
    with pytest.raises(UserError, match="single discrete action, .* shape .3,."):
        create(creator, NUMBERS, THREE_NUMBERS_OF_SIZES)


@pytest.mark.parametrize("creator", [create_ppo_agent, create_a2c_agent, create_trpo_agent])
def test_on_policy_agents_learn_several_actions(creator: Any) -> None:
    agent = create(creator, NUMBERS, THREE_NUMBERS_OF_SIZES)
    rng = np.random.default_rng(0)
    rows = random_rollout(rng, THREE_NUMBERS_OF_SIZES, 8, 4)
    rows = rows.replace(observation=rows.observation[..., :2])
    info = agent.collect_data_spec.policy_info._replace(
        log_probability=tf.fill([8, 4], -math.log(2 * 5 * 3)), value=tf.zeros([8, 4])
    )
    rows = tensors(rows.replace(policy_info=info))
    final = restart(tf.zeros([4, 2]), 4)
    prepared = agent.prepare(rows, final)
    batch = tf.nest.map_structure(lambda x: tf.reshape(x, [32, 1, *x.shape[2:]]), prepared)
    before = values_of(agent.actor_critic.trainable_variables)
    loss_info = agent.train(batch, weights=tf.ones(32))
    assert np.isfinite(float(loss_info.loss))
    changed = [
        np.any(old != new.numpy())
        for old, new in zip(before, agent.actor_critic.trainable_variables, strict=True)
    ]
    assert all(changed)


# Continuous actions in units of their bounds.


def gaussian(spec: tensor_spec.BoundedTensorSpec, **kwargs: Any) -> tuple[Array, Array]:
    """Returns the mean of the head for features of zeros with a bias of 0.5, and its deviation."""
    head = GaussianHead(spec, GlorotUniform, **kwargs)
    head(tf.zeros([1, 4]))
    head.mean.bias.assign(tf.fill(head.mean.bias.shape, 0.5))
    distribution = head(tf.zeros([1, 4]))
    return distribution.mean().numpy()[0], distribution.stddev().numpy()[0]


MAX = np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("low", "high", "mean", "deviation"),
    [
        ([-2.0, 0.0], [2.0, 10.0], [1.0, 7.5], [2.0, 5.0]),
        ([-1.0, -2_000.0], [1.0, 2_000.0], [0.5, 1_000.0], [1.0, 2_000.0]),
        ([-np.inf, -MAX], [np.inf, MAX], [0.5, 0.5], [1.0, 1.0]),
        ([0.0, 30.0], [np.inf, 30.0], [0.5, 30.5], [1.0, 1.0]),
        ([10.0, -np.inf], [np.inf, -5.0], [10.5, -4.5], [1.0, 1.0]),
        ([0.0, 2e37], [MAX, 3e38], [0.5, 2e37], [1.0, 1.0]),
    ],
)
def test_the_gaussian_is_in_units_of_the_bounds(
    low: Any, high: Any, mean: Any, deviation: Any
) -> None:
    spec = tensor_spec.BoundedTensorSpec((2,), tf.float32, low, high)
    found = gaussian(spec)
    assert_close(found[0], mean)
    assert_close(found[1], deviation)
    unscaled = gaussian(spec, scale_actions=False)
    assert_same(unscaled[0], as_float32([0.5, 0.5]))
    assert_same(unscaled[1], as_float32([1.0, 1.0]))


# Normalisers.


def test_only_numbers_of_a_nest_are_normalised() -> None:
    rng = np.random.default_rng(0)
    flat = nested_observation(rng, 12)
    rows = tf.nest.map_structure(lambda x: x.reshape(3, 4, *x.shape[1:]), flat)
    normalizer = ObservationNormalizer(NESTED, clip=1.5)
    normalizer.update(tensors(rows), tf.ones([3, 4]))
    found = normalizer(tensors(flat))
    for path in ("numbers", "bytes"):
        x = flat[path].astype(np.float64)
        assert_close(found[path], np.clip((x - x.mean(0)) / x.std(0), -1.5, 1.5))
    assert_same(found["place"], flat["place"])
    assert_same(found["cards"][0], flat["cards"][0])


def test_masks_are_not_normalised() -> None:
    rng = np.random.default_rng(0)
    x = masked_observation(rng, (3, 4))
    normalizer = ObservationNormalizer(MASKED)
    normalizer.update(tensors(x), tf.ones([3, 4]))
    first = tf.nest.map_structure(lambda a: a[0], x)
    assert_same(normalizer(tensors(first))["action_mask"], first["action_mask"])


TWO_MOTORS = tensor_spec.BoundedTensorSpec((2,), tf.float32, -1.0, 1.0)
OFF_POLICY = {
    "dqn": (
        create_dqn_agent,
        ONE_ACTION,
        {"target_update_period": 1, "target_update_tau": 0.1},
    ),
    "nstep_q": (create_nstep_q_agent, ONE_ACTION, {}),
    "sac": (create_sac_agent, TWO_MOTORS, {}),
}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_agents_without_rollouts_normalise_what_they_collect(name: str) -> None:
    creator, action_spec, kwargs = OFF_POLICY[name]
    agent = create(creator, NUMBERS, action_spec, normalize_observations=True, **kwargs)
    assert agent.normalizer is not None
    rng = np.random.default_rng(0)
    rows = random_rollout(rng, action_spec, 30, 4)
    numbers = as_float32(500 + 3 * rows.observation[..., :2])
    agent.observe(tensors(rows.replace(observation=numbers)))
    seen = numbers[rows.step_type != LAST].astype(np.float64)
    x = as_float32(rng.normal(500, 3, (5, 2)))
    z_scores = (x - seen.mean(0)) / seen.std(0)
    assert_close(agent.normalizer(tf.constant(x)), z_scores, 1e-4)

    plain = create(creator, NUMBERS, action_spec, **kwargs)
    for name, network in plain.trained.items():
        for theirs, ours in zip(network.variables, agent.trained[name].variables, strict=True):
            theirs.assign(ours)
    time_step = restart(tf.constant(x), 5)
    normalised = restart(tf.constant(as_float32(z_scores)), 5)
    found = agent.policy.action(time_step, (), tf.constant([1, 2])).action
    expected = plain.policy.action(normalised, (), tf.constant([1, 2])).action
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("name", [*OFF_POLICY, "ppo"])
def test_the_digest_and_the_check_of_the_weights_know_the_normaliser(name: str) -> None:
    if name == "ppo":
        with bound({"ActorCritic.normalize_observations": True}):
            agent = create(create_ppo_agent, NUMBERS)
    else:
        creator, action_spec, kwargs = OFF_POLICY[name]
        agent = create(creator, NUMBERS, action_spec, normalize_observations=True, **kwargs)
    before = weights_sha256(agent.trained)
    mean = agent.normalizer.moments[0].mean
    mean.assign([0.5, 0.5])
    assert weights_sha256(agent.trained) != before
    experience = Mock(bad_columns=lambda: ["reward of the rows collected", "advantage"])
    agent.normalizer.moments[0].variance.assign([1e40, 1.0])  # more than float32 holds
    assert unsound_weights(agent, experience) == ""
    mean.assign([0.5, np.nan])
    message = unsound_weights(agent, experience)
    assert "is broken: reward of the rows collected and the " in message and "NaN" in message


def test_accumulated_gradients_are_checked_before_they_are_saved() -> None:
    """The losses of the batches that they are the sum of were finite."""
    creator, action_spec, kwargs = OFF_POLICY["sac"]
    agent = create(creator, NUMBERS, action_spec, accumulate_updates=2, **kwargs)
    nothing = Mock(bad_columns=list)
    time_step = restart(tf.zeros([1, 2]), 1)
    check_state(time_step, agent, nothing, 10, "")
    (total, *_) = (x for x in agent.accumulator.variables if x.dtype == tf.float32 and x.shape.rank)
    total.assign(tf.fill(total.shape, np.nan))
    with pytest.raises(UserError, match="NaN or infinite after 10 .*: the accumulated gradients"):
        check_state(time_step, agent, nothing, 10, "")


def test_updates_of_a_target_network_leave_the_statistics_alone() -> None:
    creator, action_spec, kwargs = OFF_POLICY["dqn"]
    agent = create(creator, NUMBERS, action_spec, normalize_observations=True, **kwargs)
    rng = np.random.default_rng(0)
    events = random_events(rng, (8, 2))
    batch = tensors(random_sequences(rng, ONE_ACTION, events, [0] * 8, NUMBERS))
    agent.observe(
        tf.nest.map_structure(lambda x: tf.transpose(x, [1, 0, *range(2, x.shape.rank)]), batch)
    )
    before = values_of(agent.normalizer.variables)
    assert any(np.any(x != 0) for x in before)
    for _ in range(3):
        agent.train(batch, weights=tf.ones(8))
    assert_same(values_of(agent.normalizer.variables), before)
    assert not {id(v) for v in agent.normalizer.variables} & {
        id(v) for v in [*agent.q_network.variables, *agent.target_q_network.variables]
    }
